"""The contract of regularizers: frozen values on one side, the terms that they put on a model on the other."""

__all__ = ["AT", "CrossEntropy", "Regularizer", "Sum", "Term", "parts_of"]

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.regularizers.options import check_options

if TYPE_CHECKING:
    from support_tokens.models import Decoder
    from support_tokens.regularizers.passes import Pass
from support_tokens.regularizers.watcher import ForwardWatcher

AT = ("clean", "noisy", "adversarial")
"""Which embeddings a penalty may read: before training noise, after it, or those of the adversary beside it."""

Kind = Literal["law", "rival", "control", "none"]
"""Whether it follows from the paper's law, competes with it, or is there to tell scale from robustness."""


class Regularizer(ABC):
    """A frozen dataclass of numbers and words that says what is added to cross-entropy.

    A new one is one such class and one line in `REGULARIZERS`; the command line and `config.json` follow from its
    fields. Two are joined by `+`.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    summary: ClassVar[str]

    def __post_init__(self) -> None:
        check_options(self, f"regularizer '{self.name}': ")

    @abstractmethod
    def bind(self, site: "Decoder", watcher: "ForwardWatcher", seed: int) -> "Term":
        """The term of this regularizer on one model.

        Args:
            site: Where regularizers act on the model.
            watcher: Sees its forward passes.
            seed: Seed of the term's own weights and draws.

        Raises:
            ArgumentError: An option does not fit the model.
            UnsupportedModelError: The term could not act on this model.
        """

    def __add__(self, other: "Regularizer") -> "Sum":
        return Sum((*parts_of(self), *parts_of(other)))


@dataclass(frozen=True)
class Sum(Regularizer):
    """Several regularizers in one run; their order makes no difference.

    Args:
        parts: Two or more regularizers, none of them a sum.

    Raises:
        ArgumentError: Fewer than two, or one twice.

    Example:
        >>> from support_tokens.regularizers import Noise, Spread
        >>> (Spread() + Noise()) == (Noise() + Spread())
        True
    """

    name: ClassVar[str] = "sum"
    parts: tuple[Regularizer, ...]

    def __post_init__(self) -> None:
        if len(self.parts) < 2 or any(isinstance(part, Sum) for part in self.parts):
            raise ArgumentError(
                f"a sum must be of two or more plain regularizers, received {len(self.parts)}; write for example "
                "smart:weight=0.15+spread:weight=0.02."
            )
        if len(set(self.parts)) < len(self.parts):
            raise ArgumentError(
                f"a sum must name each regularizer once, received {' + '.join(p.name for p in self.parts)} with one "
                "twice; raise its weight instead."
            )
        object.__setattr__(self, "parts", tuple(sorted(self.parts, key=lambda p: (p.name, dataclasses.astuple(p)))))  # type: ignore[call-overload]

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """`law` where a part is."""
        kinds = {part.kind for part in self.parts}
        return "law" if "law" in kinds else "rival" if "rival" in kinds else "control"

    @property
    def summary(self) -> str:  # type: ignore[override]
        """The sentences of its parts."""
        return "; and ".join(part.summary for part in self.parts)

    def bind(self, site: "Decoder", watcher: "ForwardWatcher", seed: int) -> "Term":
        """Never called: each part is bound by itself."""
        raise TypeError("a sum is bound part by part")


def parts_of(regularizer: Regularizer) -> tuple[Regularizer, ...]:
    """The plain regularizers of a sum, or the one that it is."""
    return regularizer.parts if isinstance(regularizer, Sum) else (regularizer,)


class Term(nn.Module):
    """What a regularizer put on one model; a module, so that optimiser, `to` and `deepcopy` reach its parameters.

    Args:
        name: Its name in figures.
        weight: Weight of its penalty in the loss: a number, a schedule of the step, or a controller.
        every: The penalty counts at every so many steps, with so many times its weight.
    """

    replaces_loss = False
    """Whether its penalty is another loss minus the cross-entropy (adversarial training, SAM)."""
    has_penalty = True
    """Whether a loss must hold a penalty of it; False where it only changes embeddings or weights."""
    runs_again = False
    """Whether its penalty runs the model once more."""
    changes_embeddings = False
    """Whether it changes the embeddings in train mode."""
    layers: tuple[int, ...] = ()
    """Blocks whose attention it reads."""

    def __init__(self, name: str, weight: Any = 1.0, every: int = 1) -> None:
        super().__init__()
        self.name, self.weight, self.every = name, weight, every
        # On the host, and no buffers: to the compiler a number that changes at every step is a new program at every
        # step, and one on the device would have to be waited for.
        self.steps, self.counted = torch.tensor(0), torch.tensor(0)
        self.record: dict[str, Tensor] = {}

    def current_weight(self) -> float | Tensor:
        """The weight at this step."""
        return self.weight

    def change(self, x: Tensor, valid: Tensor) -> Tensor:
        """What becomes of the embeddings `(B, T, D)` in train mode; `valid` `(B, T)` is False at padding."""
        return x

    def penalty(self, forward: "Pass") -> Tensor:
        """Mean penalty of a pass, a scalar with gradient, without its weight; figures go to `record`."""
        raise NotImplementedError(f"{self.name} has no penalty")

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before every step of the optimiser that trains the model."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after every step of the optimiser that trains the model."""

    def tensors(self) -> dict[str, Tensor]:
        """What it learned or drew, by name, to be saved beside the model's checkpoint."""
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes up what `tensors` gave."""

    def remove(self) -> None:
        """Takes off what it put on the model's modules."""


@dataclass(frozen=True)
class CrossEntropy(Regularizer):
    """Cross-entropy alone.

    Example:
        >>> CrossEntropy().kind
        'none'
    """

    name: ClassVar[str] = "ce"
    kind: ClassVar[Kind] = "none"
    summary: ClassVar[str] = "cross-entropy alone"

    def bind(self, site: "Decoder", watcher: "ForwardWatcher", seed: int) -> Term:
        """A term that does nothing."""
        term = Term(self.name)
        term.has_penalty = False
        return term
