r"""Jacobian blocks as sums of a few products, and the log-determinant of the identity plus such a sum.

Each block is a sum of shared matrices and a low-rank, per-position correction. Its rows of head h are

$$ M^h_t = A^h_t W_h + a^h_t V_h + L^h_t R_t, $$

with $W_h$ and $V_h$ products of weights and $L_t R_t$ of low rank. The factors are small; the $K \times K$ matrix is
formed, inverted and contracted with them by matrix products, in few passes over memory. It is stored transposed, since
the gradient is $J_t^{-T}$.
"""

__all__ = ["LowRankBlocks", "PenaltyResult", "assemble", "block_penalty", "block_slogdet", "matrices_at_once"]

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from support_tokens.margins.linalg.elimination import slogdet_and_inverse
from support_tokens.margins.linalg.slogdet import Slogdet, safe_slogdet


class LowRankBlocks(NamedTuple):
    r"""Factors of the blocks of n positions of B sequences; K = H Rv where the blocks are square.

    A term that is absent has a factor of size 0. Make one with `of`.

    Args:
        rows: $A$, `(B, H, n, Rv, R)`.
        shared: $W$, `(H, R, K)`; of size 0 where `rows` are the whole blocks, with H = 1 and R = K.
        own: $a$, `(B, H, n)`.
        own_shared: $V$, `(H, Rv, K)`.
        left: $L$, `(B, n, H Rv, r)`.
        right: $R$, `(B, n, r, K)`.
    """

    rows: Tensor
    shared: Tensor
    own: Tensor
    own_shared: Tensor
    left: Tensor
    right: Tensor

    @classmethod
    def of(
        cls,
        rows: Tensor,
        shared: Tensor | None = None,
        own: Tensor | None = None,
        own_shared: Tensor | None = None,
        left: Tensor | None = None,
        right: Tensor | None = None,
    ) -> "LowRankBlocks":
        """Blocks from the factors that there are: `own` and `own_shared` go together, and so do `left` and `right`."""
        batch, heads, count, height, width = rows.shape
        empty = lambda *shape: rows.new_empty(shape)  # noqa: E731
        return cls(
            rows,
            empty(heads, 0, width) if shared is None else shared,
            empty(batch, 0, count) if own is None else own,
            empty(heads, 0, width) if own_shared is None else own_shared,
            empty(batch, count, heads * height, 0) if left is None else left,
            empty(batch, count, 0, width) if right is None else right,
        )

    @property
    def is_whole(self) -> bool:
        """Whether `rows` are the whole blocks."""
        return not self.shared.numel()


def assemble(blocks: LowRankBlocks) -> Tensor:
    r"""The blocks $M_t$, `(B, n, H Rv, K)`, differentiable to any order.

    Example:
        >>> assemble(LowRankBlocks.of(torch.randn(2, 1, 5, 3, 3))).shape
        torch.Size([2, 5, 3, 3])
    """
    rows, shared, own, own_shared, left, right = blocks
    if blocks.is_whole:
        return rows.squeeze(1)
    batch, heads, count, height, _ = rows.shape
    out = torch.bmm(rows.transpose(0, 1).flatten(1, 3), shared).view(heads, batch, count, height, shared.shape[-1])
    # In place: to allocate a matrix costs as much as to write it.
    if own.numel():
        out.addcmul_(own.transpose(0, 1)[..., None, None], own_shared[:, None, None])
    flat = out.permute(1, 2, 0, 3, 4).reshape(batch * count, heads * height, shared.shape[-1])
    if left.numel():
        flat.baddbmm_(left.flatten(0, 1), right.flatten(0, 1))
    return flat.unflatten(0, (batch, count))


