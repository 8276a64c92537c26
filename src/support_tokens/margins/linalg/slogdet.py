r"""Sign and log-determinant with a gradient that is safe at exactly singular matrices.

Range of validity: float32 and float64 (16-bit input is taken to float32, autocast is off). The determinant itself is
never formed.
At an exactly singular matrix $\log|\det|$ is $-\infty$ and its gradient does not exist; here a pivot below the
smallest normal number counts as that number, the sign is 0 and the gradient of that matrix is 0, so that one
degenerate position can neither poison a batch nor pull on it. A merely near-singular matrix keeps its exact, large
gradient $J^{-T}$.
"""

__all__ = ["Slogdet", "checked_square", "full_precision", "is_near_singular", "safe_slogdet"]

from typing import NamedTuple

import torch
from torch import Tensor

from support_tokens.errors import ArgumentError
from support_tokens.margins.linalg.elimination import slogdet_and_inverse, slogdet_by_pivoting
from support_tokens.margins.linalg.lapack import each_matrix


class Slogdet(NamedTuple):
    r"""Sign of the determinant and $\log|\det|$ in nats, of one shape, `(B, T)` for a batch of sequences."""

    sign: Tensor
    log_abs_det: Tensor


def full_precision(tensor: Tensor):
    """Context in which autocast is off for the device of `tensor`: it would compute float32 matrices in 16 bits."""
    return torch.autocast(tensor.device.type, enabled=False)


def safe_slogdet(matrix: Tensor) -> Slogdet:
    r"""Sign and $\log|\det M|$ by LU factorisation; the gradient is $\partial \log|\det M| / \partial M = M^{-T}$.

    Args:
        matrix: `(..., N, N)`; 16-bit input is taken to float32.

    Returns:
        `Slogdet` of shape `(...)`; sign 0, a finite value and a zero gradient at an exactly singular matrix; 1 and 0
        nats at N = 0.

    Raises:
        ArgumentError: The matrix is not square.

    Example:
        >>> safe_slogdet(torch.diag(torch.logspace(-4, -3, 100, dtype=torch.float64))).log_abs_det.round(decimals=4)
        tensor(-805.9048, dtype=torch.float64)
    """
    matrix = checked_square(matrix)
    if not matrix.shape[-1]:
        # The empty product, as in torch.linalg.slogdet.
        zero = matrix.sum((-2, -1))
        return Slogdet(torch.ones_like(zero), zero)
    with full_precision(matrix):
        sign, log_abs_det = _LUSlogdet.apply(matrix)
    return Slogdet(sign, log_abs_det)


class _LUSlogdet(torch.autograd.Function):
    @staticmethod
    def forward(ctx, matrix: Tensor) -> tuple[Tensor, Tensor]:
        sign, log_abs_det, _, _ = slogdet_by_pivoting(matrix)
        ctx.save_for_backward(matrix)
        ctx.mark_non_differentiable(sign)
        return sign, log_abs_det

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> Tensor | None:
        grad = gradients[1]
        if grad is None:
            return None
        (matrix,) = ctx.saved_tensors
        sign, _, inverse = slogdet_and_inverse(matrix.detach())
        if torch.is_grad_enabled():
            # A graph of the gradient is wanted (second order): the inverse must itself be differentiable.
            singular = (sign == 0)[..., None, None]
            identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
            inverse = each_matrix(torch.linalg.inv, torch.where(singular, identity, matrix))
            inverse = torch.where(singular, torch.zeros_like(matrix), inverse)
        return grad[..., None, None] * inverse.mT


def is_near_singular(matrix: Tensor, tolerance: float | None = None) -> Tensor:
    r"""Whether $\sigma_{\min}(M) \le \mathrm{tolerance} \cdot \sigma_{\max}(M)$: singular to working precision.

    Args:
        matrix: `(..., N, N)`.
        tolerance: Relative; None: N times the machine epsilon of the dtype.

    Returns:
        Boolean tensor `(...)`.

    Example:
        >>> is_near_singular(torch.tensor([[1.0, 2, 3], [2, 5, 6], [3, 6, 9]]))
        tensor(True)
    """
    matrix = checked_square(matrix, least=1)
    if tolerance is None:
        tolerance = matrix.shape[-1] * torch.finfo(matrix.dtype).eps
    with full_precision(matrix):
        values = torch.linalg.svdvals(matrix)
    return values[..., -1] <= tolerance * values[..., 0]


def checked_square(matrix: Tensor, least: int = 0) -> Tensor:
    """`matrix` in float32 or float64, after a check that it is `(..., N, N)` with N at least `least`."""
    if matrix.dim() < 2 or matrix.shape[-1] != matrix.shape[-2] or not matrix.is_floating_point():
        raise ArgumentError(
            f"matrix must be floating and square, (..., N, N), received {tuple(matrix.shape)} of {matrix.dtype}; pass "
            f"square matrices."
        )
    if matrix.shape[-1] < least:
        raise ArgumentError(
            f"matrix must have at least one row, since an empty one has no singular value, received "
            f"{tuple(matrix.shape)}; pass matrices of N >= 1."
        )
    return matrix if matrix.dtype in (torch.float32, torch.float64) else matrix.float()
