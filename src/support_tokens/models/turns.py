"""One thread at a time on a model that is hooked: hooks cannot tell the passes of one thread from those of another."""

__all__ = ["in_turn"]

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn

from support_tokens.models.inputs import transformers_model

_TURNS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()  # pyright: ignore[reportGeneralTypeIssues]
_GUARD = threading.Lock()


@contextmanager
def in_turn(model: nn.Module) -> Iterator[None]:
    """Within it no other thread has its turn on this model, whatever wraps either of them.

    The thread that has its turn may ask again, as a callback does that writes a text within a text.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> with in_turn(model), in_turn(model):
        ...     pass
    """
    with _GUARD:
        turn = _TURNS.setdefault(transformers_model(model), threading.RLock())
    with turn:
        yield
