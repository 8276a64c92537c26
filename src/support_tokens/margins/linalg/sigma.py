r"""Smallest singular value of matrices by Lanczos bidiagonalisation of the inverse, with a bound on its error.

The largest singular value of $M^{-1}$ is $1/\sigma_{\min}(M)$ and mostly well separated, so that a few steps of
Golub-Kahan-Lanczos with full reorthogonalisation find it, each by two solves with one LU factorisation. The Ritz vector
$u$ is then checked with $M$ itself: with $\hat\sigma = |M u|$, $w = M u / \hat\sigma$ and $z = M^{-T} u$, some singular
value of $M^{-1}$ is within

$$ |z - w / \hat\sigma| + |M^T z - u| / \sigma_{\min} $$

of $1/\hat\sigma$, whatever the rounding errors of the factorisation; and $\hat\sigma \ge \sigma_{\min}$ always. Where
this is not small, and for small matrices, all singular values are computed.
"""

__all__ = ["SigmaMin", "sigma_min", "sigma_min_with_bound"]

from typing import NamedTuple

import torch
from torch import Tensor

from support_tokens.margins.linalg.elimination import matrices_times_vectors, probes
from support_tokens.margins.linalg.lapack import each_matrix
from support_tokens.margins.linalg.slogdet import checked_square, full_precision

# Up to this side all singular values cost about as much as the iteration.
_SMALL = 32
_MOST_STEPS, _CHECK_EVERY = 40, 4
# Relative residual at which the iteration stops; the error of the Ritz value is of the order of its square.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-5}
# Bytes of matrices that are iterated together.
_BATCH_BYTES = 32 * 2**20


class SigmaMin(NamedTuple):
    r"""Smallest singular values `(...)` and bounds on their absolute errors `(...)`.

    The bound is the distance to the nearest singular value of the matrix, rounding included. That this is the smallest
    one holds unless the fixed start vector has no component along its singular vector.
    """

    value: Tensor
    bound: Tensor


def sigma_min(matrix: Tensor) -> Tensor:
    r"""$\sigma_{\min}(M)$, the spectral-norm distance of `matrix` `(..., N, N)` to the nearest singular one, `(...)`.

    Example:
        >>> sigma_min(torch.diag(torch.tensor([3.0, 0.5])))
        tensor(0.5000)
    """
    return sigma_min_with_bound(matrix).value


