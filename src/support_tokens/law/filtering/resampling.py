r"""Resampling of weighted particles, and the effective sample size that asks for it."""

__all__ = ["SCHEMES", "effective_sample_size", "resample"]

import torch
from torch import Tensor

from support_tokens.errors import ArgumentError

SCHEMES = ("systematic", "residual")


def effective_sample_size(log_weights: Tensor) -> Tensor:
    r"""$1 / \sum_i W_i^2$ of normalised weights W: between 1 and N.

    Args:
        log_weights: `(N,)`, up to a constant.

    Example:
        >>> effective_sample_size(torch.tensor([0.0, 0.0, -torch.inf]))
        tensor(2.)
    """
    return (2 * torch.logsumexp(log_weights, 0) - torch.logsumexp(2 * log_weights, 0)).exp()


def resample(log_weights: Tensor, scheme: str = "systematic", generator: torch.Generator | None = None) -> Tensor:
    r"""Indices `(N,)` of the particles that go on; particle i is chosen $N W_i$ times on average, in either scheme.

    `systematic`: one uniform number, N equally spaced points. `residual`: $\lfloor N W_i \rfloor$ copies for certain,
    the rest by a multinomial draw from the remainders.

    Args:
        log_weights: `(N,)`, up to a constant; -inf counts as weight 0.
        scheme: `systematic` or `residual`.
        generator: Source of randomness; None: PyTorch's global one.

    Raises:
        ArgumentError: The scheme is unknown, or no weight is above zero.

    Source:
        Douc, Cappe, Moulines, "Comparison of resampling schemes for particle filtering", 2005.

    Example:
        >>> resample(torch.tensor([0.5, 0.5, 0.0]).log(), generator=torch.Generator().manual_seed(0)).max() < 2
        tensor(True)
    """
    if scheme not in SCHEMES:
        raise ArgumentError(f"scheme must be one of {', '.join(SCHEMES)}, received {scheme!r}; choose one of them.")
    weights = torch.softmax(log_weights.double(), 0)
    if not torch.isfinite(weights).all():
        raise ArgumentError("log_weights must have one finite entry or more and no NaN, received none; pass weights.")
    count, device = len(weights), weights.device
    if scheme == "systematic":
        offset = torch.rand((), generator=generator, dtype=torch.float64, device=device)
        points = (torch.arange(count, dtype=torch.float64, device=device) + offset) / count
        # The last sum may round to just below 1: the bound keeps the index inside.
        return torch.searchsorted(weights.cumsum(0), points, right=True).clamp_max(int(weights.nonzero()[-1]))
    expected = count * weights
    copies = expected.floor()
    fixed = torch.arange(count, device=device).repeat_interleave(copies.long())
    missing = count - len(fixed)
    if missing == 0:
        return fixed
    rest = torch.multinomial((expected - copies).clamp_min(0), missing, replacement=True, generator=generator)
    return torch.cat((fixed, rest))
