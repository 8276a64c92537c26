r"""Trace and Frobenius norm of the Jacobian block $J_t = I \pm D_t$ of an attention layer, without forming $D_t$.

With $C_t N_t = A_t W + a_t V + L_t R_t$ the derivative of the head outputs (see `LowRankBlocks`) and
$D_t = W_O\, C_t N_t$, both figures are inner products of the factors:

$$ \mathrm{tr}(L R) = \mathrm{tr}(R L), \qquad
   \|W_O A W\|_F^2 = \sum_{h,h'} \langle G_{h'h} A_h,\; A_{h'} \Gamma_{h'h} \rangle, \qquad
   G = W_O^T W_O, \quad \Gamma = W W^T. $$

The Gram matrices $G$, $\Gamma$ and the likes are products of weights and computed once for all positions.
"""

__all__ = ["BlockMoments", "block_moments", "spread_of_block"]

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from support_tokens.margins.jacobian import JacobianBlocks
from support_tokens.margins.linalg.slogdet import full_precision
from support_tokens.margins.linear_maps import Positions, gather_positions
from support_tokens.margins.margins import position_chunks, view_sign
from support_tokens.margins.state import AttentionState

# Least (tr J)^2 / (D |J|_F^2) at which the spread is a logarithm.
_FLOOR = 1e-4


class BlockMoments(NamedTuple):
    r"""Trace and squared Frobenius norm of the Jacobian blocks of n positions.

    Args:
        trace: $\mathrm{tr}\,J_t$, `(B, n)`; D at padding.
        square: $\|J_t\|_F^2$, `(B, n)`; D at padding.
    """

    trace: Tensor
    square: Tensor


def block_moments(
    state: AttentionState, *, view: str = "block", positions: Tensor | None = None, chunk_size: int | None = None
) -> BlockMoments:
    r"""Exact trace and squared Frobenius norm of $J_t = I \pm \partial\mu_t/\partial x_t$, differentiable.

    $$ \mathrm{tr}\,J_t = D \pm \mathrm{tr}\,D_t, \qquad \|J_t\|_F^2 = D \pm 2\,\mathrm{tr}\,D_t + \|D_t\|_F^2. $$

    Beside the covariances of `moments`, a position costs about $K^2 R + 4 K D (H + 2)$ multiplications forward, with
    $K = H R_v$ the width of all heads together; the matrix $D_t$ alone would cost $K D (D + R)$ and its determinant
    another $D^3 / 3$. The Gram matrices cost at most $3 K^2 D$ once a call. Chunks of positions are recomputed in the
    backward pass, so memory is that of one chunk; a single chunk is not recomputed.

    Args:
        state: State of an attention layer, float32 or float64.
        view: `block` for $x + \mu(x)$, `noise` for $x - \mu(x)$.
        positions: Indices `(B, n)`; None: all T.
        chunk_size: Positions computed at once; None chooses by memory. It never changes a result.

    Raises:
        ArgumentError: `view` is unknown or `chunk_size` is less than 1.

    Example:
        >>> from support_tokens.margins.state import state_from_weights
        >>> x, w = torch.randn(2, 5, 4), torch.zeros(1, 3, 4)
        >>> block_moments(state_from_weights(x, w, w), positions=torch.tensor([[4], [3]])).trace
        tensor([[4.],
                [4.]])
    """
    sign = view_sign(view)
    shape = state.batch, state.length if positions is None else positions.shape[1]
    if 0 in shape:
        # Nothing to compute, and a graph all the same: a loss over an empty batch has gradients of 0.
        nothing = state.query.sum() * 0 + state.query.new_zeros(shape)
        return BlockMoments(nothing, nothing)
    side = max(state.width, state.heads * state.value.shape[-1])
    chunks = position_chunks(state, positions, side, chunk_size)
    with full_precision(state.query):
        blocks = JacobianBlocks(state)
        shared = _shared(blocks)
        recompute = torch.is_grad_enabled() and len(chunks) > 1
        parts = [
            checkpoint(_moments_at, blocks, shared, chunk, use_reentrant=False, preserve_rng_state=False)
            if recompute
            else _moments_at(blocks, shared, chunk)
            for chunk in chunks
        ]
        trace, square = (torch.cat(values, dim=1) for values in zip(*parts, strict=True))
        return BlockMoments(state.width + sign * trace, state.width + 2 * sign * trace + square)


