"""Evaluation mode for a while."""

__all__ = ["evaluating"]

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within it; then each module has its own mode again, frozen ones of a model in training too.

    Example:
        >>> model = nn.Sequential(nn.Dropout(), nn.Dropout())
        >>> _ = model[1].eval()
        >>> with evaluating(model):
        ...     model[0].training
        False
        >>> model[0].training, model[1].training
        (True, False)
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        model.train(modes[model])
        for module, training in modes.items():
            module.training = training
