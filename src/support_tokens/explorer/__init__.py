"""The local explorer: type a text, see its support tokens. Its page needs gradio, the rest of it does not."""

__all__ = ["Explorer", "Limits", "ModelSource", "find_models"]

from support_tokens.explorer.service import Explorer, Limits
from support_tokens.explorer.sources import ModelSource, find_models
