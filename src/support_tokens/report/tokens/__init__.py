"""Views of margins: a record or a comparison to the terminal, to a notebook, to one HTML file, to PNG and SVG.

They read records only, never a model.
"""

__all__ = [
    "changes_html",
    "changes_renderable",
    "in_text",
    "margins_fragment",
    "margins_html",
    "margins_png",
    "margins_renderable",
    "margins_svg",
]

from typing import TYPE_CHECKING

from support_tokens._lazy import lazy_exports

if TYPE_CHECKING:
    from support_tokens.report.tokens.figure import margins_png, margins_svg
    from support_tokens.report.tokens.notebook import margins_fragment
    from support_tokens.report.tokens.page import changes_html, margins_html
    from support_tokens.report.tokens.sanitized import in_text
    from support_tokens.report.tokens.terminal import changes_renderable, margins_renderable

__getattr__ = lazy_exports(
    __name__,
    {
        "margins_png": "figure",
        "margins_svg": "figure",
        "margins_fragment": "notebook",
        "changes_html": "page",
        "margins_html": "page",
        "in_text": "sanitized",
        "changes_renderable": "terminal",
        "margins_renderable": "terminal",
    },
)
