r"""Functions of LU factorisations, right for batches too.

On a processor torch shares a batch of matrices between threads, and the LAPACK of MKL underneath shares each matrix
again. From a side of about 150 the two get in each other's way: rows are exchanged wrongly, and determinants, inverses
and solutions are wrong by any amount, mostly without an error (pytorch issues 141358 and 142815; so in torch 2.13). So
batches of large matrices are done here one matrix after the other, each with all threads, which costs nothing at these
sizes. Factorisations without exchanges of rows (QR, Cholesky, singular and eigenvalues) are not concerned.
"""

__all__ = ["each_matrix"]

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Far below the least side at which a result was seen to be wrong, and above those where a call a matrix costs time.
_SAFE_SIDE = 64


def each_matrix(function: Callable[..., Any], *batches: Tensor) -> Any:
    """`function(*batches)`, one matrix after the other where a batch of them could come out wrong.

    Args:
        function: Of `torch.linalg`, such as `solve`: of matrices to a tensor or a tuple of tensors.
        batches: `(..., N, K)`, of the same dimensions in front; the first is what is factorised, `(..., N, N)`.

    Returns:
        As the function.

    Example:
        >>> each_matrix(torch.linalg.solve, 2 * torch.eye(2).expand(3, 2, 2), torch.ones(3, 2, 1)).flatten(1)[0]
        tensor([0.5000, 0.5000])
    """
    matrix = batches[0]
    shape = matrix.shape[:-2]
    if matrix.device.type != "cpu" or matrix.shape[-1] <= _SAFE_SIDE or shape.numel() <= 1 or _one_thread():
        return function(*batches)
    flat = (batch.reshape(-1, *batch.shape[-2:]).unbind(0) for batch in batches)
    parts = [function(*matrices) for matrices in zip(*flat, strict=True)]
    if isinstance(parts[0], Tensor):
        return torch.stack(parts).unflatten(0, shape)
    return tuple(torch.stack(part).unflatten(0, shape) for part in zip(*parts, strict=True))


def _one_thread() -> bool:
    # A compiled graph outlives the number of threads that it was traced under.
    return not torch.compiler.is_compiling() and torch.get_num_threads() == 1