def spread_of_block(moments: BlockMoments, width: int) -> Tensor:
    r"""How unevenly the block $J_t$ stretches its directions, free of its scale, `(B, n)`.

    $$ \rho_t = \log \frac{D\,\|J_t\|_F^2}{(\mathrm{tr}\,J_t)^2} \ge 0, $$

    0 if and only if $J_t$ is a multiple of the identity (Cauchy-Schwarz on $J_t$ and $I$). Dimensionless; rounding
    leaves errors of the order of the machine epsilon, and never a negative value.

    With $c_t = (\mathrm{tr}\,J_t)^2 / (D\,\|J_t\|_F^2) \in [0, 1]$ the spread is $-\log c_t$ down to the floor $c_0 =
    10^{-4}$, and its tangent $1 - \log c_0 - c_t / c_0$ below. So it is at most 10.21, at $\mathrm{tr}\,J_t = 0$, and
    the norm of its gradient by $J_t$ at most $2 / (\sqrt{c_0}\,\|J_t\|_F) = 200 / \|J_t\|_F$.

    Args:
        moments: Of `block_moments`.
        width: D, the width of the embeddings.

    Example:
        >>> spread_of_block(BlockMoments(torch.tensor([[6.0, 2.0]]), torch.tensor([[12.0, 4.0]])), 3)
        tensor([[0.0000, 1.0986]])
    """
    # A block of zeros is a multiple of the identity too.
    positive = moments.square > 0
    even = torch.where(positive, moments.trace.square() / torch.where(positive, width * moments.square, 1.0), 1.0)
    even = even.clamp_max(1.0)
    return torch.where(even > _FLOOR, even.clamp_min(_FLOOR).reciprocal().log(), 1 - math.log(_FLOOR) - even / _FLOOR)


class _Shared(NamedTuple):
    r"""Products of weights that all positions share, with $O$ = $W_O$ behind the shared part of its norm, K = H Rv.

    Args:
        output: $O$, `(D, K)`.
        query: $W$ of all heads, `(H R, D)`.
        value: $V$ of all key/value heads, `(G Rv, D)`.
        by_output: $O^T O$, `(K, K)`.
        by_pair: The same with each pair of heads once: blocks $h' > h$ doubled, blocks $h' < h$ zero, `(K, K)`.
        by_query: $W_{h'} W_h^T$, `(H, H, R, R)`.
        linear: What $A$ is multiplied with for the trace and for its inner products with $O V$ of each head,
            `(H, Rv R, 1 + H)`; the trace alone under a strict mask, `(H, Rv R, 1)`.
        own_trace: Trace of $O V$ of each head, `(H,)`.
        own_square: Inner products of $O V$ of two heads, `(H, H)`.
    """

    output: Tensor
    query: Tensor
    value: Tensor
    by_output: Tensor
    by_pair: Tensor
    by_query: Tensor
    linear: Tensor
    own_trace: Tensor
    own_square: Tensor


def _shared(blocks: JacobianBlocks) -> _Shared:
    state, (query, value) = blocks.state, blocks.inner_weights()
    heads, groups = len(query), len(value)
    output = state.stacked_output
    if state.output is not None and state.output_norm is not None:
        output = state.output_norm.shared(output)
    outputs, flat_query, flat_value = output.unflatten(-1, (heads, -1)), query.flatten(0, 1), value.flatten(0, 1)
    by_output = (output.mT @ output).unflatten(0, (heads, -1)).unflatten(-1, (heads, -1))  # (H, Rv, H, Rv)
    by_query = (flat_query @ flat_query.mT).unflatten(0, (heads, -1)).unflatten(-1, (heads, -1)).transpose(1, 2)
    once = by_output.new_ones(heads, heads).tril().mul_(2).fill_diagonal_(1)
    linear = [torch.einsum("hrd,dhv->hvr", query, outputs)]
    # Heads h of group g read the same values: h = g m.
    gram = by_output.unflatten(2, (groups, -1))
    if not state.strict:
        by_value = (flat_value @ flat_query.mT).unflatten(0, (groups, -1)).unflatten(-1, (heads, -1))
        linear += torch.einsum("pugmv,gvpr->gmpur", gram, by_value).flatten(0, 1).unbind()
    by_values = (flat_value @ flat_value.mT).unflatten(0, (groups, -1)).unflatten(-1, (groups, -1))
    return _Shared(
        output=output,
        query=flat_query,
        value=flat_value,
        by_output=by_output.flatten(2).flatten(0, 1),
        by_pair=(by_output * once[:, None, :, None]).flatten(2).flatten(0, 1),
        by_query=by_query,
        linear=torch.stack(linear, dim=-1).flatten(1, 2),
        own_trace=torch.einsum("dgmv,gvd->gm", outputs.unflatten(1, (groups, -1)), value).flatten(),
        own_square=torch.einsum("gmuijv,guiv->gmij", gram.unflatten(0, (groups, -1)), by_values)
        .flatten(2)
        .flatten(0, 1),
    )


