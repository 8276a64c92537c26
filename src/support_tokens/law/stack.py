r"""A stack of laws: the mean of each layer is the attention over the layer below.

$$ x^{l+1}_t = \sum_{s \le t} \alpha_{ts}\, x^l_s + \epsilon^{l+1}_t, \qquad
   \log p(x^1, \dots, x^L) = \log p(x^1)
   + \sum_{l,t} \big[ \log N(\epsilon^{l+1}_t; 0, \sigma_l^2 I) + \log|\det J^{l+1}_t| \big] . $$

If the query comes from the layer below, $x^{l+1}$ is a shift of its noise and $\log|\det J^{l+1}_t| = 0$: only the
embedding law has a Jacobian term. If the query is $x^{l+1}_t$ itself, the weights depend on the modelled variable and
$J_t = I - \mathrm{Cov}_{\alpha_t}(x^l, W_K x^l) W_Q / \sqrt R$.
"""

__all__ = ["LawStack", "LayerLaw"]

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from support_tokens.errors import ArgumentError
from support_tokens.law.gaussian import gaussian_log_prob
from support_tokens.law.newton import coupling_factors
from support_tokens.law.prior import EmbeddingPrior
from support_tokens.law.trajectory import next_embedding
from support_tokens.margins import AttentionState, Projection, moments
from support_tokens.margins.linalg import full_precision, safe_slogdet

QUERIES = ("below", "own")


