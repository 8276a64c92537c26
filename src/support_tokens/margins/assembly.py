r"""Jacobian blocks as sums of few products, and the log-determinant of the identity plus such a sum.

A block is never far from what all positions share: its rows of head h are

$$ M^h_t = A^h_t W_h + a^h_t V_h + L^h_t R_t, $$

with $W_h$ and $V_h$ products of weights and $L_t R_t$ of a small rank. The factors are small; what is large, the
$K \times K$ matrix, is formed, inverted and contracted with them by matrix products, in few passes over memory. It is
held transposed, since the gradient is $J_t^{-T}$.
"""

__all__ = ["LowRankFactors", "Penalised", "assemble", "block_penalty", "block_slogdet", "matrices_at_once"]

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from support_tokens.margins.linalg.elimination import slogdet_and_inverse
from support_tokens.margins.linalg.slogdet import Slogdet, safe_slogdet


class LowRankFactors(NamedTuple):
    r"""LowRankFactors of the blocks of n positions of B sequences, K = H Rv for square ones.

    Args:
        rows: $A$, `(B, H, n, Rv, R)`.
        shared: $W$, `(H, R, K)`; None: `rows` are all there is, with H = 1 and R = K.
        own: $a$, `(B, H, n)`, or None.
        own_shared: $V$, `(H, Rv, K)`, or None.
        left: $L$, `(B, n, H Rv, r)`, or None.
        right: $R$, `(B, n, r, K)`, or None.
    """

    rows: Tensor
    shared: Tensor | None = None
    own: Tensor | None = None
    own_shared: Tensor | None = None
    left: Tensor | None = None
    right: Tensor | None = None


def assemble(factors: LowRankFactors) -> Tensor:
    r"""$M_t$ of all positions, `(B, n, H Rv, K)`, differentiable to any order.

    Example:
        >>> assemble(LowRankFactors(torch.randn(2, 1, 5, 3, 3))).shape
        torch.Size([2, 5, 3, 3])
    """
    rows, shared, own, own_shared, left, right = factors
    if shared is None:
        return rows.squeeze(1)
    batch, heads, count, height, _ = rows.shape
    out = torch.bmm(rows.transpose(0, 1).flatten(1, 3), shared).view(heads, batch, count, height, shared.shape[-1])
    # In place: to allocate a matrix costs as much as to write it.
    if own is not None:
        out.addcmul_(own.transpose(0, 1)[..., None, None], own_shared[:, None, None])  # type: ignore[index]
    flat = out.permute(1, 2, 0, 3, 4).reshape(batch * count, heads * height, shared.shape[-1])
    if left is not None:
        flat.baddbmm_(left.flatten(0, 1), right.flatten(0, 1))  # type: ignore[union-attr]
    return flat.unflatten(0, (batch, count))


def block_slogdet(factors: LowRankFactors, view: int) -> Slogdet:
    r"""Sign and $\log|\det(I + s M_t)|$ of all positions, `(B, n)`, with $s$ = `view`, -1 or 1; differentiable.

    Example:
        >>> block_slogdet(LowRankFactors(torch.full((1, 1, 1, 1, 1), 3.0)), -1)
        Slogdet(sign=tensor([[-1.]]), log_abs_det=tensor([[0.6931]]))
    """
    # What is large is passed over as rarely as can be: the sign goes into the small factors, the identity into place.
    rows, shared, own, own_shared, left, right = factors
    signed = lambda t: None if t is None else view * t  # noqa: E731
    matrix = assemble(LowRankFactors(view * rows, shared, signed(own), own_shared, signed(left), right))
    matrix.diagonal(dim1=-2, dim2=-1).add_(1.0)
    # Its transpose has the same determinant, and the order in memory that LAPACK reads.
    return safe_slogdet(matrix.mT)


class Penalised(NamedTuple):
    """What `block_penalty` computes: the sum, sign and log margins `(B, n)`, and the gradient of the sum by factor."""

    value: Tensor
    sign: Tensor
    log_abs_det: Tensor
    gradient: LowRankFactors