def sigma_min_with_bound(matrix: Tensor) -> SigmaMin:
    r"""$\sigma_{\min}(M)$ with a bound on its error.

    The cost is about one LU factorisation. Where the iteration does not converge, where a gradient is required, and up
    to a side of 32, all singular values are computed.

    Args:
        matrix: `(..., N, N)`; 16-bit input is converted to float32.

    Raises:
        ArgumentError: The matrix is not square or empty.

    Source:
        Golub and Van Loan, Matrix Computations, 10.4.

    Example:
        >>> value, bound = sigma_min_with_bound(torch.diag(torch.arange(1.0, 65)))
        >>> bool((value - 1).abs() <= bound), bool(bound < 1e-3)
        (True, True)
    """
    matrix = checked_square(matrix, least=1)
    side = matrix.shape[-1]
    with full_precision(matrix):
        if side <= _SMALL or (matrix.requires_grad and torch.is_grad_enabled()):
            return _by_all_values(matrix)
        flat = matrix.reshape(-1, side, side)
        if not len(flat):
            return SigmaMin(*(matrix.new_zeros(matrix.shape[:-2]) for _ in range(2)))
        size = max(1, _BATCH_BYTES // (side * side * matrix.element_size()))
        parts = [_by_lanczos(part) for part in flat.split(size)]
    return SigmaMin(*(torch.cat(part).reshape(matrix.shape[:-2]) for part in zip(*parts, strict=True)))


def _by_all_values(matrix: Tensor) -> SigmaMin:
    return SigmaMin(torch.linalg.svdvals(matrix)[..., -1], 4 * _rounding(matrix))


def _rounding(matrix: Tensor) -> Tensor:
    """Size of rounding errors of products with matrices, `(...)`."""
    return 2 * torch.finfo(matrix.dtype).eps * matrix.detach().flatten(-2).norm(dim=-1)


@torch.no_grad()
def _by_lanczos(matrix: Tensor) -> SigmaMin:
    """As `sigma_min_with_bound`, of matrices `(m, N, N)`."""
    factors, pivots, _ = each_matrix(torch.linalg.lu_factor_ex, matrix)
    # The memory order of LAPACK; in any other one each solve would copy the factors.
    factors = factors.mT.contiguous().mT

    def solve(vector: Tensor, adjoint: bool) -> Tensor:
        return torch.linalg.lu_solve(factors, pivots, vector.unsqueeze(-1), adjoint=adjoint).squeeze(-1)

    ritz = _ritz_vector(solve, matrix)
    image = matrices_times_vectors(matrix, ritz)
    value = image.norm(dim=-1)
    pulled = solve(ritz, True)
    miss = matrices_times_vectors(matrix.mT, pulled) - ritz
    rounding = _rounding(matrix)
    unit = value.unsqueeze(-1)
    backward = miss.norm(dim=-1) + rounding * pulled.norm(dim=-1)
    relative = ((unit * pulled - image / unit).norm(dim=-1) + backward) / (1 - backward)
    bound = value * relative / (1 - relative) + rounding
    allowed = _TOLERANCE[matrix.dtype] * 4 * value + 8 * rounding
    sound = (backward < 0.5) & (relative < 0.5) & (bound <= allowed)  # NaN is not
    rest = (~sound).nonzero().squeeze(-1)
    if rest.numel():
        value[rest], bound[rest] = _by_all_values(matrix[rest])
    return SigmaMin(value, bound)


def _ritz_vector(solve, matrix: Tensor) -> Tensor:
    """Unit vectors `(m, N)` near the right singular vector of the smallest singular value."""
    count, side = matrix.shape[:2]
    start = probes(matrix)[0]
    v = (start / start.norm()).expand(count, side)
    steps = min(_MOST_STEPS, side)
    lefts, rights = (matrix.new_zeros(count, steps, side) for _ in range(2))
    bidiagonal = matrix.new_zeros(count, steps, steps)
    ritz = v
    for step in range(steps):
        rights[:, step] = v
        u, alpha = _new_direction(solve(v, False), lefts[:, :step])
        lefts[:, step] = u
        bidiagonal[:, step, step] = alpha
        v, beta = _new_direction(solve(u, True), rights[:, : step + 1])
        if step % _CHECK_EVERY == _CHECK_EVERY - 1 or step == steps - 1:
            part = bidiagonal[:, : step + 1, : step + 1]
            finite = part.isfinite().flatten(1).all(-1) & beta.isfinite()
            left, values, _ = torch.linalg.svd(torch.where(finite[:, None, None], part, 0.0))
            weights = left[..., 0]
            ritz = (weights.unsqueeze(-2) @ lefts[:, : step + 1]).squeeze(-2)
            residual = beta * weights[:, -1].abs()
            if bool(((residual <= _TOLERANCE[matrix.dtype] * values[:, 0]) | ~finite).all()):
                break
        if step + 1 < steps:
            bidiagonal[:, step, step + 1] = beta
    return ritz / ritz.norm(dim=-1, keepdim=True)


def _new_direction(vector: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The part of vectors `(m, N)` orthogonal to the rows of `basis` `(m, k, N)`, normalised, and its norm."""
    for _ in range(2):  # twice is enough for orthogonality to working precision
        vector = vector - ((basis @ vector.unsqueeze(-1)).mT @ basis).squeeze(-2)
    norm = vector.norm(dim=-1)
    return vector / norm.clamp_min(torch.finfo(vector.dtype).tiny).unsqueeze(-1), norm
