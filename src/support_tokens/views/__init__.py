"""Views of margins: a record or a comparison to the terminal, to a notebook, to one HTML file, to PNG and SVG.

They read records only, never a model.
"""

__all__ = [
    "changes_html",
    "changes_renderable",
    "margins_fragment",
    "margins_html",
    "margins_png",
    "margins_renderable",
    "margins_svg",
]

from support_tokens.views.figure import margins_png, margins_svg
from support_tokens.views.notebook import margins_fragment
from support_tokens.views.page import changes_html, margins_html
from support_tokens.views.terminal import changes_renderable, margins_renderable
