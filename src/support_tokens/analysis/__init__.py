"""Analysis: which tokens of a text are its support tokens, in which layer, and what changed between two records."""

__all__ = ["FIGURES", "MarginReport", "Progress", "analyze", "analyze_texts", "token_texts", "windows_of"]

from typing import TYPE_CHECKING

from support_tokens._lazy import lazy_exports

if TYPE_CHECKING:
    from support_tokens.analysis.figures import FIGURES
    from support_tokens.analysis.margin_report import MarginReport, analyze
    from support_tokens.analysis.texts import Progress, analyze_texts
    from support_tokens.analysis.tokens import token_texts
    from support_tokens.analysis.windows import windows_of

__getattr__ = lazy_exports(
    __name__,
    {
        "FIGURES": "figures",
        "MarginReport": "margin_report",
        "analyze": "margin_report",
        "Progress": "texts",
        "analyze_texts": "texts",
        "token_texts": "tokens",
        "windows_of": "windows",
    },
)