def block_slogdet(blocks: LowRankBlocks, view: int) -> Slogdet:
    r"""Sign and $\log|\det(I + s M_t)|$ at all positions, `(B, n)`, with $s$ = `view`, -1 or 1; differentiable.

    Example:
        >>> block_slogdet(LowRankBlocks.of(torch.full((1, 1, 1, 1, 1), 3.0)), -1)
        Slogdet(sign=tensor([[-1.]]), log_abs_det=tensor([[0.6931]]))
    """
    # The sign multiplies the small factors and the identity is added in place: both save a pass over the matrices.
    signed = blocks._replace(rows=view * blocks.rows, own=view * blocks.own, left=view * blocks.left)
    matrix = assemble(signed)
    matrix.diagonal(dim1=-2, dim2=-1).add_(1.0)
    # The transpose has the same determinant and is in the memory order of LAPACK.
    return safe_slogdet(matrix.mT)


class PenaltyResult(NamedTuple):
    """A weighted sum of penalties: its value, sign and log margins `(B, n)`, and its gradient by each factor."""

    value: Tensor
    sign: Tensor
    log_abs_det: Tensor
    gradient: LowRankBlocks


@torch.no_grad()
def block_penalty(
    blocks: LowRankBlocks,
    view: int,
    weight: Tensor,
    function: Callable[[Tensor], Tensor],
    *,
    chunk_size: int | None = None,
) -> PenaltyResult:
    r"""$\sum_t w_t f(\log|\det J_t|)$ for $J_t = I + s M_t$, with its gradient, each matrix eliminated once.

    $$ \frac{\partial}{\partial M_t} = s\, w_t f'(\log|\det J_t|)\, J_t^{-T}, $$

    contracted with the factors chunk by chunk. The gradient is 0 at an exactly singular matrix.

    Args:
        blocks: Square blocks, float32 or float64.
        view: $s$, -1 or 1.
        weight: $w$, `(B, n)`.
        function: $f$, elementwise on a tensor of log margins.
        chunk_size: Matrices held at once; None chooses by memory.

    Example:
        >>> blocks = LowRankBlocks.of(torch.zeros(1, 1, 2, 3, 3))
        >>> result = block_penalty(blocks, 1, torch.ones(1, 2), torch.exp)
        >>> result.value, result.gradient.rows[0, 0, 0].diagonal()
        (tensor(2.), tensor([1., 1., 1.]))
    """
    flat = _flattened(blocks)
    size = matrices_at_once(flat.rows) if chunk_size is None else chunk_size
    value = weight.new_zeros(())
    signs, log_margins, gradients = [], [], []
    to_shared, to_own_shared = (
        torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in (flat.shared, flat.own_shared)
    )
    for start in range(0, weight.numel(), size):
        chunk = slice(start, start + size)
        part = flat._replace(rows=flat.rows[chunk], own=flat.own[chunk], left=flat.left[chunk], right=flat.right[chunk])
        sign, log_abs_det, inverse = slogdet_and_inverse(_transposed_plus_identity(view, part))
        with torch.enable_grad():
            leaf = log_abs_det.requires_grad_()
            penalty = (weight.reshape(-1)[chunk] * function(leaf)).sum()
            (slope,) = torch.autograd.grad(penalty, leaf)
        value += penalty.detach()
        signs.append(sign)
        log_margins.append(log_abs_det.detach())
        gradients.append(_contracted(inverse, view * slope, part, to_shared, to_own_shared))
    rows, own, left, right = (
        (parts[0] if len(parts) == 1 else torch.cat(parts)).unflatten(0, weight.shape)
        for parts in zip(*gradients, strict=True)
    )
    gradient = LowRankBlocks(rows.transpose(1, 2), to_shared, own.transpose(1, 2), to_own_shared, left, right)
    sign, log_abs_det = (torch.cat(parts).reshape(weight.shape) for parts in (signs, log_margins))
    return PenaltyResult(value, sign, log_abs_det, gradient)


# Bytes of the matrices of a chunk, few beside any model's activations. Of large matrices several are held anyway, since
# every chunk costs calls.
_CHUNK_BYTES = 2 * 2**20
_FEW, _MOST_BYTES = 24, 64 * 2**20
_LEAST_COLUMNS = 16


