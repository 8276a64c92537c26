"""A model lent for a while: how it is set meanwhile, and given back as it was, module by module."""

__all__ = ["generating_plainly", "in_turn"]

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn
from transformers import GenerationConfig

_TURNS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()  # pyright: ignore[reportGeneralTypeIssues]
_GUARD = threading.Lock()


@contextmanager
def in_turn(model: nn.Module) -> Iterator[None]:
    """Within it no other thread watches the model: hooks cannot tell the passes of one thread from those of another.

    The thread that has its turn may ask again, as a callback does that writes a text within a text.
    """
    inner = list(model.modules())[-1]  # the same one inside of any wrapper
    with _GUARD:
        turn = _TURNS.setdefault(inner, threading.RLock())
    with turn:
        yield


@contextmanager
def generating_plainly(model: nn.Module, ends: frozenset[int], pad: int) -> Iterator[None]:
    """Within it the model's generation settings name tokens alone.

    `model.generate` takes what its caller leaves open from them: penalties and biases, which change logits before
    anything else sees them, stops by time or by words, other caches and other searches.
    """
    owners = [vars(module) for module in model.modules() if "generation_config" in vars(module)]  # wrapped ones too
    before = [attributes["generation_config"] for attributes in owners]
    plain = GenerationConfig(eos_token_id=sorted(ends) or None, pad_token_id=pad)
    for attributes in owners:
        attributes["generation_config"] = plain
    try:
        yield
    finally:
        for attributes, settings in zip(owners, before, strict=True):
            attributes["generation_config"] = settings
