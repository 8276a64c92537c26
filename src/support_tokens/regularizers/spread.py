"""Spread: what is left of the barrier when scale is taken away."""

__all__ = ["Spread", "token_spread"]

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from support_tokens.margins import AttentionState, attention_weights, rankable_positions
from support_tokens.margins.linalg import full_precision
from support_tokens.models import Decoder
from support_tokens.regularizers.barrier.sources import check_embeddings_train
from support_tokens.regularizers.barriers import repulsive_state
from support_tokens.regularizers.base import AT, Regularizer, Term
from support_tokens.regularizers.options import option
from support_tokens.regularizers.passes import Pass
from support_tokens.regularizers.watcher import ForwardWatcher

_FLOOR = 1e-3
"""Trace of a covariance, per dimension of embeddings of unit RMS, below which directions mean nothing."""


@dataclass(frozen=True)
class Spread(Regularizer):
    r"""Cross-entropy plus how unevenly the past of each token spreads over directions, $L = CE + \lambda\,
    \mathrm{mean}_t\, \mathrm{spread}_t$.

    To second order in a small coupling the log-barrier of a repulsive law rewards two things: large embeddings, and
    embeddings that use all directions alike. This is the second alone: it depends on the covariance $\Sigma_t$ of the
    attended embeddings through its participation ratio only, see `token_spread`. It is dimensionless and near 0 for
    isotropic embeddings of any width and length, so that a weight carries over from one model to another.

    Args:
        weight: $\lambda$, nats per nat.
        coupling: $c\sqrt D$: attention of the law is $\alpha_{ts} \propto \exp(-c\, \hat x_t^T \hat x_s)$ on embeddings
            of unit RMS, whose scores then have a standard deviation of about $c\sqrt D$ at every width.
        at: Which embeddings: before training noise, after it, or those of the adversary beside it.
        every: The penalty counts at every so many steps, with so many times its weight.
    """

    name: ClassVar[str] = "spread"
    kind: ClassVar = "law"
    summary: ClassVar[str] = "cross-entropy and an even spread of the past over directions"

    weight: float = option(0.02, "weight of the penalty in the loss")
    coupling: float = option(0.8, "standard deviation of the attention scores of the law")
    at: str = option("clean", "embeddings that it reads: clean, noisy or adversarial", choices=AT)
    every: int = option(1, "count at every so many steps", least=1)

    def bind(self, site: Decoder, watcher: ForwardWatcher, seed: int) -> Term:
        """See `Regularizer.bind`.

        Raises:
            CaptureError: No parameter that shapes the embeddings is trained.
        """
        check_embeddings_train(site, None, "spread")
        return _SpreadTerm(self, site)


class _SpreadTerm(Term):
    def __init__(self, spread: Spread, site: Decoder) -> None:
        super().__init__("spread", spread.weight, spread.every)
        self.coupling, self.at = spread.coupling, spread.at
        self._site = (site,)

    def penalty(self, forward: Pass) -> Tensor:
        """Mean of the spread over tokens."""
        x = forward.embeddings_at(self.at)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            check_embeddings_train(self._site[0], x, "spread")
        valid = forward.valid(x)
        with full_precision(x):
            state = repulsive_state(x, self.coupling / x.shape[-1] ** 0.5, valid, segments=forward.segments(x.shape[0]))
            return forward.mean(token_spread(state), rankable_positions(state), valid)


def token_spread(state: AttentionState) -> Tensor:
    r"""How unevenly the covariance of the attended embeddings spreads over directions, in nats, `(B, T)`.

    $$ \mathrm{spread}_t = \log \frac{D\, \nu_t}{D + \nu_t - 1} - \log PR_t, \qquad
       PR_t = \frac{(\mathrm{tr}\, \Sigma_t)^2}{\|\Sigma_t\|_F^2}, \qquad
       \nu_t = \frac{(1 - q_2)^2}{q_2 - 2 q_3 + q_2^2}, \quad q_k = \sum_s \alpha_{ts}^k $$

    $PR_t$ is an effective rank, from 1 to $\min(D, n - 1)$ for n keys. $\nu_t$ is the one that orthonormal keys under
    the same weights have ($n - 1$ for uniform ones), so that the first term is what an isotropic cloud reaches: the
    spread of random embeddings is 0 within 0.03 for D of 64 to 4096 and 2 to 2048 keys. Under uniform weights it is
    never below $\log\frac{D}{2D - 1} > -\log 2$, and at most $\log\frac{D \nu}{D + \nu - 1}$, where all keys lie on one
    line. Trace and norm need $x_s^T x_r$ alone: $O(B T^2 (T + D))$ for all positions.

    Args:
        state: Of `repulsive_state`.

    Returns:
        0 with fewer than two keys and at padding. Where $\Sigma_t$ vanishes, with a trace well below $10^{-3} D$, the
        spread and its gradient go to 0.

    Example:
        >>> from support_tokens.regularizers import repulsive_state
        >>> x = torch.randn(2, 40, 64)
        >>> spread = token_spread(repulsive_state(x, 0.1, torch.ones(2, 40, dtype=torch.bool)))
        >>> bool(spread[:, 2:].mean().abs() < 0.1)
        True
    """
    weights, keys = attention_weights(state, slice(0, state.length))[:, 0], state.value[:, 0]
    width = state.width
    gram = keys @ keys.mT
    along = weights @ gram  # mu_t^T x_s
    norm = (weights * along).sum(-1)
    trace = (weights * gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)).sum(-1) - norm
    square = ((weights @ gram.square()) * weights).sum(-1) - 2 * (weights * along.square()).sum(-1) + norm.square()
    counted = rankable_positions(state)
    second, third = weights.square().sum(-1), (weights.square() * weights).sum(-1)
    spare = torch.where(counted, second - 2 * third + second.square(), 1.0)
    rank = torch.where(counted, (1 - second).square() / spare.clamp_min(torch.finfo(spare.dtype).tiny), 1.0)
    even = width * rank / (width + rank - 1)
    floor = (_FLOOR * width) ** 2
    ratio = (even * square.clamp_min(0.0) + floor) / (trace.square() + floor)
    return torch.where(counted, ratio, 1.0).log()
