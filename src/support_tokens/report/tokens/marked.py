"""The tokens of a text as every view marks them: band, rank among the support tokens, sign, and a description."""

__all__ = ["MarkedToken", "marked_tokens"]

from dataclasses import dataclass

from support_tokens.report.format import number
from support_tokens.report.records.tokens import LayerMargins
from support_tokens.report.scale import band
from support_tokens.report.tokens.sanitized import breaks_after, in_table, in_text


@dataclass(frozen=True)
class MarkedToken:
    """One token.

    Args:
        text: As it is displayed, safe in a terminal.
        band: Of its margin; None where it is not ranked.
        rank: Among the support tokens, from 1; None for all others.
        negative: Whether the determinant is negative.
        breaks: How many lines end in it.
        description: One sentence of its figures.
    """

    text: str
    band: int | None
    rank: int | None
    negative: bool
    breaks: int
    description: str


def marked_tokens(entry: LayerMargins, limits: tuple[float, float], k: int) -> list[MarkedToken]:
    """Each token of a text with its marks.

    Args:
        entry: Margins along the text.
        limits: Ends of the scale, from `limits_of`.
        k: How many support tokens are marked.

    Example:
        >>> entry = LayerMargins.of_columns("ab", [1.0, -1.0], [1, -1])
        >>> [(token.band, token.rank, token.negative) for token in marked_tokens(entry, (1.0, -1.0), 1)]
        [(0, None, False), (6, 1, True)]
        >>> marked_tokens(entry, (1.0, -1.0), 1)[1].description
        'b, position 1: log margin −1.000, negative determinant'
    """
    ranks = {token.position: rank for rank, token in enumerate(entry.support_tokens(k), start=1)}
    marked = []
    for token in entry.tokens:
        parts = [f"{in_table(token)}, position {token.position}: log margin {number(token.margin)}"]
        parts += [] if token.sigma_min is None else [f"σ_min {number(token.sigma_min, 4)}"]
        parts += ["negative determinant"] if token.sign < 0 else []
        parts += [] if token.ranked else ["not ranked"]
        marked.append(
            MarkedToken(
                in_text(token),
                band(token.margin, limits) if token.ranked else None,
                ranks.get(token.position),
                token.sign < 0,
                breaks_after(token),
                ", ".join(parts),
            )
        )
    return marked
