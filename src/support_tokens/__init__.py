"""Support tokens: stability margins of causal self-attention.

errors         errors and warnings
files          files that are never half written; JSON of a known kind and version
margins        tensors -> covariance -> Jacobian -> log|det| -> margins
law            the paper's law: density, sampling, certificates, depth, filtering
models         Hugging Face models -> attention states; loading; SmallGPT
report         frozen records as JSON -> terminal, HTML, PNG; never a model
regularizers   what is added to cross-entropy on any model: barrier, spread, SMART, noise, ...
training       text + model + regularizer -> run folder
analysis       text -> margins of its tokens
generation     signals of tokens, generation, selective answers
robustness     models x perturbations x seeds -> report
explorer       the local page
benchmark      speed and memory beside peers
cli            the command line, one verb a file
"""

__all__ = [
    "ArgumentError",
    "AttentionState",
    "BarrierHandle",
    "CaptureError",
    "DataError",
    "EmbeddingLaw",
    "EmbeddingPrior",
    "MarginController",
    "MarginReport",
    "Margins",
    "NumericalError",
    "NumericalWarning",
    "ParticleFilter",
    "RegularizerCallback",
    "RegularizerHandle",
    "RobustnessReport",
    "RunFolderError",
    "Slogdet",
    "SupportTokensError",
    "TrainingError",
    "UnsupportedModelError",
    "WarmupSchedule",
    "analyze",
    "attach",
    "attach_barrier",
    "attached_barriers",
    "attention_margins",
    "attention_slogdet",
    "capture_attention",
    "evaluate_robustness",
    "generate",
    "is_near_singular",
    "model_margins",
    "safe_slogdet",
    "score_sequences",
    "score_tokens",
    "sigma_min",
]

from typing import TYPE_CHECKING

from support_tokens._lazy import lazy_exports
from support_tokens.errors import (
    ArgumentError,
    CaptureError,
    DataError,
    NumericalError,
    NumericalWarning,
    RunFolderError,
    SupportTokensError,
    TrainingError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from support_tokens.analysis import MarginReport, analyze
    from support_tokens.generation import generate, score_sequences, score_tokens
    from support_tokens.law import EmbeddingLaw, EmbeddingPrior
    from support_tokens.law.filtering import ParticleFilter
    from support_tokens.margins import (
        AttentionState,
        Margins,
        Slogdet,
        attention_margins,
        attention_slogdet,
        is_near_singular,
        safe_slogdet,
        sigma_min,
    )
    from support_tokens.models import capture_attention, model_margins
    from support_tokens.regularizers import RegularizerCallback, RegularizerHandle, attach
    from support_tokens.regularizers.barrier import (
        BarrierHandle,
        MarginController,
        WarmupSchedule,
        attach_barrier,
        attached_barriers,
    )
    from support_tokens.report.records import RobustnessReport
    from support_tokens.robustness import evaluate_robustness

_LAZY = {
    "AttentionState": "margins",
    "RegularizerCallback": "regularizers",
    "RegularizerHandle": "regularizers",
    "attach": "regularizers",
    "BarrierHandle": "regularizers.barrier",
    "EmbeddingLaw": "law",
    "EmbeddingPrior": "law",
    "MarginController": "regularizers.barrier",
    "MarginReport": "analysis",
    "Margins": "margins",
    "ParticleFilter": "law.filtering",
    "RobustnessReport": "report.records",
    "Slogdet": "margins.linalg",
    "WarmupSchedule": "regularizers.barrier",
    "analyze": "analysis",
    "attach_barrier": "regularizers.barrier",
    "attached_barriers": "regularizers.barrier",
    "attention_margins": "margins",
    "attention_slogdet": "margins",
    "capture_attention": "models",
    "evaluate_robustness": "robustness",
    "generate": "generation",
    "is_near_singular": "margins.linalg",
    "model_margins": "models",
    "safe_slogdet": "margins.linalg",
    "score_sequences": "generation",
    "score_tokens": "generation",
    "sigma_min": "margins.linalg",
}

__getattr__ = lazy_exports(__name__, _LAZY)
