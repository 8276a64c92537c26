"""Uncertainty of tokens and texts from one forward pass, and generation that uses margins."""

__all__ = [
    "DEFAULT_SIGNALS",
    "SEQUENCE_SIGNALS",
    "TOKEN_SIGNALS",
    "MarginMinP",
    "MarginProcessor",
    "MarginTemperature",
    "RowSampler",
    "Signal",
    "embedding_rms",
    "encoded_prompts",
    "generate",
    "predict_under_noise",
    "score_sequences",
    "score_tokens",
]

from support_tokens.generation.generate import DEFAULT_SIGNALS, generate
from support_tokens.generation.latent import embedding_rms, predict_under_noise
from support_tokens.generation.prompts import encoded_prompts
from support_tokens.generation.rules import MarginMinP, MarginProcessor, MarginTemperature
from support_tokens.generation.sampling import RowSampler
from support_tokens.generation.signals.scoring import score_sequences, score_tokens
from support_tokens.generation.signals.table import SEQUENCE_SIGNALS, TOKEN_SIGNALS, Signal
