"""The local explorer: type a text, see its support tokens. Its server needs starlette, the rest of it does not."""

__all__ = ["Explorer", "Limits", "ModelChoice", "Results", "explorer_app", "find_models", "serve_explorer"]

from typing import TYPE_CHECKING

from support_tokens._lazy import lazy_exports

if TYPE_CHECKING:
    from support_tokens.explorer.results import Results
    from support_tokens.explorer.server import explorer_app, serve_explorer
    from support_tokens.explorer.service import Explorer, Limits
    from support_tokens.explorer.sources import ModelChoice, find_models

__getattr__ = lazy_exports(
    __name__,
    {
        "Results": "results",
        "explorer_app": "server",
        "serve_explorer": "server",
        "Explorer": "service",
        "Limits": "service",
        "ModelChoice": "sources",
        "find_models": "sources",
    },
)
