"""An arm that holds the smallest and the largest singular value of the law's Jacobian together."""

__all__ = ["ConditionPenalty", "log_condition"]

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from support_tokens.margins import AttentionState, attention_weights, rankable_positions
from support_tokens.regularizers.barriers import attach_repulsive
from support_tokens.regularizers.base import Attachment, option, require


@dataclass(frozen=True)
class ConditionPenalty:
    r"""Cross-entropy plus a bound on the condition number of $J_t$, on RMS-normalised embeddings with a fixed repulsive
    coupling: $L = CE + \lambda\, \mathrm{mean}_t\, g_t$, with $g_t \ge 0$ of `log_condition`.

    A log-barrier holds $\sigma_{\min}$ from below and has no end; $g$ holds $\sigma_{\max}$ from above as well, and is
    0 where all singular values are equal. Under the learned law $A = 0$, and so $J_t = I$, would satisfy it without a
    word from the embeddings; hence the fixed coupling of `InvariantBarrier`. There $\sigma_{\min} = 1$ at every
    position with no more than D keys, and embeddings that all coincide have condition number 1; hence the whole
    spectrum instead of its two ends, and covariances of one trace: neither the scale of the embeddings nor their
    spread can lower $g$, only a more even use of directions.

    Args:
        weight: $\lambda$, per nat.
        coupling: $c$.
    """

    name: ClassVar[str] = "condition"
    summary: ClassVar[str] = "cross-entropy and a bound on the condition number of the Jacobian"

    weight: float = option(0.02, "weight of the log condition in the loss")
    coupling: float = option(0.1, "strength c of the fixed repulsive coupling")

    def __post_init__(self):
        require(self)

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """Keeps the embeddings of each forward pass in train mode for the penalty."""
        return attach_repulsive(
            model,
            self.weight,
            self.coupling,
            lambda state, _valid: (log_condition(state, self.coupling), rankable_positions(state)),
        )


def log_condition(state: AttentionState, coupling: float) -> Tensor:
    r"""How uneven the spectrum of $J_t = I + c\, \Sigma_t / \tau_t$ is, with $\tau_t = \mathrm{tr}\, \Sigma_t / D$, in
    nats, `(B, T)`.

    $$ g_t = \frac D2 \log\Big(1 + \frac{s_t^2}{m^2}\Big), \qquad m = \frac{\mathrm{tr} J_t}{D} = 1 + c, \qquad
       s_t^2 = \frac{\|J_t\|_F^2}{D} - m^2 = c^2 \Big( D\, \frac{\|\Sigma_t\|_F^2}{(\mathrm{tr}\, \Sigma_t)^2} - 1
       \Big) $$

    bounds both ends, $\sigma_{\min} \ge m - s_t \sqrt{D - 1}$ and $\sigma_{\max} \le m + s_t \sqrt{D - 1}$, and is
    itself at most $\tfrac D2 \log \tfrac{(1 + \kappa)^2}{4 \kappa}$ (Kantorovich). To second order in c it is $D \log m
    - \log\det J_t$, what the log-barrier loses by uneven directions. Singular values themselves, or a determinant,
    would need a D x D matrix a position; trace and norm need $x_s^T x_r$ alone, $O(B T^2 (T + D))$ for all positions.

    Args:
        state: Of `repulsive_state`.
        coupling: $c$.

    Returns:
        0 where $\Sigma_t$ vanishes, with a trace of less than 1e-4 D: with fewer than two keys, at padding, where all
        attended keys coincide.

    Source:
        Wolkowicz and Styan 1980, Bounds for eigenvalues using traces.

    Example:
        >>> from support_tokens.regularizers.barriers import repulsive_state
        >>> x = torch.randn(2, 5, 4)
        >>> state = repulsive_state(x, 0.1, torch.ones(2, 5, dtype=torch.bool))
        >>> log_condition(state, 0.1).shape
        torch.Size([2, 5])
    """
    weights, keys = attention_weights(state, slice(0, state.length))[:, 0], state.value[:, 0]
    gram = keys @ keys.mT
    along = weights @ gram  # mu_t^T x_s
    norm = (weights * along).sum(-1)
    trace = (weights * gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)).sum(-1) - norm
    square = ((weights @ gram.square()) * weights).sum(-1) - 2 * (weights * along.square()).sum(-1) + norm.square()
    # Of coinciding keys rounding leaves a trace of the order of epsilon times D, and its ratio would mean nothing.
    spread = rankable_positions(state) & (trace > 1e-4 * state.width)
    ratio = torch.where(spread, square, 1.0) / torch.where(spread, trace, 1.0).square()
    uneven = torch.where(spread, state.width * ratio - 1, 0.0).clamp_min(0.0)
    return 0.5 * state.width * torch.log1p((coupling / (1 + coupling)) ** 2 * uneven)
