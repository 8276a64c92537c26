r"""Sign, $\log|\det|$ and inverse of a batch of matrices in one elimination.

On a processor LAPACK works on one matrix after the other and spends most of its time outside of matrix products. Here
blocks of columns of all matrices are eliminated at once (Gauss-Jordan, in place), so that nearly all of the $2 N^3$
operations are products of a whole batch. Pivots are sought within a block only, which may lose accuracy where a leading
block is nearly singular; so every inverse $X$ is tried on two probe vectors z, and where the backward error

$$ \eta = \frac{|M X z - z|}{|M|_F\, |X z|} > 8\,\epsilon $$

(LAPACK's own reaches half of that) the matrix is done again with full partial pivoting. On other devices, and under
`torch.compile`, partial pivoting is used at once: the trial would have to be waited for.
"""

__all__ = ["matrices_times_vectors", "probes", "slogdet_and_inverse", "slogdet_by_pivoting"]

import torch
from torch import Tensor

from support_tokens.margins.linalg.lapack import each_matrix

# Sides up to this one are eliminated without blocks: of many matrices row by row, all at once; of few by LAPACK, whose
# overhead is then smaller than that of the calls.
_LEAF, _MANY = 16, 128
# Bytes of matrices that are eliminated together: many calls at once, and still few bytes beside a model.
_BATCH_BYTES = 32 * 2**20
_PROBES = 2
_BACKWARD_ERROR = 8