def _moments_at(blocks: JacobianBlocks, shared: _Shared, positions: Positions) -> tuple[Tensor, Tensor]:
    r"""$\mathrm{tr}\,D_t$ and $\|D_t\|_F^2$ at `positions`, `(B, n)`; 0 at padding."""
    state = blocks.state
    rows, _, own, _, left, right = blocks.inner_factors(positions)
    batch, heads, count, height, _ = rows.shape
    by_head = rows.transpose(0, 1).flatten(1, 2)  # (H, N, Rv, R) with N = B n
    linear = torch.bmm(by_head.flatten(2), shared.linear).sum(0)
    trace, square = linear[:, 0], _square_of_rows(by_head, shared)
    if own.numel():
        own = own.transpose(1, 2).flatten(0, 1)  # (N, H)
        trace = trace + own @ shared.own_trace
        square = square + (own * (2 * linear[:, 1:] + own @ shared.own_square)).sum(-1)
    if left.numel():
        left, right = left.flatten(0, 1), right.flatten(0, 1)  # (N, K, r) and (N, r, D)
        inner = (right @ shared.query.mT).unflatten(-1, (heads, -1)).permute(2, 0, 3, 1)  # (H, N, R, r)
        inner = (by_head @ inner).permute(1, 3, 0, 2)  # (N, r, H, Rv)
        if own.numel():
            values = (right @ shared.value.mT).unflatten(-1, (-1, height))  # (N, r, G, Rv)
            inner = inner + own[:, None, :, None] * values.repeat_interleave(heads // values.shape[2], dim=2)
        inner = 2 * inner.flatten(2) + (right @ right.mT) @ left.mT
        trace = trace + ((right @ shared.output) * left.mT).sum((-2, -1))
        square = square + ((left.mT @ shared.by_output) * inner).sum((-2, -1))
    if state.output_norm is not None and state.output is not None:
        # The norm takes F to (O F + u (F^T f)^T) / s, with u a column and f of the state's own W_O.
        norm = state.output_norm.at(positions)
        column = (-norm.gain * norm.direction / state.width).flatten(0, 1)
        seen = norm.direction.flatten(0, 1) @ state.stacked_output
        vectors = torch.stack((seen, column @ shared.output), dim=1)  # (N, 2, K)
        vectors_by_head = vectors.unflatten(-1, (heads, -1))
        through = (vectors_by_head.permute(2, 0, 1, 3) @ by_head).permute(1, 2, 0, 3).flatten(2) @ shared.query
        if own.numel():
            weighted = (vectors_by_head * own[:, None, :, None]).unflatten(2, (len(shared.value) // height, -1))
            through = through + weighted.sum(3).flatten(2) @ shared.value
        if left.numel():
            through = through + (vectors @ left) @ right
        along, with_output = through.unbind(1)
        scale = norm.inverse_scale.flatten()
        trace = scale * (trace + (column * along).sum(-1))
        added = 2 * (with_output * along).sum(-1) + column.square().sum(-1) * along.square().sum(-1)
        square = scale.square() * (square + added)
    valid = gather_positions(state.valid, positions, 1)
    trace, square = trace.unflatten(0, (batch, count)), square.unflatten(0, (batch, count))
    return (trace, square) if valid is None else (trace.masked_fill(~valid, 0.0), square.masked_fill(~valid, 0.0))


def _square_of_rows(by_head: Tensor, shared: _Shared) -> Tensor:
    r"""$\|O A W\|_F^2$ of $A$ `(H, N, Rv, R)`, `(N,)`: a sum over pairs of heads, each pair once."""
    heads, count, height, width = by_head.shape
    # Rv in front of N: one product with shared matrices serves all positions. Stacks rather than slices of one tensor,
    # whose gradients would each be as large as the whole.
    wide = by_head.transpose(1, 2).contiguous().flatten(1, 2).unbind()  # H of (Rv N, R)
    total = by_head.new_zeros(count)
    for head in range(heads):
        first = head * height
        inner = torch.bmm(torch.stack(wide[head:]), shared.by_query[head:, head]).view(-1, count * width)
        other = shared.by_pair[first:, first : first + height].mT @ inner
        total = total + (wide[head].view_as(other) * other).view(height, count, width).sum((0, 2))
    return total