class LayerLaw(nn.Module):
    r"""Law of a layer's embeddings given those of the layer below, both `(B, T, D)`.

    Args:
        width: D.
        rank: R; None: D.
        noise_scale: $\sigma_l$, in units of the embeddings.
        query: Source of the query: `below`, $W_Q x^l_t$, without a Jacobian term; or `own`, $W_Q x^{l+1}_t$, with one.
        generator: Draws the initial weights, $N(0, 1/D)$; None: PyTorch's global one.

    Raises:
        ArgumentError: A size or the noise scale is not positive, or `query` is unknown.

    Example:
        >>> layer, below = LayerLaw(4, query="own"), torch.randn(2, 5, 4)
        >>> x = layer.sample(below)
        >>> layer.log_prob(x, below).shape, layer.log_abs_det(x, below).shape
        (torch.Size([2]), torch.Size([2, 5]))
    """

    def __init__(
        self,
        width: int,
        rank: int | None = None,
        noise_scale: float = 1.0,
        *,
        query: str = "below",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if query not in QUERIES:
            raise ArgumentError(
                f"query must be one of {', '.join(QUERIES)}, received {query!r}; choose one of the two."
            )
        # The same parameters as the embedding law, under the same checks.
        drawn = EmbeddingPrior(width, rank, noise_scale, generator=generator)
        self.w_q, self.w_k, self.log_noise_scale = drawn.w_q, drawn.w_k, drawn.log_noise_scale
        self.query = query

    def state(self, x: Tensor, below: Tensor) -> AttentionState:
        """Attention of this layer: queries from x or below as `query` says, keys and values from below."""
        if x.shape != below.shape or x.dim() != 3 or x.shape[-1] != self.w_q.shape[1]:
            raise ArgumentError(
                f"x and below must both have shape (B, T, {self.w_q.shape[1]}), received {tuple(x.shape)} and "
                f"{tuple(below.shape)}; pass the embeddings of two neighbouring layers."
            )
        x, below, w_q, w_k = _promote(x, below, self.w_q, self.w_k)
        source = x if self.query == "own" else below
        # One padding key, never attended to: with it the strict mask lets position t attend to the keys s <= t.
        behind = pad(below, (0, 0, 0, 1))
        return AttentionState(
            query=(source @ w_q.T).unsqueeze(1),
            key=(behind @ w_k.T).unsqueeze(1),
            value=behind.unsqueeze(1),
            scale=1 / math.sqrt(len(w_q)),
            to_query=Projection(w_q.unsqueeze(0)),
            to_key=Projection(w_k.unsqueeze(0)),
            strict=True,
        )

    def mean(self, x: Tensor, below: Tensor) -> Tensor:
        """Attention over the layer below, `(B, T, D)`; x is used only with `query="own"`."""
        with full_precision(x):
            return moments(self.state(x, below), slice(0, x.shape[1]), covariance=False).mean[:, 0]

    def log_abs_det(self, x: Tensor, below: Tensor) -> Tensor:
        r"""$\log|\det J_t|$ in nats, `(B, T)`: zero where the query comes from below."""
        if self.query == "below":
            return torch.zeros_like(x[..., 0])
        with full_precision(x):
            state = self.state(x, below)
            # By Sylvester det(I - Cov(x, k) W_Q) = det(I - Cov(W_Q x, k)), in R dimensions; x is the layer below.
            projected = replace(state, value=state.value @ self.w_q.T.to(state.value))
            covariance = moments(projected, slice(0, x.shape[1])).covariance
            identity = torch.eye(len(self.w_q), dtype=covariance.dtype, device=covariance.device)
            return safe_slogdet(identity - state.scale * covariance[:, 0]).log_abs_det

    def log_prob(self, x: Tensor, below: Tensor) -> Tensor:
        r"""$\log p(x^{l+1} \mid x^l)$ in nats, `(B,)`."""
        gaussian = gaussian_log_prob(x - self.mean(x, below), self.log_noise_scale)
        return (gaussian + self.log_abs_det(x, below)).sum(-1)

    @torch.no_grad()
    def sample(self, below: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Embeddings of this layer given those below, without gradients."""
        below, w_q, w_k = _promote(below, self.w_q, self.w_k)
        standard = torch.randn(below.shape, generator=generator, dtype=below.dtype, device=below.device)
        noise = standard * self.log_noise_scale.exp()
        if self.query == "below":
            return self.mean(below, below) + noise
        maps = coupling_factors(w_q, w_k)
        queries, keys = below @ maps.to_query.T, below @ maps.to_key.T
        rows = [
            next_embedding(noise[:, t], below[:, : t + 1], queries[:, : t + 1], keys[:, : t + 1], maps)[0]
            for t in range(below.shape[1])
        ]
        return torch.stack(rows, dim=1)


class LawStack(nn.Module):
    r"""The embedding law and the layers above it, as one law of all embeddings.

    Args:
        prior: Law of the lowest layer, $x^1$.
        layers: Laws of $x^2, x^3, \dots$, each given the layer below.

    Raises:
        ArgumentError: Widths differ.

    Example:
        >>> stack = LawStack(EmbeddingPrior(3, noise_scale=0.3), [LayerLaw(3), LayerLaw(3)])
        >>> x = stack.sample(batch=2, length=5)
        >>> len(x), stack.log_prob(x).shape, [bool(term.any()) for term in stack.jacobian_terms(x)]
        (3, torch.Size([2]), [True, False, False])
    """

    def __init__(self, prior: EmbeddingPrior, layers: Sequence[LayerLaw]) -> None:
        super().__init__()
        widths = [prior.width, *(layer.w_q.shape[1] for layer in layers)]
        if len(set(widths)) > 1:
            raise ArgumentError(
                f"layers must all have the width of the prior, received widths {widths}; make them equal."
            )
        self.prior = prior
        self.layers = nn.ModuleList(layers)

    def log_prob(self, x: Sequence[Tensor]) -> Tensor:
        """Log-density of the embeddings of all layers, lowest first, in nats, `(B,)`."""
        total = self.prior.log_prob(self._checked(x)[0])
        for layer, above, below in zip(self.layers, x[1:], x[:-1], strict=True):
            total = total + layer.log_prob(above, below)  # type: ignore[operator]
        return total

    def jacobian_terms(self, x: Sequence[Tensor]) -> list[Tensor]:
        r"""$\sum_t \log|\det J_t|$ of each layer, `(B,)` each."""
        terms = [self.prior.margins(self._checked(x)[0]).log_abs_det.sum(-1)]
        for layer, above, below in zip(self.layers, x[1:], x[:-1], strict=True):
            terms.append(layer.log_abs_det(above, below).sum(-1))  # type: ignore[operator]
        return terms

    def sample(self, batch: int, length: int, generator: torch.Generator | None = None) -> list[Tensor]:
        """Embeddings of all layers, lowest first, each `(batch, length, D)`."""
        x = [self.prior.sample(batch, length, generator)]
        for layer in self.layers:
            x.append(layer.sample(x[-1], generator))  # type: ignore[operator]
        return x

    def _checked(self, x: Sequence[Tensor]) -> Sequence[Tensor]:
        if len(x) != 1 + len(self.layers):
            raise ArgumentError(
                f"x must hold one tensor per layer, {1 + len(self.layers)} in all, received {len(x)}; pass all layers."
            )
        return x


def _promote(*tensors: Tensor) -> list[Tensor]:
    """Tensors in one common dtype of at least 32 bits."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors]
