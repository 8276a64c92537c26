"""R-Drop: the same prediction under two dropouts."""

__all__ = ["RDrop"]

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from support_tokens.errors import UnsupportedModelError
from support_tokens.models import Decoder
from support_tokens.regularizers.adversarial import divergence
from support_tokens.regularizers.base import Regularizer, Term
from support_tokens.regularizers.options import option
from support_tokens.regularizers.passes import Pass
from support_tokens.regularizers.watcher import ForwardWatcher


@dataclass(frozen=True)
class RDrop(Regularizer):
    r"""R-Drop: two passes under two dropouts, $L = CE_1 + w\, \{\tfrac12 (CE_2 - CE_1) + \alpha\, \mathrm{mean}_t\,
    \tfrac12 [KL(p_1\|p_2) + KL(p_2\|p_1)]\}$; with $w = 1$ the mean of both cross-entropies and the divergence.

    Args:
        weight: $w$.
        alpha: $\alpha$, nats per nat and token.
        dropout: Rate of every dropout module of the model while it is attached, whatever it was.
        every: The penalty counts at every so many steps, with so many times its weight.

    References:
        Wu et al. 2021 (arXiv:2106.14448).
    """

    name: ClassVar[str] = "rdrop"
    kind: ClassVar = "rival"
    summary: ClassVar[str] = "cross-entropy with R-Drop's consistency of two dropouts"

    weight: float = option(1.0, "weight of the penalty")
    alpha: float = option(1.0, "weight of the divergence within it")
    dropout: float = option(0.1, "rate of all dropout modules while it is attached", most=0.9)
    every: int = option(1, "count at every so many steps", least=1)

    def bind(self, site: Decoder, watcher: ForwardWatcher, seed: int) -> Term:
        """See `Regularizer.bind`.

        Raises:
            UnsupportedModelError: The model has no dropout module, so that both passes would be the same.
        """
        layers = [module for module in site.causal_model.modules() if isinstance(module, nn.Dropout)]
        if not layers:
            raise UnsupportedModelError(
                f"the model must have dropout modules for rdrop, received {type(site.causal_model).__name__} with "
                "none, so that both of its passes would be the same; use smart."
            )
        return _RDropTerm(self, layers)


class _RDropTerm(Term):
    runs_again = True

    def __init__(self, rdrop: RDrop, layers: list[nn.Dropout]) -> None:
        super().__init__(rdrop.name, rdrop.weight, rdrop.every)
        self.alpha = rdrop.alpha
        self._layers = tuple((layer, layer.p) for layer in layers)
        for layer in layers:
            layer.p = rdrop.dropout

    @torch.compiler.disable
    def penalty(self, forward: Pass) -> Tensor:
        """Half of what the second cross-entropy is above the first, and the weighted divergence."""
        second = forward.rerun().logits
        gap = 0.5 * (forward.loss_of(second) - forward.loss_of(forward.logits))
        both = divergence(forward.scored(forward.logits), forward.scored(second))
        return gap + self.alpha * forward.item_mean(both)

    def remove(self) -> None:
        """Gives the dropout modules their rates again."""
        for layer, rate in self._layers:
            layer.p = rate