def slogdet_and_inverse(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Sign of $\det M$, $\log|\det M|$ in nats, and $M^{-1}$, without a gradient.

    Args:
        matrix: `(..., N, N)`, float32 or float64.

    Returns:
        Sign and log-determinant `(...)`, inverse `(..., N, N)`. Where a pivot is below the smallest normal number, the
        sign is 0, that pivot counts as that number, and the inverse is 0.

    Source:
        Golub and Van Loan, Matrix Computations, 3.2 and 4.5 (block elimination); the trial is this package's own.

    Example:
        >>> sign, log_abs_det, inverse = slogdet_and_inverse(torch.diag(torch.tensor([2.0, -4.0])))
        >>> sign, inverse.diagonal()
        (tensor(-1.), tensor([ 0.5000, -0.2500]))
    """
    side = matrix.shape[-1]
    flat = matrix.reshape(-1, side, side)
    if side <= _LEAF or matrix.device.type != "cpu" or torch.compiler.is_compiling() or flat.shape[0] == 0:
        sign, log_abs_det, inverse = _by_pivoting(flat)
    else:
        size = max(1, _BATCH_BYTES // (side * side * matrix.element_size()))
        parts = [_by_blocks(part) for part in flat.split(size)]
        sign, log_abs_det, inverse = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    shape = matrix.shape[:-2]
    return sign.reshape(shape), log_abs_det.reshape(shape), inverse.reshape(matrix.shape)


def slogdet_by_pivoting(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Sign, $\log|\det M|$, factors and pivots of an LU factorisation with partial pivoting.

    Factors of a matrix that counts as singular have infinite pivots, so that what is solved with them is 0.

    Example:
        >>> sign, log_abs_det, _, _ = slogdet_by_pivoting(torch.diag(torch.tensor([1.0, -1.0])))
        >>> sign, log_abs_det
        (tensor(-1.), tensor(0.))
    """
    factors, pivots, _ = each_matrix(torch.linalg.lu_factor_ex, matrix)
    diagonal = factors.diagonal(dim1=-2, dim2=-1)
    tiny = torch.finfo(matrix.dtype).tiny
    singular = (diagonal.abs() < tiny).any(-1)
    in_place = torch.arange(1, matrix.shape[-1] + 1, device=matrix.device, dtype=pivots.dtype)
    swaps = (pivots != in_place).sum(-1)
    sign = diagonal.sign().prod(-1) * (1 - 2 * (swaps % 2)).to(matrix.dtype)
    log_abs_det = diagonal.abs().clamp_min(tiny).log().sum(-1)
    diagonal.masked_fill_(singular.unsqueeze(-1), torch.inf)
    return sign.masked_fill(singular, 0.0), log_abs_det, factors, pivots


def _by_pivoting(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sign, log_abs_det, factors, pivots = slogdet_by_pivoting(matrix)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    # What is solved only reads the factors, each by one thread: a batch comes out right.
    return sign, log_abs_det, torch.linalg.lu_solve(factors, pivots, identity.expand_as(matrix).contiguous())


def _by_blocks(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inverse = matrix.clone(memory_format=torch.contiguous_format)
    sign, log_abs_det = _eliminate(inverse)
    allowed = _BACKWARD_ERROR * torch.finfo(matrix.dtype).eps * matrix.flatten(1).norm(dim=1)
    sound = torch.ones_like(sign, dtype=torch.bool)
    for probe in probes(matrix):
        tried = (inverse.flatten(0, 1) @ probe).view(inverse.shape[:2])
        miss = matrices_times_vectors(matrix, tried) - probe
        sound &= miss.norm(dim=1) <= allowed * tried.norm(dim=1)  # NaN is not
    unsound = (~sound).nonzero().squeeze(-1)
    if unsound.numel():
        sign[unsound], log_abs_det[unsound], inverse[unsound] = _by_pivoting(matrix[unsound])
    return sign, log_abs_det, inverse


def probes(matrix: Tensor) -> Tensor:
    """Fixed vectors `(2, N)` of entries in [-1, 1] that look random: a quadratic chirp."""
    count = torch.arange(_PROBES * matrix.shape[-1], dtype=torch.float64)
    return (count.square() * 2.399963).cos().to(matrix.dtype).reshape(_PROBES, -1)


def matrices_times_vectors(matrix: Tensor, vector: Tensor) -> Tensor:
    """Products of matrices `(m, N, N)` with one vector each, `(m, N)`."""
    # Products of matrices with few columns are the slow case of a processor's library: neither form below is one.
    if matrix.shape[-1] > 128:
        return torch.stack([m @ v for m, v in zip(matrix, vector, strict=True)])
    return (matrix * vector.unsqueeze(1)).sum(-1)


def _by_rows(work: Tensor) -> tuple[Tensor, Tensor]:
    """Gauss-Jordan elimination of many small matrices `(m, N, N)` in place, in the order of their rows.

    A pivot of 0 leaves infinities, which the trial finds. Matrices are innermost in memory, so that every operation
    runs along them.
    """
    inverse = work.permute(1, 2, 0).contiguous()
    pivots = torch.empty_like(inverse[0])
    for step in range(inverse.shape[0]):
        pivots[step] = pivot = inverse[step, step]
        reciprocal = pivot.reciprocal()
        row = inverse[step] * reciprocal
        row[step] = reciprocal
        column = inverse[:, step].clone()
        column[step] = 0.0
        inverse[:, step] = 0.0
        inverse.addcmul_(column.unsqueeze(1), row, value=-1.0)
        inverse[step] = row
    work.copy_(inverse.permute(2, 0, 1))
    log_abs_det = pivots.abs().clamp_min(torch.finfo(work.dtype).tiny).log().sum(0)
    return pivots.sign().prod(0), log_abs_det


def _eliminate(work: Tensor) -> tuple[Tensor, Tensor]:
    """Inverts matrices `(m, N, N)` in place; returns sign and log-determinant."""
    side = work.shape[-1]
    if side <= _LEAF and work.shape[0] >= _MANY:
        return _by_rows(work)
    if side <= _LEAF:
        sign, log_abs_det, inverse = _by_pivoting(work)
        work.copy_(inverse)
        return sign, log_abs_det
    size = 64 if side > 128 else 16 if work.shape[0] >= _MANY else max(8, -(-side // 32) * 8)
    sign, log_abs_det = work.new_ones(work.shape[0]), work.new_zeros(work.shape[0])
    for start in range(0, side, size):
        block = slice(start, min(start + size, side))
        corner = work[:, block, block].contiguous()
        part = _eliminate(corner)
        sign, log_abs_det = sign * part[0], log_abs_det + part[1]
        # One product does the whole step: rows of the block become corner^-1 times them, columns of the block those of
        # the inverse, and all else loses its part in the block.
        rows = corner @ work[:, block]
        rows[:, :, block] = corner
        columns = -work[:, :, block]
        columns[:, block] = torch.eye(corner.shape[-1], dtype=work.dtype)
        work[:, :, block].zero_()
        work[:, block].zero_()
        work.baddbmm_(columns, rows)
    return sign, log_abs_det
