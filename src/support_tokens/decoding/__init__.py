r"""Decoding: uncertainty of tokens and texts from one pass, and generation that knows its margin."""

__all__ = [
    "SEQUENCE_SIGNALS",
    "TOKEN_SIGNALS",
    "Signal",
    "score_sequences",
    "score_tokens",
]

from support_tokens.decoding.scoring import score_sequences, score_tokens
from support_tokens.decoding.signals import SEQUENCE_SIGNALS, TOKEN_SIGNALS, Signal
