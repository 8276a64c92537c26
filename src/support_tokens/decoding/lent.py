"""A model lent for a while: how it is set meanwhile, and given back as it was, module by module."""

__all__ = ["evaluating", "generating_plainly"]

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import GenerationConfig


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
