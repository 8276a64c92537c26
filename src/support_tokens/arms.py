"""Training arms: what one run does to the model beyond cross-entropy, as configuration of a few lines."""

__all__ = [
    "ARMS",
    "Arm",
    "Attachment",
    "Barrier",
    "CrossEntropy",
    "EmbeddingNoise",
    "arm_config",
    "arm_from_config",
    "parse_arm",
]

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import TrainerCallback

from support_tokens.attach import attach_barrier
from support_tokens.callbacks import BarrierCallback
from support_tokens.errors import ArgumentError
from support_tokens.sites import hook_embeddings


@dataclass(frozen=True)
class Attachment:
    """What an arm put on a model for one run.

    Args:
        remove: Leaves the model as it was.
        callbacks: What the Trainer calls for this arm.
        save: Writes what the arm learned beside the model into a folder.
    """

    remove: Callable[[], None] = lambda: None
    callbacks: tuple[TrainerCallback, ...] = ()
    save: Callable[[Path], None] = lambda folder: None


@runtime_checkable
class Arm(Protocol):
    """A frozen dataclass of numbers with a name, a sentence, and a way to attach itself to a model.

    A new arm is one such class and one line in `ARMS`; the command line and the configuration follow from its fields.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

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


@dataclass(frozen=True)
class Barrier:
    r"""Cross-entropy plus the log-barrier of the embedding law: $L = CE - \lambda\, \mathrm{mean}_t \log|\det J_t|$.

    The law's own $W_Q, W_K$ learn with the model (theory, section 4).

    Args:
        weight: $\lambda$, nats per nat.
    """

    name: ClassVar[str] = "barrier"
    summary: ClassVar[str] = "cross-entropy and log-barrier of the embedding law"

    weight: float = field(default=0.02, metadata={"help": "weight of the log-barrier in the loss"})

    def __post_init__(self):
        _require_not_negative(self, "weight")

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """Registers the law in the model and adds the penalty to its loss in train mode."""
        handle = attach_barrier(model, self.weight, source="prior", penalty="log", seed=seed)

        def save(folder: Path) -> None:
            weights = {key: value.detach().cpu().contiguous() for key, value in handle.state_dict().items()}
            save_file(weights, folder / "barrier.safetensors")

        return Attachment(handle.remove, (BarrierCallback(handle),), save)


@dataclass(frozen=True)
class EmbeddingNoise:
    r"""Gaussian noise on the embeddings in training: $x_t + s\, \mathrm{rms}(x)\, \epsilon_t$, $\epsilon_t$ standard.

    The root mean square of the batch's embeddings is detached: no gradient asks the model to resize them in order to
    change the noise.

    Args:
        scale: $s$, standard deviation of the noise as a share of the embeddings' root mean square.
    """

    name: ClassVar[str] = "noise"
    summary: ClassVar[str] = "cross-entropy under Gaussian embedding noise in training"

    scale: float = field(
        default=0.2, metadata={"help": "standard deviation of the noise, in units of the embeddings' RMS"}
    )

    def __post_init__(self):
        _require_not_negative(self, "scale")

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """Hooks the embeddings; in eval mode they pass unchanged."""

        def disturb(x: Tensor) -> Tensor | None:
            if not model.training:
                return None
            rms = x.detach().float().square().mean().sqrt().to(x.dtype)
            # From the global generator, whose state a checkpoint of the Trainer holds, so a resumed run draws the same
            # noise. The order of the data has a generator of its own, so arms still see the same batches.
            return x + self.scale * rms * torch.randn_like(x)

        return Attachment(hook_embeddings(model, disturb).remove)


ARMS: dict[str, type] = {arm.name: arm for arm in (CrossEntropy, Barrier, EmbeddingNoise)}
"""Every arm by name."""


def parse_arm(text: str) -> Arm:
    r"""Reads an arm from the command line: `NAME` or `NAME:OPTION=NUMBER,...`.

    Args:
        text: For example `barrier:weight=0.05`.

    Returns:
        The arm.

    Raises:
        ArgumentError: Unknown arm or option, or a value that is no number in range.

    Example:
        >>> parse_arm("barrier:weight=0.05")
        Barrier(weight=0.05)
    """
    name, _, options = text.partition(":")
    values = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        try:
            values[key.strip()] = float(value)
        except ValueError:
            raise ArgumentError(
                f"arm '{text}': option '{option}' is not written NAME=NUMBER; write for example barrier:weight=0.05."
            ) from None
    return arm_from_config({"name": name.strip(), **values})


def arm_from_config(config: Mapping) -> Arm:
    """Makes an arm from what `config.json` holds: its name and its options.

    Args:
        config: `{"name": ..., option: number, ...}`.

    Raises:
        ArgumentError: Unknown arm or option, or a value out of range.

    Example:
        >>> arm_from_config({"name": "noise", "scale": 0.1})
        EmbeddingNoise(scale=0.1)
    """
    options = {key: value for key, value in config.items() if key != "name"}
    name = config.get("name")
    if name not in ARMS:
        raise ArgumentError(f"there is no arm '{name}'; known arms are {', '.join(ARMS)}.")
    known = [f.name for f in dataclasses.fields(ARMS[name])]
    for key in options:
        if key not in known:
            raise ArgumentError(f"arm '{name}' has no option '{key}'; its options are: {', '.join(known) or 'none'}.")
    return ARMS[name](**options)


def arm_config(arm: Arm) -> dict:
    """What `config.json` records of an arm.

    Example:
        >>> arm_config(Barrier(weight=0.05))
        {'name': 'barrier', 'weight': 0.05}
    """
    return {"name": arm.name, **dataclasses.asdict(arm)}  # type: ignore[call-overload]


def _require_not_negative(arm, option: str) -> None:
    value = getattr(arm, option)
    if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
        raise ArgumentError(
            f"arm '{arm.name}': {option} must be a finite number of at least 0, received {value!r}; pass such a number."
        )
