"""What was generated, as frozen values that go to JSON and back."""

__all__ = ["FINISH_REASONS", "GeneratedToken", "Generation", "GenerationRecord"]

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from support_tokens.report.records.base import Record, notebook_html

FINISH_REASONS = ("end", "length", "abstained", "nonfinite", "interrupted")
"""The end token came; `max_new_tokens` were written; a signal rose above its threshold; the logits were no numbers;
Ctrl-C."""


@dataclass(frozen=True)
class GeneratedToken:
    """One token of a generation.

    Args:
        id: In the vocabulary.
        text: What it adds to the text; empty for special tokens, and while a character is not complete.
        signals: Uncertainty of the prediction that it was drawn from, by name; None where it is no finite number.
    """

    id: int
    text: str
    signals: Mapping[str, float | None]


@dataclass(frozen=True)
class Generation:
    """A prompt and what a model made of it.

    Args:
        prompt: As text.
        prompt_tokens: Their number.
        text: What was written, without special tokens.
        tokens: Each with its signals. The token that was about to follow when a generation abstained is not among them.
        finish_reason: One of `FINISH_REASONS`.
        sentence: Why it ended, and how near a threshold came.
    """

    prompt: str
    prompt_tokens: int
    text: str
    tokens: tuple[GeneratedToken, ...]
    finish_reason: str
    sentence: str

    def __repr__(self) -> str:
        return f"Generation({self.text[:60]!r}, {len(self.tokens)} tokens, {self.finish_reason!r})"

    def _repr_html_(self) -> str:
        return notebook_html(self)


@dataclass(frozen=True)
class GenerationRecord(Record, kind="generation"):
    """All that one command generated.

    Args:
        model: Its name.
        generations: One a prompt.
        settings: Options, as JSON values.
        versions: Of packages.
    """

    model: str
    generations: tuple[Generation, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
