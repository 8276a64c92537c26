r"""A law that cannot leave the side on which it is a density: its coupling is a skew matrix minus a positive one.

$$ A = S - L L^T, \qquad S = -S^T, \quad L \text{ lower triangular}, $$

is every coupling whose symmetric part has no positive eigenvalue (see `support_tokens.law.certificate`). Fitted without
this, a law
may fold: the formula then counts embeddings more than once, and its maximum is no likelihood.
"""

__all__ = ["keep_repulsive"]

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from support_tokens.errors import ArgumentError
from support_tokens.law.prior import EmbeddingPrior


class _Repulsive(nn.Module):
    r"""$W_Q = \sqrt{D} (S - L L^T)$ from one square matrix: S from above its diagonal, L from the rest; $W_K = I$."""

    def forward(self, raw: Tensor) -> Tensor:
        above, lower = raw.triu(1), raw.tril()
        return math.sqrt(len(raw)) * (above - above.mT - lower @ lower.mT)

    def right_inverse(self, w_q: Tensor) -> Tensor:
        coupling = w_q / math.sqrt(len(w_q))
        symmetric = 0.5 * (coupling + coupling.mT)
        values, vectors = torch.linalg.eigh(-symmetric)
        # The nearest positive matrix, kept off zero: at a zero factor its gradient would vanish.
        positive = (vectors * values.clamp_min(1e-3)) @ vectors.mT
        return (coupling - symmetric).triu(1) + torch.linalg.cholesky(positive)


def keep_repulsive(prior: EmbeddingPrior) -> EmbeddingPrior:
    r"""Restricts a prior, in place, to couplings whose law is a density for every past, whatever training does.

    Its coupling becomes the nearest such one: the positive part of the symmetric part is cut off. $W_K$ is fixed to the
    identity, which loses nothing at full rank. `torch.nn.utils.parametrize.remove_parametrizations(prior, "w_q")` ends
    the restriction.

    Args:
        prior: A prior of full rank, R = D.

    Returns:
        The same prior.

    Raises:
        ArgumentError: The rank is not the width, or the prior is restricted already.

    Example:
        >>> prior = keep_repulsive(EmbeddingPrior(width=3))
        >>> prior.certificate(10 * torch.randn(1, 6, 3)).globally_injective
        True
    """
    if prior.rank != prior.width:
        raise ArgumentError(
            f"prior must have full rank to be restricted, received rank {prior.rank} and width {prior.width}; "
            "make it with rank=None."
        )
    if parametrize.is_parametrized(prior):
        raise ArgumentError("prior must not be restricted twice, received one that is; call keep_repulsive once.")
    with torch.no_grad():
        coupling = prior.coupling.clone()
        prior.w_q.copy_(math.sqrt(prior.width) * coupling)
        prior.w_k.copy_(torch.eye(prior.width))
    prior.w_k.requires_grad_(False)
    parametrize.register_parametrization(prior, "w_q", _Repulsive())
    return prior
