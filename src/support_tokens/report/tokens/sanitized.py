r"""Tokens as a reader sees them: nothing hidden, nothing that acts."""

__all__ = ["breaks_after", "in_table", "in_text"]

from support_tokens.report.format import visible
from support_tokens.report.records.tokens import TokenMargin

_JOINERS = ("\u200c", "\u200d")


def in_text(token: TokenMargin) -> str:
    r"""A token as it stands in a text: spaces as spaces, what is hidden as a glyph, joiners that join left to do so.

    Example:
        >>> in_text(TokenMargin(0, 0, " a\n", 1, 0.0)), in_text(TokenMargin(0, 0, "\u202eb", 1, 0.0))
        (' a↵', '[U+202E]b')
        >>> in_text(TokenMargin(0, 0, "<0xF0><0x9F>", 1, 0.0, shown="🙂⟨1/2⟩"))
        '🙂⟨1/2⟩'
    """
    said = token.token if token.shown is None else token.shown
    parts, begin = [], 0
    for place in range(1, len(said) - 1):
        if said[place] in _JOINERS and not said[place - 1].isspace() and not said[place + 1].isspace():
            parts += [visible(said[begin:place]) if begin < place else "", said[place]]
            begin = place + 1
    return "".join([*parts, visible(said[begin:])])


def in_table(token: TokenMargin) -> str:
    """A token where it stands alone: spaces seen too.

    Example:
        >>> in_table(TokenMargin(0, 0, " a", 1, 0.0))
        '␣a'
    """
    return in_text(token).replace(" ", "␣")


def breaks_after(token: TokenMargin) -> int:
    r"""How many lines end in a token.

    Example:
        >>> breaks_after(TokenMargin(0, 0, "\n\n", 1, 0.0))
        2
    """
    return token.token.count("\n")
