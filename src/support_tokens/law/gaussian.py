"""The isotropic normal density, which the law, its layers and its emissions share."""

__all__ = ["gaussian_log_prob"]

import math

from torch import Tensor


def gaussian_log_prob(residual: Tensor, log_scale: Tensor | float) -> Tensor:
    r"""$\log N(\epsilon; 0, \sigma^2 I)$ in nats, over the last dimension.

    Args:
        residual: $\epsilon$, `(..., D)`.
        log_scale: $\log\sigma$.

    Returns:
        Of shape `(...)`.

    Example:
        >>> import torch
        >>> gaussian_log_prob(torch.zeros(3, 2), 0.0)
        tensor([-1.8379, -1.8379, -1.8379])
    """
    variance = (2 * log_scale).exp() if isinstance(log_scale, Tensor) else math.exp(2 * log_scale)
    constant = residual.shape[-1] * (math.log(2 * math.pi) + 2 * log_scale)
    return -0.5 * (residual.square().sum(-1) / variance + constant)
