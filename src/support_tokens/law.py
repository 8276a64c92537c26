r"""The paper's law of embeddings: a latent-noise model whose mean is causal attention, with an exact density."""

import math

import torch
from torch import Tensor, nn

from support_tokens.attention import AttentionState, state_from_weights
from support_tokens.errors import ArgumentError
from support_tokens.logdet import full_precision
from support_tokens.margins import Margins, state_margins
from support_tokens.moments import moments

__all__ = ["EmbeddingPrior"]


class EmbeddingPrior(nn.Module):
    r"""Law of an embedding trajectory, $x_t = \mu_t(x) + \epsilon_t$ with $\epsilon_t \sim N(0, \sigma^2 I)$.

    $$ \mu_t = \sum_{s<t} \alpha_{ts} x_s, \quad \alpha_{ts} \propto \exp\!\Big(\tfrac{(W_Q x_t)^T W_K x_s}{\sqrt R}\Big), \qquad
       \log p(x) = \sum_t \big[\log N(x_t - \mu_t; 0, \sigma^2 I) + \log|\det(I - \Sigma_t A)|\big], $$

    with $A = W_K^T W_Q / \sqrt R$ and $\Sigma_t$ the covariance of the attended embeddings. The first position has no context:
    its mean is 0.

    Args:
        width: D, width of the embeddings.
        rank: R, rank of the coupling A; None: D.
        noise_scale: $\sigma$, in units of the embeddings.
        generator: Draws the initial weights, $N(0, 1/D)$; None: PyTorch's global one.

    Raises:
        ArgumentError: A size is not positive, or `noise_scale` is not a positive number.

    Source:
        arXiv:2602.22271.

    Example:
        >>> prior = EmbeddingPrior(width=8, rank=4, noise_scale=0.5)
        >>> x = torch.randn(2, 6, 8)
        >>> prior.mean(x).shape, prior.margins(x).log_abs_det.shape, prior.log_prob(x).shape
        (torch.Size([2, 6, 8]), torch.Size([2, 6]), torch.Size([2]))
    """

    def __init__(
        self, width: int, rank: int | None = None, noise_scale: float = 1.0, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        rank = width if rank is None else rank
        if width < 1 or rank < 1:
            raise ArgumentError(
                f"width and rank must be at least 1, received {width} and {rank}; pass the width of the embeddings."
            )
        if not 0 < noise_scale < math.inf:
            raise ArgumentError(
                f"noise_scale must be a positive finite number, received {noise_scale}; pass sigma > 0."
            )
        self.w_q = nn.Parameter(torch.randn(rank, width, generator=generator) / math.sqrt(width))
        self.w_k = nn.Parameter(torch.randn(rank, width, generator=generator) / math.sqrt(width))
        self.log_noise_scale = nn.Parameter(torch.tensor(math.log(noise_scale)))

    @property
    def width(self) -> int:
        """D."""
        return self.w_q.shape[1]

    @property
    def rank(self) -> int:
        """R."""
        return self.w_q.shape[0]

    @property
    def noise_scale(self) -> Tensor:
        r"""$\sigma$, a scalar tensor."""
        return self.log_noise_scale.exp()

    @property
    def coupling(self) -> Tensor:
        r"""$A = W_K^T W_Q / \sqrt R$, `(D, D)`."""
        return self.w_k.T @ self.w_q / math.sqrt(self.rank)

    def extra_repr(self) -> str:
        """Sizes, for `repr`."""
        return f"width={self.width}, rank={self.rank}"

    def state(self, x: Tensor, attention_mask: Tensor | None = None) -> AttentionState:
        """The attention of the law on `x` `(B, T, D)`; `attention_mask` `(B, T)` is non-zero at real tokens."""
        if x.dim() != 3 or x.shape[-1] != self.width:
            raise ArgumentError(
                f"x must have shape (B, T, {self.width}), received {tuple(x.shape)}; pass embeddings of the law's width."
            )
        padding = None if attention_mask is None else attention_mask == 0
        return state_from_weights(x, self.w_q.unsqueeze(0), self.w_k.unsqueeze(0), key_padding_mask=padding)

    def mean(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        r"""$\mu_t(x)$, `(B, T, D)`: what attention expects of position t; 0 where it has no context."""
        with full_precision(x):
            state = self.state(x, attention_mask)
            return moments(state, slice(0, x.shape[1]), covariance=False).mean[:, 0]

    def margins(self, x: Tensor, attention_mask: Tensor | None = None, *, positions: Tensor | None = None) -> Margins:
        r"""Margins of $J_t = I - \Sigma_t A$ at all positions, or at `positions` `(B, n)`; differentiable."""
        with full_precision(x):
            return state_margins(self.state(x, attention_mask), positions=positions)

    def log_prob(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        r"""Exact $\log p(x)$ in nats, `(B,)`; positions that are padding do not count.

        It is a density where $x \mapsto x - \mu(x)$ is a bijection (see `theory`); beyond, several trajectories share one noise.
        """
        with full_precision(x):
            state = self.state(x, attention_mask)
            keys = state.value[:, 0]
            noise = keys - moments(state, slice(0, x.shape[1]), covariance=False).mean[:, 0]
            variance = (2 * self.log_noise_scale).exp()
            gaussian = -0.5 * (
                noise.square().sum(-1) / variance + self.width * (math.log(2 * math.pi) + 2 * self.log_noise_scale)
            )
            per_position = gaussian + state_margins(state).log_abs_det
            if state.valid is not None:
                per_position = per_position.masked_fill(~state.valid, 0.0)
            return per_position.sum(-1)
