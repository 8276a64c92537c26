r"""The law as a citizen of `torch.distributions`: the transform from noise to embeddings, and the distribution."""

__all__ = ["EmbeddingLaw", "NoiseToEmbeddings"]

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal, Transform, constraints

from support_tokens.errors import ArgumentError
from support_tokens.law.certificate import repulsive
from support_tokens.law.prior import EmbeddingPrior


class NoiseToEmbeddings(Transform):
    r"""The map $\epsilon \mapsto x$ with $x - \mu(x) = \epsilon$, on trajectories `(..., T, D)`.

    Forward by Newton, one position after the other; the inverse in closed form, $\epsilon = x - \mu(x)$, and

    $$ \log\Big|\det \frac{\partial x}{\partial \epsilon}\Big| = -\sum_t \log|\det J_t| . $$

    Gradients of the forward map are those of the implicit function theorem. `bijective` is what is proven for every
    past: it is True where the coupling is repulsive. Otherwise `t.inv(t(noise)) == noise` still holds always, while
        `t(t.inv(x)) == x` holds where
    `prior.certificate(x)` says so.

    Args:
        prior: Its parameters are read at every call, so that they can be trained.
        cache_size: 1 keeps the last pair, which saves the search in `log_prob` of a sample just drawn.

    Example:
        >>> transform = NoiseToEmbeddings(EmbeddingPrior(3, rank=2).double())
        >>> noise = torch.randn(4, 5, 3, dtype=torch.float64)
        >>> torch.allclose(transform.inv(transform(noise)), noise)
        True
    """

    domain = constraints.independent(constraints.real, 2)
    codomain = constraints.independent(constraints.real, 2)

    def __init__(self, prior: EmbeddingPrior, cache_size: int = 0) -> None:
        super().__init__(cache_size=cache_size)
        self.prior = prior

    @property
    def bijective(self) -> bool:  # type: ignore[override]
        """Whether the map is proven one-to-one for every past."""
        return repulsive(self.prior.coupling)

    def with_cache(self, cache_size: int = 1) -> "NoiseToEmbeddings":
        """The same transform with another cache."""
        return self if self._cache_size == cache_size else NoiseToEmbeddings(self.prior, cache_size)

    def _call(self, x: Tensor) -> Tensor:
        return self.prior.from_noise(x.reshape(-1, *x.shape[-2:])).reshape(x.shape)

    def _inverse(self, y: Tensor) -> Tensor:
        return self.prior.residual(y.reshape(-1, *y.shape[-2:])).reshape(y.shape)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        r"""$-\sum_t \log|\det J_t|$ at the embeddings y, `(...)`."""
        log_abs_det = self.prior.margins(y.reshape(-1, *y.shape[-2:])).log_abs_det
        return -log_abs_det.sum(-1).reshape(y.shape[:-2])


class EmbeddingLaw(Distribution):
    r"""The law of trajectories of T embeddings; `batch_shape` is empty unless expanded, `event_shape` is `(T, D)`.

    Args:
        prior: The law's parameters, read at every call.
        length: T.
        validate_args: With True (PyTorch's default, which zuko turns off when imported) `log_prob` warns where the
            formula is not certified to be a density and says how much mass it counts more than once; that costs a
            search. False for training.

    Raises:
        ArgumentError: `length` is not positive.

    Source:
        arXiv:2602.22271; the certificate is ours.

    Example:
        >>> law = EmbeddingLaw(EmbeddingPrior(3, rank=2, noise_scale=0.1).double(), length=5)
        >>> x = law.rsample((4,))
        >>> x.shape, law.log_prob(x).shape, law.marginal(2).event_shape
        (torch.Size([4, 5, 3]), torch.Size([4]), torch.Size([2, 3]))
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012
    support = constraints.independent(constraints.real, 2)  # type: ignore[assignment]
    has_rsample = True

    def __init__(
        self,
        prior: EmbeddingPrior,
        length: int,
        batch_shape: torch.Size | tuple[int, ...] = (),
        validate_args: bool | None = None,
    ) -> None:
        if length < 1:
            raise ArgumentError(f"length must be at least 1, received {length}; pass the number of positions.")
        self.prior = prior
        self.length = length
        super().__init__(torch.Size(batch_shape), torch.Size((length, prior.width)), validate_args=validate_args)

    @property
    def transform(self) -> NoiseToEmbeddings:
        """From noise to embeddings."""
        return NoiseToEmbeddings(self.prior)

    @property
    def base_dist(self) -> Independent:
        r"""$N(0, \sigma^2 I)$ on `(T, D)`."""
        shape = self.batch_shape + self.event_shape
        scale = self.prior.noise_scale.to(self.prior.w_q.dtype)
        return Independent(Normal(scale.new_zeros(shape), scale.expand(shape), validate_args=False), 2)

    def expand(
        self, batch_shape: torch.Size | tuple[int, ...], _instance: Distribution | None = None
    ) -> "EmbeddingLaw":
        """The same law for a batch of independent trajectories."""
        return EmbeddingLaw(self.prior, self.length, batch_shape, validate_args=self._validate_args)

    def marginal(self, length: int) -> "EmbeddingLaw":
        """The law of the first `length` positions: later ones integrate out (Kolmogorov), so it is the shorter law."""
        if not 1 <= length <= self.length:
            raise ArgumentError(
                f"length must be between 1 and {self.length}, received {length}; a marginal is shorter."
            )
        return EmbeddingLaw(self.prior, length, self.batch_shape, validate_args=self._validate_args)

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:  # type: ignore[override]
        """Embeddings `(*sample_shape, *batch_shape, T, D)`, differentiable in the prior's parameters."""
        return self.transform._call(self.base_dist.rsample(torch.Size(sample_shape)))

    def log_prob(self, value: Tensor) -> Tensor:
        r"""$\log p(x)$ in nats, `(*sample_shape, *batch_shape)`; warns as `validate_args` says."""
        if value.dim() < 2 or value.shape[-2:] != self.event_shape:
            raise ArgumentError(
                f"value must end in the event shape {tuple(self.event_shape)}, received {tuple(value.shape)}; pass "
                "embeddings (..., T, D)."
            )
        flat: Tensor = self.prior.log_prob(value.reshape(-1, *self.event_shape), check=self._validate_args)
        shape = torch.broadcast_shapes(value.shape[:-2], self.batch_shape)
        return torch.broadcast_to(flat.reshape(value.shape[:-2]), shape)
