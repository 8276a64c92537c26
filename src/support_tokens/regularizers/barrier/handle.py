r"""The user's hold on an attached barrier."""

__all__ = ["BarrierHandle"]

from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.law import EmbeddingPrior
from support_tokens.regularizers.barrier.penalties import Weight
from support_tokens.regularizers.barrier.term import BarrierTerm
from support_tokens.regularizers.handle import RegularizerHandle, checked_weight


class BarrierHandle(RegularizerHandle):
    r"""The hold on one barrier: what it measured, its weight, its law, and the way to take it off.

    Made by `attach_barrier`. Its `last` holds `ce` (where the model computed the loss), `total`, `penalty`, `weight`,
    `log_margin_mean` and `log_margin_min` in nats, and `negative_fraction`.
    """

    terms: tuple[BarrierTerm, ...]

    def __init__(self, term: BarrierTerm, model: nn.Module) -> None:
        super().__init__((term,), model)

    def __repr__(self) -> str:
        state = "attached" if self.attached else "removed"
        return f"BarrierHandle(penalty={self.terms[0].kind!r}, weight={self.weight!r}, {state})"

    def _prefixes(self) -> list[str]:
        return [""]

    @property
    def law(self) -> EmbeddingPrior:
        """The law whose coupling the barrier acts on.

        Raises:
            ArgumentError: The barrier acts on the model's own attention.
        """
        if (law := self.terms[0].law) is None:
            raise ArgumentError("a law belongs to source='prior', and this barrier has source='model'; attach another.")
        return law

    @property
    def weight(self) -> Weight:
        r"""$\lambda$: a number, a schedule or a controller; may be set."""
        return self.terms[0].weight

    @weight.setter
    def weight(self, value: Weight) -> None:
        self.terms[0].weight = checked_weight(value)

    @property
    def current_weight(self) -> float:
        r"""$\lambda$ at this step; reading a controller's synchronises with the device."""
        return float(self.terms[0].current_weight())

    def penalty(self, labels: Tensor | None = None, num_items: Tensor | int | None = None) -> Tensor:
        r"""Mean penalty of the last forward pass in train mode, a scalar with gradient, without $\lambda$.

        Arguments and errors are those of `weighted_penalty`.
        """
        return self._attached_slot().objective(self.terms, None, labels, num_items, weighted=False)
