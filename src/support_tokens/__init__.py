"""Support tokens: stability margins of causal self-attention.

tokens -> embeddings -> attention state -> covariance -> Jacobian block -> log|det| -> margins -> barrier -> objective
-> training -> robustness -> report. A module imports only what stands above it:

    errors         errors and warnings
    attention      AttentionState: the contract between any model and the mathematics
    moments        causal weights, mean and (value, key) covariance
    jacobian       diagonal Jacobian blocks, dense or reduced
    logdet         sign and log|det| with a gradient that is safe at the boundary
    margins        Margins, attention_slogdet, attention_margins
    barrier        penalties of margins and schedules of their weight
    law            EmbeddingPrior, the paper's law
    sites          where embeddings enter a model
"""

from support_tokens.attention import AttentionState
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
    "CaptureError",
    "DataError",
    "EmbeddingPrior",
    "Margins",
    "NumericalWarning",
    "RunFolderError",
    "Slogdet",
    "SupportTokensError",
    "TrainingError",
    "UnsupportedModelError",
    "attention_margins",
    "attention_slogdet",
    "is_near_singular",
    "safe_slogdet",
    "sigma_min",
]
