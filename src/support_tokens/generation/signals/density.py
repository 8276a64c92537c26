r"""Log-density of each embedding given those before it, under a law of embeddings.

$$ \log p(x_t \mid x_{<t}) = \log N(x_t - \mu_t; 0, \sigma^2 I) + \log|\det J_t| . $$
"""

__all__ = ["EmbeddingDensity"]

import math

import torch
from torch import Tensor

from support_tokens.errors import ArgumentError
from support_tokens.law import EmbeddingLaw, EmbeddingPrior
from support_tokens.margins import moments, state_margins
from support_tokens.margins.linalg import full_precision


class EmbeddingDensity:
    r"""The terms of the log-density of a text in nats, continued from one call to the next.

    Each call projects all earlier embeddings again, O(S D R) per token.

    Args:
        law: An `EmbeddingLaw` or its `EmbeddingPrior`, as wide as the embeddings.

    Raises:
        ArgumentError: `law` is of another type.

    Example:
        >>> prior = EmbeddingPrior(3).double()
        >>> x = torch.randn(2, 5, 3, dtype=torch.float64)
        >>> terms = EmbeddingDensity(prior)(x, torch.ones(2, 5, dtype=torch.bool))
        >>> torch.allclose(terms.sum(-1), prior.log_prob(x))
        True
    """

    def __init__(self, law: EmbeddingLaw | EmbeddingPrior) -> None:
        prior = getattr(law, "prior", law)
        if not isinstance(prior, EmbeddingPrior):
            raise ArgumentError(
                f"law must be an EmbeddingLaw or an EmbeddingPrior, received {type(law).__name__}; fit one to the "
                "embeddings of the model first."
            )
        self.prior = prior
        self._x: Tensor | None = None
        self._valid: Tensor | None = None

    def __call__(self, x: Tensor, valid: Tensor) -> Tensor:
        """Terms of n more positions, `(B, n)`, for embeddings `(B, n, D)`; 0 at padding."""
        self._x = x if self._x is None else torch.cat((self._x, x), dim=1)
        self._valid = valid if self._valid is None else torch.cat((self._valid, valid), dim=1)
        rows = slice(self._x.shape[1] - x.shape[1], self._x.shape[1])
        prior, positions = self.prior, torch.arange(rows.start, rows.stop, device=x.device).expand(len(x), -1)
        with full_precision(x):
            state = prior.state(self._x, None if bool(self._valid.all()) else self._valid)
            noise = state.value[:, 0, rows] - moments(state, rows, covariance=False).mean[:, 0]
            scale = prior.log_noise_scale
            gaussian = -0.5 * (
                noise.square().sum(-1) * (-2 * scale).exp() + prior.width * (math.log(2 * math.pi) + 2 * scale)
            )
            terms = gaussian + state_margins(state, positions=positions).log_abs_det
        return terms.masked_fill(~valid, 0.0)
