"""The private names of torch, transformers, accelerate and peft that the package uses: all of them stand here.

`tests/models/test_compat.py` says for each one what it must do, so that a new release which changes it fails one test.
"""

__all__ = [
    "assert_on_device",
    "attention_implementation",
    "execution_device",
    "inside_backward",
    "is_offloaded",
    "is_patched",
    "is_replica",
    "loss_function_of",
    "recomputing",
    "restore_loss_function",
    "save_trainer_checkpoint",
    "set_attention_implementation",
]

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from support_tokens.errors import ArgumentError


def inside_backward() -> bool:
    """Whether this code runs inside a backward pass of autograd, as recomputation for gradient checkpointing does."""
    return torch._C._current_graph_task_id() != -1


def recomputing() -> bool:
    """Whether this runs inside a backward pass, where gradient checkpointing repeats an earlier forward pass."""
    # The compiler plans recomputation itself, without running Python.
    return not torch.compiler.is_compiling() and inside_backward()


def assert_on_device(condition: Tensor, message: str) -> None:
    """Raises `message` on the device of `condition`, a boolean scalar, without waiting for its value."""
    torch._assert_async(condition, message)  # type: ignore[attr-defined]


def is_replica(module: nn.Module) -> bool:
    """Whether the module is a copy that `torch.nn.DataParallel` made for one thread."""
    return getattr(module, "_is_replica", False)


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate keeps the parameters of the module elsewhere than where it computes."""
    return getattr(getattr(module, "_hf_hook", None), "offload", False)


def is_patched(module: nn.Module) -> bool:
    """Whether this module has a forward of its own, other than its class and other than the one accelerate sets."""
    return "forward" in vars(module) and not hasattr(module, "_hf_hook")


def execution_device(module: nn.Module) -> torch.device | int | str:
    """Where the module computes; the parameters that accelerate offloads are elsewhere.

    Raises:
        ArgumentError: The module has no weights yet: they are on the device `meta` and not offloaded.
    """
    device = next(module.parameters()).device
    if device.type != "meta":
        return device
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if device is None:
        raise ArgumentError(
            "model must have its weights loaded, received embeddings on the device 'meta'; load the weights first."
        )
    return device


def loss_function_of(model: nn.Module) -> Callable[..., Tensor] | None:
    """The loss function set on this very model of transformers; None: it uses the one of its class."""
    return model.__dict__.get("_loss_function")


def restore_loss_function(model: nn.Module, function: Callable[..., Tensor] | None) -> None:
    """Sets what `loss_function_of` returned earlier; None goes back to the loss function of the class."""
    if function is not None:
        model._loss_function = function  # type: ignore[assignment]
    else:
        model.__dict__.pop("_loss_function", None)


def attention_implementation(config: Any) -> str:
    """The attention function that modules with this configuration of transformers run."""
    return config._attn_implementation or "eager"


def set_attention_implementation(config: Any, name: str) -> None:
    """Makes modules with this configuration run the attention function registered as `name`."""
    config._attn_implementation = name


def save_trainer_checkpoint(trainer: Any) -> None:
    """Makes a `transformers.Trainer` write a checkpoint of its present step."""
    trainer._save_checkpoint(trainer.model, trial=None)
