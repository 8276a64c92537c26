r"""The user's hold on an attached barrier."""

__all__ = ["BarrierHandle", "checked_weight"]

import math
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.law import EmbeddingPrior
from support_tokens.regularizers.barrier.penalties import MarginController, Weight
from support_tokens.regularizers.barrier.sources import SLOT

if TYPE_CHECKING:
    from support_tokens.regularizers.barrier.objective import BarrierSlot, BarrierTerm


class BarrierHandle:
    r"""The user's hold on an attached barrier: what it measured, its weight, and the way to take it off.

    Made by `attach_barrier`.
    """

    def __init__(self, barrier: "BarrierTerm", model: nn.Module) -> None:
        self._barrier = barrier
        self._model = weakref.ref(model)

    def __repr__(self) -> str:
        state = "attached" if self.attached else "removed"
        return f"BarrierHandle(penalty={self._barrier.penalty!r}, weight={self.weight!r}, {state})"

    @property
    def _slot(self) -> "BarrierSlot | None":
        model = self._model()
        slot = None if model is None else getattr(model, SLOT, None)
        return slot if slot is not None and any(b is self._barrier for b in slot.barriers()) else None

    @property
    def attached(self) -> bool:
        """Whether the barrier still acts on its model."""
        return self._slot is not None

    @property
    def waiting(self) -> bool:
        """Whether the last forward pass in train mode has entered no loss yet."""
        return self.attached and self._barrier.source.waiting

    @property
    def last(self) -> dict[str, float]:
        """The last training step: `ce`, `penalty`, `log_margin_mean`, `log_margin_min` in nats, `negative_share`;
        empty before it, and without `ce` where the loss was computed outside of the model.

        Reading it synchronises with the device; the training step itself does not.
        """
        return {name: float(value) for name, value in self._barrier.record.items()}

    @property
    def law(self) -> EmbeddingPrior:
        """The law whose coupling the barrier acts on.

        Raises:
            ArgumentError: The barrier acts on the model's own attention.
        """
        if (law := self._law) is None:
            raise ArgumentError("a law belongs to source='prior', and this barrier has source='model'; attach another.")
        return law

    @property
    def _law(self) -> EmbeddingPrior | None:
        return getattr(self._barrier.source, "law", None)

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return {} if self._law is None else {**dict(self._law.named_parameters()), **dict(self._law.named_buffers())}

    def parameters(self) -> list[nn.Parameter]:
        """What the barrier adds to the parameters that an optimiser must train: W_Q and W_K of the law, if any."""
        return [parameter for parameter in self._barrier.source.parameters() if parameter.requires_grad]

    @property
    def weight(self) -> Weight:
        r"""$\lambda$: a number, a schedule or a controller; may be set."""
        return self._barrier.weight

    @weight.setter
    def weight(self, value: Weight) -> None:
        self._barrier.weight = checked_weight(value)

    @property
    def present_weight(self) -> float:
        r"""$\lambda$ at this step; reading a controller's synchronises with the device."""
        return float(self._barrier.present_weight())

    @property
    def step(self) -> int:
        """Steps the schedule has seen: penalties computed, unless set from outside (to optimiser steps, say)."""
        return int(self._barrier.steps)

    @step.setter
    def step(self, value: int) -> None:
        self._barrier.steps = torch.tensor(int(value))

    @property
    def counted(self) -> int:
        """Penalties that entered a loss since the barrier was attached."""
        return int(self._barrier.counted)

    def penalty(self, labels: Tensor | None = None, num_items: Tensor | int | None = None) -> Tensor:
        r"""Mean penalty of the last forward pass in train mode, a scalar with gradient, without $\lambda$.

        For a loop that computes its loss from logits, without labels in the forward pass; it counts once a pass.

        Args:
            labels: Targets `(B, ...)`, -100 where there is none.
            num_items: Number of targets in the whole batch, of which this is a micro-batch; None: the mean over tokens.

        Raises:
            CaptureError: There was no such pass, or its loss has already counted the penalty.
        """
        penalty = self._barrier.mean_penalty(labels, num_items)
        if (slot := self._slot) is not None:
            slot.count(self._barrier)
        return penalty

    def weighted_penalty(self, labels: Tensor | None = None, num_items: Tensor | int | None = None) -> Tensor:
        r"""$\lambda$ times `penalty()`, to be added to a loss."""
        weight = self._barrier.present_weight()
        return weight * self.penalty(labels, num_items)

    def state_dict(self) -> dict[str, Tensor]:
        """What the barrier learned and drew, to be saved beside the model's checkpoint: weights of the law, state of
        the position sampler, step, weight of a controller.

        Where parameters are sharded (FSDP), every process must call it.
        """
        law = {f"law.{name}": _whole(value) for name, value in self._tensors.items()}
        state = {**law, "positions.rng": self._barrier.generator.get_state(), "step": torch.tensor(self.step)}
        if isinstance(self.weight, MarginController):
            state["controller"] = self.weight(self.step).clone()
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take up the state that `state_dict` gave.

        Raises:
            ArgumentError: It is of a barrier of another kind or size.
        """
        law = {name.removeprefix("law."): value for name, value in state.items() if name.startswith("law.")}
        own = self._tensors
        sizes = [{name: tuple(value.shape) for name, value in law_.items()} for law_ in (own, law)]
        if sizes[0] != sizes[1] or ("controller" in state) != isinstance(self.weight, MarginController):
            raise ArgumentError(
                f"the state must be of a law of shapes {sizes[0]} and of the same kind of weight, received {sizes[1]} "
                f"with the entries {', '.join(state)}; attach the barrier with the options it was saved with."
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(_alike(law[name], tensor))
        self._barrier.generator.set_state(state["positions.rng"].cpu())
        self.step = int(state["step"])
        if isinstance(self.weight, MarginController):
            self.weight.load(state["controller"])

    def remove(self) -> None:
        """Take the barrier off and leave the model as it was; a second call does nothing."""
        model, slot = self._model(), self._slot
        if model is None or slot is None:
            return
        self._barrier.source.remove()
        slot.discard(self._barrier)
        if next(slot.barriers(), None) is None:
            slot.remove(model)


def checked_weight(weight: Weight) -> Weight:
    """The weight, if it can be one.

    Raises:
        ArgumentError: It is neither a finite number of at least 0 nor callable.
    """
    if callable(weight):
        return weight
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not (0 <= weight < math.inf):
        raise ArgumentError(
            f"weight must be a finite number of at least 0 or a schedule, received {weight!r}; pass 0.02, say."
        )
    return float(weight)


def _whole(value: Tensor) -> Tensor:
    """A copy of a parameter, gathered from all processes where it is sharded."""
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()  # type: ignore[operator]


def _alike(value: Tensor, parameter: Tensor) -> Tensor:
    if not hasattr(parameter, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
