r"""Overlapping windows over a long text: each token is new in exactly one of them."""

__all__ = ["default_overlap", "model_window", "windows_of"]

from torch import nn

from support_tokens.errors import ArgumentError
from support_tokens.models import context_length
from support_tokens.report.records import Window

_LONGEST_DEFAULT = 1024


def windows_of(length: int, window: int, overlap: int) -> tuple[Window, ...]:
    """Windows over `length` tokens.

    Args:
        length: Number of tokens of the text, at least 1.
        window: Maximum number of tokens of one window.
        overlap: Number of tokens that a window repeats as context, less than `window`.

    Raises:
        ArgumentError: A size is out of range.

    Example:
        >>> [(w.start, w.first, w.stop) for w in windows_of(10, window=6, overlap=2)]
        [(0, 0, 6), (4, 6, 10)]
    """
    if window < 1:
        raise ArgumentError(f"window must be at least 1 token, received {window}; leave it out for that of the model.")
    if not 0 <= overlap < window:
        raise ArgumentError(
            f"overlap must be from 0 to {window - 1} for a window of {window} tokens, received {overlap}; lower it."
        )
    found = [Window(0, 0, min(window, length))]
    while found[-1].stop < length:
        first = found[-1].stop
        start = first - overlap
        found.append(Window(start, first, min(start + window, length)))
    return tuple(found)


def default_overlap(window: int) -> int:
    """A quarter of the window."""
    return window // 4


def model_window(model: nn.Module, window: int | None) -> int:
    """`window`, checked against the context of the model; for None that context, 1024 tokens at most.

    Raises:
        ArgumentError: `window` exceeds the context of the model.
    """
    context = context_length(model)
    if window is None:
        return min(context or _LONGEST_DEFAULT, _LONGEST_DEFAULT)
    if context is not None and window > context:
        raise ArgumentError(
            f"window must be at most the context of {type(model).__name__}, {context} tokens, received {window}; "
            "lower it; longer texts are read in several windows."
        )
    return window