@torch.no_grad()
def block_penalty(
    factors: LowRankFactors,
    view: int,
    weight: Tensor,
    function: Callable[[Tensor], Tensor],
    *,
    chunk_size: int | None = None,
) -> Penalised:
    r"""$\sum_t w_t f(\log|\det J_t|)$ for $J_t = I + s M_t$, with its gradient, each matrix eliminated once.

    $$ \frac{\partial}{\partial M_t} = s\, w_t f'(\log|\det J_t|)\, J_t^{-T}, $$

    contracted with the factors at once, so that no matrix outlives its chunk. 0 at an exactly singular matrix.

    Args:
        factors: Of square blocks, float32 or float64.
        view: $s$, -1 or 1.
        weight: $w$, `(B, n)`.
        function: $f$, elementwise on a tensor of log margins.
        chunk_size: Matrices held at once; None chooses by memory.

    Example:
        >>> found = block_penalty(LowRankFactors(torch.zeros(1, 1, 2, 3, 3)), 1, torch.ones(1, 2), torch.exp)
        >>> found.value, found.gradient.rows[0, 0, 0].diagonal()
        (tensor(2.), tensor([1., 1., 1.]))
    """
    shape = factors.rows.shape
    flat = _flattened(factors)
    size = matrices_at_once(flat.rows) if chunk_size is None else chunk_size
    value, found, grads = weight.new_zeros(()), [], []
    shared, own_shared = _zeros_like(flat.shared), _zeros_like(flat.own_shared)
    for start in range(0, weight.numel(), size):
        chunk = slice(start, start + size)
        part = LowRankFactors(
            flat.rows[chunk], flat.shared, _of(flat.own, chunk), flat.own_shared, *(_of(t, chunk) for t in flat[4:])
        )
        sign, log_abs_det, inverse = slogdet_and_inverse(_transposed_plus_identity(view, part))
        with torch.enable_grad():
            leaf = log_abs_det.requires_grad_()
            penalty = (weight.reshape(-1)[chunk] * function(leaf)).sum()
            (slope,) = torch.autograd.grad(penalty, leaf)
        value += penalty.detach()
        found.append((sign, log_abs_det.detach()))
        grads.append(_contracted(inverse, view * slope, part, shared, own_shared))
    rows, own, left, right = (_joined([grad[i] for grad in grads]) for i in range(4))
    sign, log_abs_det = (torch.cat(parts).reshape(weight.shape) for parts in zip(*found, strict=True))
    back = lambda t: None if t is None else t.unflatten(0, weight.shape)  # noqa: E731
    rows = rows.view(shape) if shared is None else back(rows).transpose(1, 2)  # type: ignore[union-attr]
    own = None if own is None else back(own).transpose(1, 2)  # type: ignore[union-attr]
    return Penalised(value, sign, log_abs_det, LowRankFactors(rows, shared, own, own_shared, back(left), back(right)))


# Bytes of a chunk's matrices, few beside any model's activations; of large ones a few all the same, since each chunk
# costs calls.
_CHUNK_BYTES = 2 * 2**20
_FEW, _MOST_BYTES = 24, 64 * 2**20
_LEAST_COLUMNS = 16


