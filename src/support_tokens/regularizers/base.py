"""The contract of a training arm, and the arm that does nothing."""

__all__ = ["Arm", "Attachment", "CrossEntropy", "Penalty", "option", "require"]

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn
from transformers import TrainerCallback

from support_tokens.errors import ArgumentError

Penalty = Callable[[nn.Module, Mapping[str, Tensor], Any], Tensor]
"""Called in train mode with model, batch and outputs: a term of the loss, the mean over the tokens of the batch."""


@dataclass(frozen=True)
class Attachment:
    """What an arm put on a model for one run.

    Args:
        remove: Leaves the model as it was, or, where the arm replaced weights by a function of others, with the weights
            that function gives.
        callbacks: What the Trainer calls for this arm.
        save: Writes what the arm learned beside the model into a folder.
        penalty: A term that joins the loss in train mode; None: none.
        arguments: Arguments of the Trainer that this arm sets.
    """

    remove: Callable[[], None] = lambda: None
    callbacks: tuple[TrainerCallback, ...] = ()
    save: Callable[[Path], None] = lambda folder: None
    penalty: Penalty | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Arm(Protocol):
    """A frozen dataclass of numbers and words with a name, a sentence, and a way to attach itself to a model.

    A new arm is one such class and one line in `ARMS`; the command line and the configuration follow from its fields.
    """

    name: ClassVar[str]

    @property
    def summary(self) -> str:
        """How the arm trains, in half a sentence."""
        ...

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """Changes how `model` trains; draws random numbers for its own set-up from `seed` alone, never globally."""
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """The plain model.

    Example:
        >>> CrossEntropy().attach(None, seed=0).callbacks
        ()
    """

    name: ClassVar[str] = "ce"
    summary: ClassVar[str] = "cross-entropy alone"

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """Leaves the model as it is."""
        return Attachment()


def option(
    default: float | int | str, text: str, *, least: float = 0.0, most: float = math.inf, choices: tuple[str, ...] = ()
) -> Any:
    """A field of an arm: its default, its documentation and its bounds, or the words it may be."""
    return field(default=default, metadata={"help": text, "least": least, "most": most, "choices": choices})


def require(arm: Any) -> None:
    """Checks every option of an arm against its bounds.

    Raises:
        ArgumentError: An option is not of its type, not finite, out of its bounds or none of its words.
    """
    for name, described in arm.__dataclass_fields__.items():
        if not described.metadata:
            continue  # name and summary
        value, least, most = getattr(arm, name), described.metadata["least"], described.metadata["most"]
        if choices := described.metadata["choices"]:
            if value not in choices:
                raise ArgumentError(f"arm '{arm.name}': {name} must be {' or '.join(choices)}, received {value!r}.")
            continue
        whole = described.type is int
        fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not (fits and math.isfinite(value) and least <= value <= most):
            kind = "whole" if whole else "finite"
            bounds = f"of at least {least:g}" + (f" and at most {most:g}" if math.isfinite(most) else "")
            raise ArgumentError(
                f"arm '{arm.name}': {name} must be a {kind} number {bounds}, received {value!r}; pass such a number."
            )