def matrices_at_once(rows: Tensor) -> int:
    """Number of matrices in a chunk, given flattened `rows` `(N, H, Rv, R)`.

    Example:
        >>> matrices_at_once(torch.empty(0, 1, 32, 32)), matrices_at_once(torch.empty(0, 9, 64, 64))
        (512, 24)
    """
    one = (rows.shape[1] * rows.shape[2]) ** 2 * rows.element_size()
    return max(1, _CHUNK_BYTES // one, min(_FEW, _MOST_BYTES // one))


def _flattened(blocks: LowRankBlocks) -> LowRankBlocks:
    """Detached factors, with one leading dimension for all positions of all sequences."""
    rows, shared, own, own_shared, left, right = (tensor.detach() for tensor in blocks)
    rows, own = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (rows, own))
    return LowRankBlocks(rows, shared, own, own_shared, left.flatten(0, 1), right.flatten(0, 1))


def _transposed_plus_identity(view: int, blocks: LowRankBlocks) -> Tensor:
    """(I + s M)^T at all positions, `(N, K, K)`, from flattened blocks."""
    rows, shared, own, own_shared, left, right = blocks
    total, heads, height, _ = rows.shape
    if blocks.is_whole:
        out = rows.new_empty(total, height, height)
        torch.mul(rows.squeeze(1).mT, view, out=out)
    else:
        side = shared.shape[-1]
        by_head = rows.new_empty(total, side, heads, height)
        scaled = rows * view
        for head in range(heads):
            torch.bmm(shared[head].mT.expand(total, -1, -1), scaled[:, head].mT, out=by_head[:, :, head])
        if own.numel():
            by_head.addcmul_((own * view).reshape(total, 1, heads, 1), own_shared.permute(2, 0, 1))
        out = by_head.view(total, side, side)
        if left.numel():
            out.baddbmm_(right.mT, left.mT, alpha=view)
    out.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return out


def _contracted(
    inverse: Tensor, slope: Tensor, blocks: LowRankBlocks, to_shared: Tensor, to_own_shared: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Gradients of $\sum_t g_t M_t \cdot J_t^{-T}$ by flattened rows, own, left and right.

    Those by the shared factors are added to `to_shared` and `to_own_shared`. `inverse` is $J^{-T}$, `(N, K, K)`, and
    `slope` $g$, `(N,)`.
    """
    rows, shared, own, own_shared, left, right = blocks
    total, heads, height, _ = rows.shape
    scale = slope.reshape(-1, 1, 1)
    to_own, to_left, to_right = torch.empty_like(own), torch.empty_like(left), torch.empty_like(right)
    if blocks.is_whole:
        return inverse.mul_(scale).unsqueeze(1), to_own, to_left, to_right
    by_head = inverse.view(total, heads, height, -1)
    scaled = rows * scale.unsqueeze(-1)
    to_rows = torch.empty_like(scaled)
    for head in range(heads):
        block = by_head[:, head]
        torch.bmm(block, shared[head].mT.expand(total, -1, -1), out=to_rows[:, head])
        to_shared[head].addmm_(scaled[:, head].flatten(0, 1).mT, block.flatten(0, 1))
        if own.numel():
            wide = block.flatten(1)  # (N, Rv K)
            to_own[:, head] = wide @ own_shared[head].flatten()
            to_own_shared[head].view(-1).addmv_(wide.mT, own[:, head] * slope)
    to_own *= slope.unsqueeze(-1)
    if left.numel():
        rank = left.shape[-1]
        # Products with few columns are slow on processors, so there are at least 16.
        spare = max(0, _LEAST_COLUMNS - rank)
        to_left = (inverse @ pad(right * scale, (0, 0, 0, spare)).mT)[..., :rank]
        to_right = (pad(left * scale, (0, spare)).mT @ inverse)[:, :rank]
    return to_rows.mul_(scale.unsqueeze(-1)), to_own, to_left, to_right
