"""Uncertainty signals of tokens and texts from one forward pass."""

__all__ = [
    "SEQUENCE_SIGNALS",
    "TOKEN_SIGNALS",
    "HiddenGram",
    "chosen_signals",
    "predictive_quantities",
    "score_sequences",
    "score_tokens",
]

from support_tokens.generation.signals.hidden import HiddenGram
from support_tokens.generation.signals.logits import predictive_quantities
from support_tokens.generation.signals.scoring import score_sequences, score_tokens
from support_tokens.generation.signals.table import SEQUENCE_SIGNALS, TOKEN_SIGNALS, chosen_signals
