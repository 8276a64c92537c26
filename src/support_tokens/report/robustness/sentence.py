"""A held-out text as each arm reads it: tokens in bands of colour, support tokens marked and listed."""

__all__ = ["SUPPORT", "ArmText", "SupportToken", "sentence_texts"]

from dataclasses import dataclass

from support_tokens.report import format as fmt
from support_tokens.report.records.robustness import RobustnessReport
from support_tokens.report.records.tokens import LayerMargins
from support_tokens.report.scale import limits_of
from support_tokens.report.tokens.marked import MarkedToken, marked_tokens
from support_tokens.report.tokens.sanitized import in_table

SUPPORT = 5
"""Support tokens that are marked in each text."""
_CONTEXT = 7  # characters on each side of a support token


@dataclass(frozen=True)
class SupportToken:
    """A support token between what stands before and after it, with its position and log margin."""

    before: str
    token: str
    after: str
    position: int
    margin: str


@dataclass(frozen=True)
class ArmText:
    """The text as one arm reads it; `place` is that of the arm in the report, and with it its colour."""

    place: int
    name: str
    tokens: list[MarkedToken]
    support: list[SupportToken]


def sentence_texts(report: RobustnessReport) -> tuple[list[ArmText], tuple[float, float]]:
    """The texts of `report.sentence`, and the ends of the scale that all of them share."""
    entries = [(record.model, record.layers[0]) for record in report.sentence]
    limits = limits_of(token.margin for _, entry in entries for token in entry.ranked)
    places = {arm.name: place for place, arm in enumerate(report.arms)}
    texts = [
        ArmText(places[arm], fmt.label(report, arm), marked_tokens(entry, limits, SUPPORT), _support(entry))
        for arm, entry in entries
    ]
    return texts, limits


def _support(entry: LayerMargins) -> list[SupportToken]:
    texts = [in_table(token) for token in entry.tokens]
    return [
        SupportToken(
            "".join(texts[: token.position])[-_CONTEXT:],
            texts[token.position],
            "".join(texts[token.position + 1 :])[:_CONTEXT],
            token.position,
            fmt.signed(token.margin),
        )
        for token in entry.support_tokens(SUPPORT)
    ]
