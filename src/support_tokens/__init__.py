"""Support tokens: stability margins of causal self-attention.

tokens -> embeddings -> attention state -> covariance -> Jacobian block -> log|det| -> margins -> barrier -> objective
-> training -> robustness -> report. A module imports only what stands above it:

    errors         errors and warnings
    attention      AttentionState: the contract between any model and the mathematics
    moments        causal weights, mean and (value, key) covariance
    jacobian       diagonal Jacobian blocks, dense or reduced
    logdet         sign and log|det| with a gradient that is safe at the boundary
    margins        Margins, attention_slogdet, attention_margins
    barrier        penalties of margins, schedules of their weight, the controller that holds a margin
    law            EmbeddingPrior, the paper's law
    sites          where embeddings enter a model
    sources        what a barrier acts on: the law, or the model's own attention
    attach         attach_barrier: one line on a causal language model
    callbacks      the barrier beside the Trainer of transformers
"""

from support_tokens.attach import BarrierHandle, attach_barrier, attached_barriers
from support_tokens.attention import AttentionState
from support_tokens.barrier import MarginController, WarmupSchedule
from support_tokens.errors import (
    ArgumentError,
    CaptureError,
    DataError,
    NumericalWarning,
    RunFolderError,
    SupportTokensError,
    TrainingError,
    UnsupportedModelError,
)
from support_tokens.law import EmbeddingPrior
from support_tokens.logdet import Slogdet, is_near_singular, safe_slogdet, sigma_min
from support_tokens.margins import Margins, attention_margins, attention_slogdet

__all__ = [
    "ArgumentError",
    "AttentionState",
    "BarrierHandle",
    "CaptureError",
    "DataError",
    "EmbeddingPrior",
    "MarginController",
    "Margins",
    "NumericalWarning",
    "RunFolderError",
    "Slogdet",
    "SupportTokensError",
    "TrainingError",
    "UnsupportedModelError",
    "WarmupSchedule",
    "attach_barrier",
    "attached_barriers",
    "attention_margins",
    "attention_slogdet",
    "is_near_singular",
    "safe_slogdet",
    "sigma_min",
]