def matrices_at_once(rows: Tensor) -> int:
    """How many matrices of the side of flattened `rows` `(N, H, Rv, R)` a chunk holds.

    Example:
        >>> matrices_at_once(torch.empty(0, 1, 32, 32)), matrices_at_once(torch.empty(0, 9, 64, 64))
        (512, 24)
    """
    one = (rows.shape[1] * rows.shape[2]) ** 2 * rows.element_size()
    return max(1, _CHUNK_BYTES // one, min(_FEW, _MOST_BYTES // one))


def _flattened(factors: LowRankFactors) -> LowRankFactors:
    """Detached, with one dimension for all positions of all sequences in front."""
    rows, shared, own, own_shared, left, right = (None if t is None else t.detach() for t in factors)
    return LowRankFactors(
        rows.transpose(1, 2).flatten(0, 1),  # type: ignore[union-attr]
        shared,
        None if own is None else own.transpose(1, 2).flatten(0, 1),
        own_shared,
        None if left is None else left.flatten(0, 1),
        None if right is None else right.flatten(0, 1),
    )


def _of(tensor: Tensor | None, chunk: slice) -> Tensor | None:
    return None if tensor is None else tensor[chunk]


def _zeros_like(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.zeros_like(tensor, memory_format=torch.contiguous_format)


def _joined(parts: list) -> Tensor | None:
    return None if parts[0] is None else parts[0] if len(parts) == 1 else torch.cat(parts)


def _transposed_plus_identity(view: int, factors: LowRankFactors) -> Tensor:
    """(I + s M)^T of all positions, `(N, K, K)`, from flattened factors."""
    rows, shared, own, own_shared, left, right = factors
    total, heads, height, _ = rows.shape
    if shared is None:
        out = rows.new_empty(total, height, height)
        torch.mul(rows.squeeze(1).mT, view, out=out)
    else:
        side = shared.shape[-1]
        by_head = rows.new_empty(total, side, heads, height)
        scaled = rows * view
        for head in range(heads):
            torch.bmm(shared[head].mT.expand(total, -1, -1), scaled[:, head].mT, out=by_head[:, :, head])
        if own is not None:
            by_head.addcmul_((own * view).reshape(total, 1, heads, 1), own_shared.permute(2, 0, 1))  # type: ignore[union-attr]
        out = by_head.view(total, side, side)
        if left is not None:
            out.baddbmm_(right.mT, left.mT, alpha=view)  # type: ignore[union-attr]
    out.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return out


def _contracted(
    inverse: Tensor, grad: Tensor, factors: LowRankFactors, to_shared: Tensor | None, to_own_shared: Tensor | None
) -> tuple[Tensor | None, ...]:
    r"""Gradients of $\sum_t g_t M_t \cdot J_t^{-T}$ by flattened rows, own, left and right, for `inverse` $J^{-T}$ `(N,
    K, K)`; those by what is shared are added to `to_shared` and `to_own_shared`."""
    rows, shared, own, own_shared, left, right = factors
    total, heads, height, _ = rows.shape
    scale = grad.reshape(-1, 1, 1)
    if shared is None:
        return inverse.mul_(scale).unsqueeze(1), None, None, None
    by_head = inverse.view(total, heads, height, -1)
    scaled = rows * scale.unsqueeze(-1)
    to_rows = torch.empty_like(scaled)
    to_own = None if own is None else torch.empty_like(own)
    for head in range(heads):
        block = by_head[:, head]
        torch.bmm(block, shared[head].mT.expand(total, -1, -1), out=to_rows[:, head])
        to_shared[head].addmm_(scaled[:, head].flatten(0, 1).mT, block.flatten(0, 1))  # type: ignore[index]
        if own is not None:
            wide = block.flatten(1)  # (N, Rv K)
            to_own[:, head] = wide @ own_shared[head].flatten()  # type: ignore[index]
            to_own_shared[head].view(-1).addmv_(wide.mT, own[:, head] * grad)  # type: ignore[index]
    if own is not None:
        to_own *= grad.unsqueeze(-1)  # type: ignore[operator]
    to_left = to_right = None
    if left is not None:
        rank = left.shape[-1]
        # Products with few columns are slow on processors, so there are at least 16.
        spare = max(0, _LEAST_COLUMNS - rank)
        to_left = (inverse @ pad(right * scale, (0, 0, 0, spare)).mT)[..., :rank]  # type: ignore[operator]
        to_right = (pad(left * scale, (0, spare)).mT @ inverse)[:, :rank]
    return to_rows.mul_(scale.unsqueeze(-1)), to_own, to_left, to_right
