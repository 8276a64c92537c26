"""What is added to cross-entropy: the barrier and its relatives, and their rivals."""

__all__ = [
    "ARMS",
    "SMART",
    "Arm",
    "Attachment",
    "Barrier",
    "Combined",
    "ConditionPenalty",
    "CrossEntropy",
    "EmbeddingDecay",
    "EmbeddingDropout",
    "EmbeddingScale",
    "HeldMargin",
    "InvariantBarrier",
    "LawNoise",
    "NEFTune",
    "Penalty",
    "Posterior",
    "RDrop",
    "SigmaReparam",
    "SpectralNorm",
    "TrainingNoise",
    "Variational",
    "arm_config",
    "arm_from_config",
    "arm_label",
    "log_condition",
    "parse_arm",
    "repulsive_state",
    "through_law",
]

from typing import TYPE_CHECKING

from support_tokens._lazy import lazy_exports

if TYPE_CHECKING:
    from support_tokens.regularizers.barriers import Barrier, HeldMargin, InvariantBarrier, repulsive_state
    from support_tokens.regularizers.base import Arm, Attachment, CrossEntropy, Penalty
    from support_tokens.regularizers.combined import Combined
    from support_tokens.regularizers.condition import ConditionPenalty, log_condition
    from support_tokens.regularizers.consistency import SMART, RDrop
    from support_tokens.regularizers.noise import EmbeddingDropout, LawNoise, NEFTune, TrainingNoise, through_law
    from support_tokens.regularizers.registry import ARMS, arm_config, arm_from_config, arm_label, parse_arm
    from support_tokens.regularizers.variational import Posterior, Variational
    from support_tokens.regularizers.weights import EmbeddingDecay, EmbeddingScale, SigmaReparam, SpectralNorm

__getattr__ = lazy_exports(
    __name__,
    {
        "Barrier": "barriers",
        "HeldMargin": "barriers",
        "InvariantBarrier": "barriers",
        "repulsive_state": "barriers",
        "Arm": "base",
        "Attachment": "base",
        "CrossEntropy": "base",
        "Penalty": "base",
        "Combined": "combined",
        "ConditionPenalty": "condition",
        "log_condition": "condition",
        "RDrop": "consistency",
        "SMART": "consistency",
        "EmbeddingDropout": "noise",
        "LawNoise": "noise",
        "NEFTune": "noise",
        "TrainingNoise": "noise",
        "through_law": "noise",
        "ARMS": "registry",
        "arm_config": "registry",
        "arm_from_config": "registry",
        "arm_label": "registry",
        "parse_arm": "registry",
        "Posterior": "variational",
        "Variational": "variational",
        "EmbeddingDecay": "weights",
        "EmbeddingScale": "weights",
        "SigmaReparam": "weights",
        "SpectralNorm": "weights",
    },
)
