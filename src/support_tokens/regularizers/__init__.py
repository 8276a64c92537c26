"""What is added to cross-entropy on any causal model: the barrier and its relatives, and their rivals."""

__all__ = [
    "ALUM",
    "REGULARIZERS",
    "SAM",
    "SDBN",
    "Barrier",
    "CrossEntropy",
    "EmbeddingDecay",
    "EmbeddingDropout",
    "EmbeddingScale",
    "ExtraPass",
    "FreeLB",
    "NEFTune",
    "Noise",
    "Pass",
    "RDrop",
    "Regularizer",
    "RegularizerCallback",
    "RegularizerHandle",
    "ScaleFreeBarrier",
    "SigmaReparam",
    "Smart",
    "SpectralNorm",
    "Spread",
    "Sum",
    "TargetMargin",
    "Term",
    "attach",
    "attached",
    "check_options",
    "option",
    "parse_regularizer",
    "parts_of",
    "regularizer_config",
    "regularizer_from_config",
    "regularizer_label",
    "repulsive_state",
    "token_spread",
]

from typing import TYPE_CHECKING

from support_tokens._lazy import lazy_exports

if TYPE_CHECKING:
    from support_tokens.regularizers.adversarial import ALUM, SDBN, FreeLB, Smart
    from support_tokens.regularizers.attaching import attach, attached
    from support_tokens.regularizers.barriers import Barrier, ScaleFreeBarrier, TargetMargin, repulsive_state
    from support_tokens.regularizers.base import CrossEntropy, Regularizer, Sum, Term, parts_of
    from support_tokens.regularizers.callback import RegularizerCallback
    from support_tokens.regularizers.consistency import RDrop
    from support_tokens.regularizers.handle import RegularizerHandle
    from support_tokens.regularizers.noise import EmbeddingDropout, NEFTune, Noise
    from support_tokens.regularizers.options import check_options, option
    from support_tokens.regularizers.passes import ExtraPass, Pass
    from support_tokens.regularizers.registry import (
        REGULARIZERS,
        parse_regularizer,
        regularizer_config,
        regularizer_from_config,
        regularizer_label,
    )
    from support_tokens.regularizers.sharpness import SAM
    from support_tokens.regularizers.spread import Spread, token_spread
    from support_tokens.regularizers.weights import EmbeddingDecay, EmbeddingScale, SigmaReparam, SpectralNorm

__getattr__ = lazy_exports(
    __name__,
    {
        "ALUM": "adversarial",
        "SDBN": "adversarial",
        "FreeLB": "adversarial",
        "Smart": "adversarial",
        "attach": "attaching",
        "attached": "attaching",
        "Barrier": "barriers",
        "ScaleFreeBarrier": "barriers",
        "TargetMargin": "barriers",
        "repulsive_state": "barriers",
        "CrossEntropy": "base",
        "Regularizer": "base",
        "Sum": "base",
        "Term": "base",
        "parts_of": "base",
        "RegularizerCallback": "callback",
        "RDrop": "consistency",
        "RegularizerHandle": "handle",
        "EmbeddingDropout": "noise",
        "NEFTune": "noise",
        "Noise": "noise",
        "check_options": "options",
        "option": "options",
        "ExtraPass": "passes",
        "Pass": "passes",
        "REGULARIZERS": "registry",
        "parse_regularizer": "registry",
        "regularizer_config": "registry",
        "regularizer_from_config": "registry",
        "regularizer_label": "registry",
        "SAM": "sharpness",
        "Spread": "spread",
        "token_spread": "spread",
        "EmbeddingDecay": "weights",
        "EmbeddingScale": "weights",
        "SigmaReparam": "weights",
        "SpectralNorm": "weights",
    },
)
