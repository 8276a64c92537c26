"""Several arms in one run: noise and a barrier, say."""

__all__ = ["Combined"]

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.regularizers.base import Arm, Attachment


@dataclass(frozen=True)
class Combined:
    """Arms that act in one run, attached in order; their penalties add up.

    Args:
        parts: Two or more arms.

    Raises:
        ArgumentError: Fewer than two arms, or one inside of which others are combined.

    Example:
        >>> from support_tokens.regularizers import TrainingNoise, InvariantBarrier
        >>> Combined((TrainingNoise(), InvariantBarrier())).summary.split("; and ")[0]
        'cross-entropy under Gaussian embedding noise in training'
    """

    name: ClassVar[str] = "combined"

    parts: tuple[Arm, ...]

    def __post_init__(self):
        if len(self.parts) < 2 or any(isinstance(part, Combined) for part in self.parts):
            raise ArgumentError(
                f"arm 'combined': two or more plain arms are required, received {len(self.parts)}; write for example "
                "noise:scale=0.2+invariant:weight=0.02."
            )

    @property
    def summary(self) -> str:
        """The sentences of its parts."""
        return "; and ".join(part.summary for part in self.parts)

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """Attaches each part; `remove` takes them off in reverse.

        Raises:
            ArgumentError: Two parts set the same argument of the Trainer.
        """
        attached: list[Attachment] = []
        arguments: dict[str, Any] = {}
        for part in self.parts:
            one = part.attach(model, seed=seed)
            attached.append(one)
            for key, value in one.arguments.items():
                if key in arguments:
                    raise ArgumentError(f"arm 'combined': two of its parts set {key} of the Trainer; leave one out.")
                arguments[key] = value
        penalties = [one.penalty for one in attached if one.penalty is not None]

        def remove() -> None:
            for one in reversed(attached):
                one.remove()

        def save(folder: Path) -> None:
            for one in attached:
                one.save(folder)

        def penalty(model: nn.Module, inputs: Mapping[str, Tensor], outputs: Any) -> Tensor:
            first, *others = (term(model, inputs, outputs) for term in penalties)
            return sum(others, start=first)

        callbacks = tuple(callback for one in attached for callback in one.callbacks)
        return Attachment(remove, callbacks, save, penalty if penalties else None, arguments)
