r"""The paper's law of embeddings: a latent-noise model whose mean is causal attention, with an exact density."""

__all__ = ["EmbeddingPrior"]

import math
import warnings

import torch
from torch import Tensor, nn

from support_tokens.errors import ArgumentError, NumericalWarning
from support_tokens.law.certificate import Certificate, certify, past_radius_squared
from support_tokens.law.gaussian import gaussian_log_prob
from support_tokens.law.mass import Mass, Preimages, preimages, total_mass
from support_tokens.law.newton import coupling_factors
from support_tokens.law.trajectory import Solution, from_noise, solve
from support_tokens.margins import AttentionState, Margins, moments, state_from_weights, state_margins
from support_tokens.margins.linalg import full_precision

LARGEST_CHECK = 64
"""Most positions whose mass `log_prob(x, check=True)` computes."""


class EmbeddingPrior(nn.Module):
    r"""Law of an embedding trajectory, $x_t = \mu_t(x) + \epsilon_t$ with $\epsilon_t \sim N(0, \sigma^2 I)$.

    $$ \mu_t = \sum_{s<t} \alpha_{ts} x_s, \quad
       \alpha_{ts} \propto \exp\!\Big(\tfrac{(W_Q x_t)^T W_K x_s}{\sqrt R}\Big), \qquad
       \log p(x) = \sum_t \big[\log N(x_t - \mu_t; 0, \sigma^2 I) + \log|\det(I - \Sigma_t A)|\big], $$

    with $A = W_K^T W_Q / \sqrt R$ and $\Sigma_t$ the covariance of the attended embeddings. The first position has no
    context: its mean is 0.

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
        """D, the width of the embeddings."""
        return self.w_q.shape[1]

    @property
    def rank(self) -> int:
        """R, the rank of the coupling."""
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

    def state(
        self, x: Tensor, attention_mask: Tensor | None = None, *, segments: Tensor | None = None
    ) -> AttentionState:
        """The attention of the law on `x` `(B, T, D)`.

        `attention_mask` `(B, T)` is non-zero at real tokens. `segments` `(B, T)` numbers the documents packed in a
        sequence; positions attend within their document only.
        """
        if x.dim() != 3 or x.shape[-1] != self.width:
            raise ArgumentError(
                f"x must have shape (B, T, {self.width}), received {tuple(x.shape)}; "
                "pass embeddings of the law's width."
            )
        if attention_mask is not None and attention_mask.shape != x.shape[:2]:
            raise ArgumentError(
                f"attention_mask must have shape (B, T) = {tuple(x.shape[:2])}, "
                f"received {tuple(attention_mask.shape)}; pass 1 at real tokens and 0 at padding."
            )
        padding = None if attention_mask is None else attention_mask == 0
        return state_from_weights(
            x, self.w_q.unsqueeze(0), self.w_k.unsqueeze(0), key_padding_mask=padding, segments=segments
        )

    def mean(self, x: Tensor, attention_mask: Tensor | None = None, *, segments: Tensor | None = None) -> Tensor:
        r"""$\mu_t(x)$, `(B, T, D)`; 0 where a position has no context."""
        with full_precision(x):
            return _mean(self.state(x, attention_mask, segments=segments))

    def margins(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        *,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Margins:
        r"""Margins of $J_t = I - \Sigma_t A$ at all positions, or at `positions` `(B, n)`; differentiable."""
        with full_precision(x):
            return state_margins(self.state(x, attention_mask, segments=segments), positions=positions)

    def residual(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        r"""$\epsilon = x - \mu(x)$, `(B, T, D)`, in closed form; 0 at padding."""
        with full_precision(x):
            return _residual(self.state(x, attention_mask))

    def log_prob(self, x: Tensor, attention_mask: Tensor | None = None, *, check: bool = False) -> Tensor:
        r"""Exact $\log p(x)$ in nats, `(B,)`; positions that are padding do not count.

        It is a density where $x \mapsto x - \mu(x)$ is one-to-one. Elsewhere several trajectories have the same noise
        and the formula counts each of them. `check` searches for such positions and warns with the mass that is counted
        more than once; it is too slow for training.

        Warns:
            NumericalWarning: With `check`, where the formula is not a density given these pasts.
        """
        if check:
            self._warn_of_folds(x, attention_mask)
        with full_precision(x):
            state = self.state(x, attention_mask)
            per_position = gaussian_log_prob(_residual(state), self.log_noise_scale) + state_margins(state).log_abs_det
            if state.valid is not None:
                per_position = per_position.masked_fill(~state.valid, 0.0)
            return per_position.sum(-1)

    def from_noise(self, noise: Tensor) -> Tensor:
        r"""Embeddings x with $x - \mu(x) = \epsilon$, `(B, T, D)`; differentiable in noise and parameters.

        One position after the other by Newton in float64, to a relative residual of 1e-10; the result has the dtype of
        the noise. `solve` reports where there are several solutions and which one was taken.

        Raises:
            NumericalError: The search did not reach that residual.

        Example:
            >>> prior = EmbeddingPrior(width=3, rank=2).double()
            >>> noise = torch.randn(2, 5, 3, dtype=torch.float64)
            >>> torch.allclose(prior.residual(prior.from_noise(noise)), noise)
            True
        """
        return from_noise(*self._checked_noise(noise))

    def solve(self, noise: Tensor, past: Tensor | None = None) -> Solution:
        """As `from_noise`, after the embeddings `past` `(B, P, D)`, with details of the search; no gradients."""
        noise, w_q, w_k = self._checked_noise(noise)
        if past is not None and (past.dim() != 3 or past.shape[0] != len(noise) or past.shape[-1] != self.width):
            raise ArgumentError(
                f"past must have shape (B, P, D) = ({len(noise)}, P, {self.width}), received {tuple(past.shape)}; "
                "pass one past per row of noise."
            )
        return solve(noise, w_q, w_k, past=past)

    @torch.no_grad()
    def sample(self, batch: int, length: int, generator: torch.Generator | None = None) -> Tensor:
        """Embeddings drawn from the law, `(batch, length, D)`, without gradients; `EmbeddingLaw.rsample` has them.

        Example:
            >>> EmbeddingPrior(width=3, noise_scale=0.1).sample(2, 5).shape
            torch.Size([2, 5, 3])
        """
        if batch < 1 or length < 1:
            raise ArgumentError(
                f"batch and length must be at least 1, received {batch} and {length}; draw one or more."
            )
        weight = self.w_q
        standard = torch.randn(batch, length, self.width, generator=generator, dtype=weight.dtype, device=weight.device)
        return self.from_noise(standard * self.noise_scale)

    def certificate(self, x: Tensor, attention_mask: Tensor | None = None) -> Certificate:
        """What is guaranteed about the map between noise and embeddings, given the pasts in x `(B, T, D)`."""
        state = self.state(x.detach(), attention_mask)
        with torch.no_grad(), full_precision(x):
            return certify(self.coupling, state, state_margins(state))

    def preimages(self, noise: Tensor, past: Tensor) -> Preimages:
        """All next embeddings found that have noise `(M, D)` after one past `(t, D)`."""
        if noise.dim() != 2 or noise.shape[-1] != self.width or len(noise) == 0:
            raise ArgumentError(
                f"noise must have shape (M, {self.width}), received {tuple(noise.shape)}; pass one row a noise."
            )
        noise, w_q, w_k = self._promoted(noise)
        return preimages(noise, past.to(noise), coupling_factors(w_q, w_k))

    def total_mass(self, past: Tensor, *, samples: int = 256, generator: torch.Generator | None = None) -> Mass:
        r"""$\int p(x_t \mid \mathrm{past})\, dx_t$ as `log_prob` has it, after one past `(t, D)`: 1 for a density.

        Example:
            >>> prior = EmbeddingPrior(width=1)
            >>> _ = torch.nn.init.ones_(prior.w_q), torch.nn.init.ones_(prior.w_k)
            >>> print(prior.total_mass(torch.tensor([[-2.0], [2.0]])).sentence)
            given this past the formula integrates to 2.434, 1.43 of it counted more than once
        """
        past, w_q, w_k = self._promoted(past.detach())
        maps, scale = coupling_factors(w_q, w_k), float(self.noise_scale.detach())
        return total_mass(past, maps, scale, samples=samples, generator=generator)

    def _warn_of_folds(self, x: Tensor, attention_mask: Tensor | None) -> None:
        certificate = self.certificate(x, attention_mask)
        if certificate.injective:
            return
        state = self.state(x.detach(), attention_mask)
        radius = past_radius_squared(state.value[:, 0], state.valid).masked_fill(certificate.certified, 0.0).flatten()
        # The widest pasts first. Where the mass is exact, many are checked, so that no warning means no fold.
        exact = min(self.rank, self.width) == 1
        suspects = radius.argsort(descending=True)[: int((radius > 0).sum())][: LARGEST_CHECK if exact else 1]
        generator = torch.Generator(x.device).manual_seed(0)
        worst, where = None, (0, 0)
        for index in suspects.tolist():
            row, position = divmod(index, x.shape[1])
            past = state.value[row, 0, :position]
            past = past if state.valid is None else past[state.valid[row, :position]]
            candidate = self.total_mass(past, generator=generator)
            if worst is None or candidate.value > worst.value:
                worst, where = candidate, (row, position)
        assert worst is not None, "a position that is not certified has a past of some width"
        if exact and not worst.excess and len(suspects) == int((~certificate.certified).sum()):
            return
        warnings.warn(
            f"log_prob of EmbeddingPrior: {certificate.sentence} At position {where[1]} of sequence {where[0]}, "
            f"the worst of {len(suspects)} checked, {worst.sentence}.",
            NumericalWarning,
            stacklevel=3,
        )

    def _promoted(self, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A tensor and both weights in one dtype of at least 32 bits."""
        dtype = torch.promote_types(torch.promote_types(tensor.dtype, self.w_q.dtype), torch.float32)
        return tensor.to(dtype), self.w_q.to(dtype), self.w_k.to(dtype)

    def _checked_noise(self, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if noise.dim() != 3 or noise.shape[-1] != self.width or 0 in noise.shape:
            raise ArgumentError(
                f"noise must have shape (B, T, {self.width}), received {tuple(noise.shape)}; "
                "pass noise of the law's width."
            )
        return self._promoted(noise)


def _mean(state: AttentionState) -> Tensor:
    return moments(state, slice(0, state.length), covariance=False).mean[:, 0]


def _residual(state: AttentionState) -> Tensor:
    return state.value[:, 0] - _mean(state)
