r"""Text of tokens for display: nothing hidden, nothing that a terminal or a browser would act on."""

__all__ = ["breaks_after", "in_table", "in_text"]

from support_tokens.report.format import visible
from support_tokens.report.records.tokens import TokenMargin

_JOINERS = ("\u200c", "\u200d")


def in_text(token: TokenMargin) -> str:
    r"""A token within its text: spaces as spaces, hidden characters as glyphs, joiners between letters as they are.

    Example:
        >>> in_text(TokenMargin(0, 0, " a\n", 1, 0.0)), in_text(TokenMargin(0, 0, "\u202eb", 1, 0.0))
        (' a↵', '[U+202E]b')
        >>> in_text(TokenMargin(0, 0, "<0xF0><0x9F>", 1, 0.0, sanitized="🙂⟨1/2⟩"))
        '🙂⟨1/2⟩'
    """
    text = token.token if token.sanitized is None else token.sanitized
    parts, begin = [], 0
    for place in range(1, len(text) - 1):
        if text[place] in _JOINERS and not text[place - 1].isspace() and not text[place + 1].isspace():
            parts += [visible(text[begin:place]) if begin < place else "", text[place]]
            begin = place + 1
    return "".join([*parts, visible(text[begin:])])


def in_table(token: TokenMargin) -> str:
    """A token by itself: spaces are visible too.

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
