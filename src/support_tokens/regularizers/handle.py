r"""The user's hold on attached regularizers."""

__all__ = ["RegularizerHandle", "checked_weight"]

import math
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.regularizers.barrier.penalties import Weight
from support_tokens.regularizers.base import Term
from support_tokens.regularizers.slot import SLOT, RegularizerSlot


class RegularizerHandle:
    r"""What some terms of a model measured, their weights, and the way to take them off.

    Made by `attach`.
    """

    def __init__(self, terms: Sequence[Term], model: nn.Module) -> None:
        self.terms = tuple(terms)
        self._model = weakref.ref(model)

    def __repr__(self) -> str:
        state = "attached" if self.attached else "removed"
        return f"{type(self).__name__}({' + '.join(term.name for term in self.terms)}, {state})"

    @property
    def _slot(self) -> RegularizerSlot | None:
        model = self._model()
        slot = None if model is None else getattr(model, SLOT, None)
        here = [] if slot is None else list(slot.terms())
        return slot if slot is not None and any(term is one for term in self.terms for one in here) else None

    @property
    def attached(self) -> bool:
        """Whether the terms still act on their model."""
        return self._slot is not None

    @property
    def waiting(self) -> bool:
        """Whether the last forward pass in train mode has entered no loss yet."""
        slot = self._slot
        return slot is not None and any(slot.waits(term) for term in self.terms)

    @property
    def last(self) -> dict[str, float]:
        r"""Figures of the last optimiser step on this process, over all of its micro-batches; empty before it.

        `ce` and `total`, and of each term `NAME.penalty`, `NAME.weight` and its own figures:
        $\mathrm{ce} + \sum \mathrm{weight} \cdot \mathrm{penalty} = \mathrm{total}$. A term that was left out at a step
        (`every`) has none. Reading synchronises with the device; the training step itself does not.
        """
        slot = self._slot
        if slot is None:
            return {}
        figures = slot.figures.read("")
        for term, prefix in zip(self.terms, self._prefixes(), strict=True):
            figures.update({prefix + key: value for key, value in slot.figures.read(slot.place(term)).items()})
        return figures

    def _prefixes(self) -> list[str]:
        """What the names of each term's figures and tensors begin with."""
        names = [term.name for term in self.terms]
        return [f"{name}." if names.count(name) == 1 else f"{name}_{i}." for i, name in enumerate(names)]

    def parameters(self) -> list[nn.Parameter]:
        """What the terms add to the parameters that an optimiser must train."""
        return [parameter for term in self.terms for parameter in term.parameters() if parameter.requires_grad]

    @property
    def step(self) -> int:
        """Steps that schedules and `every` have seen: of the optimiser that trains the model, or, where none was seen
        yet, losses; may be set."""
        return int(self.terms[0].steps)

    @step.setter
    def step(self, value: int) -> None:
        for term in self.terms:
            term.steps = torch.tensor(int(value))

    @property
    def counted(self) -> int:
        """Losses that held the terms since they were attached."""
        return int(self.terms[0].counted)

    def weighted_penalty(
        self,
        labels: Tensor | None = None,
        num_items: Tensor | int | None = None,
        *,
        cross_entropy: Tensor | None = None,
    ) -> Tensor:
        r"""$\sum_i w_i\, \overline{p}_i$ of the last forward pass in train mode, to be added to a loss that is computed
        outside of the model; it counts once a pass.

        Args:
            labels: The target of each scored position `(B, n)`, -100 where there is none.
            num_items: Number of targets in the whole batch, of which this is a micro-batch; None: the mean over tokens.
            cross_entropy: The loss that it will be added to, for the figures alone.

        Raises:
            CaptureError: There was no such pass, or its loss has already counted the penalty.
        """
        slot = self._attached_slot()
        penalty = slot.objective(self.terms, None, labels, num_items)
        if cross_entropy is not None:
            slot.figures.add(("", "ce"), cross_entropy)
            slot.figures.add(("", "total"), cross_entropy + penalty.to(cross_entropy.device))
        return penalty

    def _attached_slot(self) -> RegularizerSlot:
        if (slot := self._slot) is None:
            raise ArgumentError("the regularizer must be attached to a model, and it was removed; attach it again.")
        return slot

    def state_dict(self) -> dict[str, Tensor]:
        """What the terms learned and drew, to be saved beside the model's checkpoint.

        Where parameters are sharded (FSDP), every process must call it.
        """
        state = {"step": torch.tensor(self.step)}
        for term, prefix in zip(self.terms, self._prefixes(), strict=True):
            state.update({prefix + key: _whole(value) for key, value in term.tensors().items()})
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take up the state that `state_dict` gave.

        Raises:
            ArgumentError: It is of other terms.
        """
        own = {"step": (), **{p + n: v.shape for t, p in zip(self.terms, self._prefixes(), strict=True)
                              for n, v in t.tensors().items() if not n.endswith("rng")}}  # fmt: skip
        received = {name: value.shape for name, value in state.items() if not name.endswith("rng")}
        if {name: tuple(shape) for name, shape in own.items()} != {n: tuple(shape) for n, shape in received.items()}:
            raise ArgumentError(
                f"the state must have the shapes {_shapes(own)}, received {_shapes(received)}; attach the regularizer "
                "with the options it was saved with."
            )
        for term, prefix in zip(self.terms, self._prefixes(), strict=True):
            term.load({key: state[prefix + key] for key in term.tensors()})
        self.step = int(state["step"])

    def remove(self) -> None:
        """Take the terms off and leave the model as it was; a second call does nothing."""
        slot = self._slot
        if slot is None:
            return
        for term in self.terms:
            term.remove()
            slot.discard(term)
        if next(slot.terms(), None) is None:
            slot.remove()


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


def _shapes(shapes: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())


def _whole(value: Tensor) -> Tensor:
    """A copy of a parameter, gathered from all processes where it is sharded."""
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()  # type: ignore[operator]
