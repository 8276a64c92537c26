r"""Decoding: uncertainty of tokens and texts from one pass, and generation that knows its margin."""

__all__ = [
    "DEFAULT_SIGNALS",
    "SEQUENCE_SIGNALS",
    "TOKEN_SIGNALS",
    "GeneratedToken",
    "Generation",
    "GenerationRecord",
    "MarginMinP",
    "MarginProcessor",
    "MarginTemperature",
    "Signal",
    "generate",
    "score_sequences",
    "score_tokens",
]

from support_tokens.decoding.generation import DEFAULT_SIGNALS, generate
from support_tokens.decoding.record import GeneratedToken, Generation, GenerationRecord
from support_tokens.decoding.rules import MarginMinP, MarginProcessor, MarginTemperature
from support_tokens.decoding.scoring import score_sequences, score_tokens
from support_tokens.decoding.signals import SEQUENCE_SIGNALS, TOKEN_SIGNALS, Signal
