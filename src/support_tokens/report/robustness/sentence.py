"""A held-out text with its margins: tokens in bands of colour, support tokens marked and listed."""

__all__ = ["BANDS", "SentenceView", "SupportView", "TextView", "TokenView", "sentence_view"]

from dataclasses import dataclass

import numpy as np

from support_tokens.report import format as words
from support_tokens.report.records.results import RobustnessReport
from support_tokens.report.records.robustness import MarginTrace

BANDS = 7
"""Steps of the colour scale: 0 is the largest margin, the last the smallest."""
_CONTEXT = 7  # characters shown on each side of a support token


@dataclass(frozen=True)
class TokenView:
    """One token: what is shown, its band (None where it is not ranked), its marks, and what it says when asked."""

    text: str
    band: int | None
    support: bool
    negative: bool
    said: str


@dataclass(frozen=True)
class SupportView:
    """A support token between what stands before and after it, with its position and log margin."""

    before: str
    token: str
    after: str
    position: int
    margin: str


@dataclass(frozen=True)
class TextView:
    """The text as one arm reads it, and its support tokens, smallest margin first."""

    place: int
    name: str
    tokens: tuple[TokenView, ...]
    support: tuple[SupportView, ...]


@dataclass(frozen=True)
class SentenceView:
    """All arms' texts, the limits of the colour bands (largest margin first), and a description of the plot."""

    texts: tuple[TextView, ...]
    limits: tuple[float, ...]
    said: str


def sentence_view(report: RobustnessReport) -> SentenceView:
    """What the page shows of `report.sentence`, which must be there.

    The bands are of equal width between the 2 % and 98 % quantile of the ranked margins of all arms together, so the
    colours of two arms may be compared.
    """
    assert report.sentence is not None, "the report has no sentence"
    pooled = [
        margin
        for trace in report.sentence.arms
        for margin, valid in zip(trace.log_abs_det, trace.valid, strict=True)
        if valid and margin is not None
    ]
    low, high = np.quantile(pooled, [0.02, 0.98]).tolist() if pooled else (0.0, 0.0)
    limits = tuple(np.linspace(high, low, BANDS + 1).tolist())
    places = {arm.name: place for place, arm in enumerate(report.arms)}
    texts = tuple(_text(report, trace, places[trace.arm], limits) for trace in report.sentence.arms)
    weakest = [f"{text.name} “{text.support[0].token}” at {text.support[0].position}" for text in texts if text.support]
    said = f"Log margin along the held-out text; smallest margins: {', '.join(weakest) or 'none'}."
    return SentenceView(texts, limits, said)


def _text(report: RobustnessReport, trace: MarginTrace, place: int, limits: tuple[float, ...]) -> TextView:
    tokens = tuple(_token(trace, position, limits) for position in range(len(trace.tokens)))
    support = tuple(_support(trace, position) for position in trace.support)
    return TextView(place, words.label(report, trace.arm), tokens, support)


def _support(trace: MarginTrace, position: int) -> SupportView:
    shown = [words.visible(token).replace(" ", "␣") for token in trace.tokens]
    before, after = "".join(shown[:position])[-_CONTEXT:], "".join(shown[position + 1 :])[:_CONTEXT]
    return SupportView(before, shown[position], after, position, _margin(trace.log_abs_det[position]))


def _token(trace: MarginTrace, position: int, limits: tuple[float, ...]) -> TokenView:
    margin, valid = trace.log_abs_det[position], trace.valid[position]
    negative = valid and trace.sign[position] < 0
    said = f"{_quoted(trace.tokens[position])}, position {position}: log margin {_margin(margin)}"
    said += ", negative determinant" if negative else ""
    said += "" if valid else ", not ranked"
    band = _band(margin, limits) if valid else None
    return TokenView(words.visible(trace.tokens[position]), band, position in trace.support, negative, said)


def _band(margin: float | None, limits: tuple[float, ...]) -> int:
    if margin is None:
        return BANDS - 1
    high, low = limits[0], limits[-1]
    if high <= low:
        return 0
    return min(BANDS - 1, max(0, int(BANDS * (high - margin) / (high - low))))


def _margin(margin: float | None) -> str:
    return "−∞ (singular)" if margin is None else words.signed(margin)


def _quoted(token: str) -> str:
    return f"“{words.visible(token).replace(' ', '␣')}”"
