r"""Diagonal Jacobian blocks $D_t = \partial \mu_t / \partial x_t$ of attention, whole or reduced to a smaller
matrix of the same determinant.

With $C_t$ the derivative of the concatenated head outputs with respect to the normed embedding,

$$ D_t = P_t W_O\, C_t\, N_t, \qquad
   C^h_t = s\,\mathrm{Cov}(v,k)\,L^q_t W_Q^h + \alpha_{tt}\big[(v_t - \mu_t)\,(s\,\phi'_{tt}\,q_t^T L^k_t W_K^g) +
   W_V^g\big], $$

$s$ the scale, $L_t$ rotation times QK norm. By Sylvester
$\det(I_D \mp P_t W_O C_t N_t) = \det(I_K \mp C_t N_t P_t W_O)$ with $K = H R_v$; for identity values and a strict mask
the determinant is $R \times R$. Each norm is a scalar times a shared matrix plus a rank of one, so the products of
weights with weights are computed once for all positions.
"""

__all__ = ["JacobianBlocks"]

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from support_tokens.margins.assembly import LowRankBlocks, assemble
from support_tokens.margins.linear_maps import NormJacobian, Positions, Projection, gather_positions
from support_tokens.margins.moments import moments
from support_tokens.margins.state import AttentionState

# Products of weights alone, which all positions share.
_SHARED = ("_weights_dense", "_output_shared", "_weights_reduced")


@dataclass(frozen=True)
class _RightFactor:
    r"""Per-position part of a matrix $E_t = c_t (E_0 + U_t V_t^T)$, `(D, K)`, with $E_0$ shared by all positions."""

    scalar: Tensor | None  # (B, n, 1)
    left: Tensor  # U_t: (B, n, D, r), r may be 0
    right: Tensor  # V_t^T: (B, n, r, K)


class _computed_once:
    """`functools.cached_property` without its lock, at which `torch.compile` breaks a graph."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        value = instance.__dict__[self.name] = self.function(instance)
        return value


class JacobianBlocks:
    r"""Builder of the blocks of one attention state; what all positions share is computed once, on first use.

    Args:
        state: State of an attention layer.

    Example:
        >>> from support_tokens.margins.state import state_from_weights
        >>> x, w = torch.randn(2, 5, 4), torch.randn(1, 3, 4)
        >>> blocks = JacobianBlocks(state_from_weights(x, w, w))
        >>> blocks.dense(slice(0, 5)).shape, blocks.reduced(slice(0, 5)).shape
        (torch.Size([2, 5, 4, 4]), torch.Size([2, 5, 3, 3]))
    """

    def __init__(self, state: AttentionState) -> None:
        self.state = state

    @property
    def reduced_width(self) -> int:
        """K, the side of the smallest matrix whose determinant is that of the D x D block."""
        if self.state.output is None:
            return self.state.to_query.weight.shape[1] if self.state.strict else self.state.width
        return min(self.state.heads * self.state.value.shape[-1], self.state.width)

    def prepare(self) -> None:
        """Computes now what all positions share for `reduced`.

        Needed before chunks that are recomputed in the backward pass: what the first chunk caches would be missing from
        its recomputation.
        """
        if self._uses_dense:
            _ = self._weights_dense
        elif self.state.output is not None:
            _ = self._weights_reduced

    def detach_shared(self) -> list[tuple[Tensor, Tensor]]:
        """Detaches what `prepare` computes from the autograd graph: pairs of a shared tensor and the leaf that replaces
        it, where a gradient is required."""
        self.prepare()
        pairs = []
        for name in _SHARED:
            if name in self.__dict__:
                leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.__dict__[name]]
                pairs += zip(self.__dict__[name], leaves, strict=True)
                self.__dict__[name] = tuple(leaves)
        return [pair for pair in pairs if pair[1].requires_grad]

    def of(self, state: AttentionState) -> "JacobianBlocks":
        """Blocks of another state with the same weights; what positions share is not computed again."""
        blocks = JacobianBlocks(state)
        blocks.__dict__.update({name: self.__dict__[name] for name in _SHARED if name in self.__dict__})
        return blocks

    @property
    def _uses_dense(self) -> bool:
        state = self.state
        if state.output is None:
            return not state.strict
        return self.reduced_width < state.heads * state.value.shape[-1]

    def dense(self, positions: Positions) -> Tensor:
        r"""$D_t$ at some positions, `(B, n, D, D)`; zero where the position is padding."""
        state = self.state
        blocks = assemble(self.inner_factors(positions))
        if state.output is not None:
            blocks = state.stacked_output @ blocks
        if state.output_norm is not None:
            blocks = _norm_from_left(state.output_norm.at(positions), blocks)
        valid = gather_positions(state.valid, positions, 1)
        return blocks if valid is None else blocks.masked_fill(~valid[..., None, None], 0.0)

    def inner_factors(self, positions: Positions) -> LowRankBlocks:
        """$C_t N_t$, the derivative of the concatenated head outputs, as a sum of a few products."""
        norm = self.state.input_norm and self.state.input_norm.at(positions)
        return self._head_blocks(positions, self._input_factor(norm), self._weights_dense)

    def inner_weights(self) -> tuple[Tensor, Tensor]:
        """Shared weights of `inner_factors`: of queries `(H, R, D)` and of values `(G, Rv, D)`."""
        query, _, value = self._weights_dense
        return query, value

    def reduced(self, positions: Positions) -> Tensor:
        r"""A matrix $M_t$, `(B, n, K, K)`, with $\det(I_K \mp M_t) = \det(I_D \mp D_t)$ and K = `reduced_width`."""
        return assemble(self.reduced_factors(positions))

    def reduced_factors(self, positions: Positions) -> LowRankBlocks:
        """The matrix of `reduced` as a sum of a few products."""
        if self._uses_dense:
            return LowRankBlocks.of(self.dense(positions).unsqueeze(1))
        if self.state.output is None:
            return self._masked(LowRankBlocks.of(moments(self._queries_as_values, positions).covariance), positions)
        return self._by_heads(positions)

    def per_head(self, positions: Positions) -> Tensor:
        r"""Matrices $M^h_t$, `(B, n, H, Rv, Rv)`, with $\det(I \mp M^h_t)$ the determinant of head h alone.

        A diagnostic: heads are summed before the determinant is taken, so these are not its factors. Under identity
        values there is one head and the matrix is that of `reduced`.
        """
        state = self.state
        if state.output is None:
            return self.reduced(positions).unsqueeze(2)
        heads, width = state.heads, state.value.shape[-1]
        parts = assemble(self._by_heads(positions)).unflatten(-1, (heads, width)).unflatten(-3, (heads, width))
        return parts.diagonal(dim1=2, dim2=4).permute(0, 1, 4, 2, 3)

    @property
    def _queries_as_values(self) -> AttentionState:
        # s Cov(x, k) W_Q has the non-zero spectrum of Cov(s W_Q x, k): the scaled queries of all keys become the
        # values.
        return replace(self.state, value=self.state.scale * self.state.query)

    @_computed_once
    def _weights_dense(self) -> tuple[Tensor, Tensor, Tensor]:
        state = self.state
        factor = state.input_norm.shared_transposed if state.input_norm is not None else lambda w: w
        # Identity values have no norm before them.
        values = state.value_weight if state.to_value is None else factor(state.value_weight)
        return factor(state.to_query.weight), factor(state.to_key.weight), values

    @_computed_once
    def _output_shared(self) -> tuple[Tensor, Tensor, Tensor]:
        """W_O as `(D, K)`, its product with the shared part of the output norm, and of both norms."""
        state = self.state
        output = state.stacked_output
        normed = output if state.output_norm is None else state.output_norm.shared(output)
        both = normed if state.input_norm is None else state.input_norm.shared(normed)
        return output, normed, both

    @_computed_once
    def _weights_reduced(self) -> tuple[Tensor, Tensor, Tensor]:
        both = self._output_shared[2]
        state = self.state
        return state.to_query.weight @ both, state.to_key.weight @ both, state.value_weight @ both

    def _input_factor(self, norm: NormJacobian | None) -> _RightFactor:
        r"""$N_t$ as shared matrix plus a rank of at most one."""
        if norm is None:
            return self._stacked(None, [], [])
        return self._stacked(norm.inverse_scale, [-norm.gain * norm.direction / self.state.width], [norm.direction])

    def _output_factor(self, positions: Positions) -> _RightFactor:
        r"""$N_t P_t W_O$ as shared matrix plus a rank of at most two."""
        state = self.state
        output, normed, _ = self._output_shared
        left, right, scalar = [], [], None
        if state.input_norm is not None:
            norm = state.input_norm.at(positions)
            left.append(-norm.gain * norm.direction / state.width)
            right.append(norm.direction @ normed)
            scalar = norm.inverse_scale
        if state.output_norm is not None:
            # N (F - u f^T), with u f^T the rank-one part of the output norm: its column u is multiplied by N too.
            post = state.output_norm.at(positions)
            column = -post.gain * post.direction / state.width
            if state.input_norm is not None:
                norm = state.input_norm.at(positions)
                projected = column - column.mean(-1, keepdim=True) if norm.centered else column
                along = (norm.direction * column).sum(-1, keepdim=True) / state.width
                column = norm.gain * (projected - norm.direction * along)
            left.append(column)
            right.append(post.direction @ output)
            scalar = post.inverse_scale if scalar is None else scalar * post.inverse_scale
        return self._stacked(scalar, left, right)

    def _stacked(self, scalar: Tensor | None, left: list[Tensor], right: list[Tensor]) -> _RightFactor:
        """A factor from its columns `(B, n, D)` and rows `(B, n, K)`."""
        if not left:
            empty = self.state.query.new_empty
            return _RightFactor(scalar, empty(1, 1, self.state.width, 0), empty(1, 1, 0, 1))
        return _RightFactor(scalar, torch.stack(left, dim=-1), torch.stack(right, dim=-2))

    def _by_heads(self, positions: Positions) -> LowRankBlocks:
        blocks = self._head_blocks(positions, self._output_factor(positions), self._weights_reduced)
        return self._masked(blocks, positions)

    def _head_blocks(
        self, positions: Positions, factor: _RightFactor, weights: tuple[Tensor, Tensor, Tensor]
    ) -> LowRankBlocks:
        r"""$C_t E_t$ of all heads; `weights` are $W_Q E_0$, $W_K E_0$, $W_V E_0$."""
        state, m = self.state, moments(self.state, positions)
        query_e, key_e, value_e = weights
        batch, heads, count, _ = m.mean.shape
        repeat = heads // state.key.shape[1]
        by_query, left, right = _through(state.scale * m.covariance, state.to_query.at(positions), query_e, factor)
        own = own_shared = None
        if not state.strict:
            query = gather_positions(state.query, positions, 2) * state.scale
            if state.softcap is not None:
                query = query * m.self_slope.unsqueeze(-1)
            per_kv = query.reshape(batch, -1, repeat, count, query.shape[-1]).transpose(2, 3)  # (B, G, n, H/G, R)
            by_key, key_left, key_right = _through(per_kv, state.to_key.at(positions), key_e, factor)
            key_rows = torch.einsum("bgnmr,grk->bgnmk", by_key, key_e)
            if key_left.numel():
                key_rows = key_rows + key_left @ key_right.unsqueeze(1)
            offset = state.key.shape[2] - state.length
            own_value = gather_positions(state.value[:, :, offset:], positions, 2).repeat_interleave(repeat, dim=1)
            deviation = m.self_weight.unsqueeze(-1) * (own_value - m.mean)
            own, own_shared = m.self_weight, value_e.repeat_interleave(repeat, dim=0)
            # One column a head: the deviation of its own value, times its query's row of the token's own key.
            by_head = torch.diag_embed(deviation.movedim(1, -1)).movedim(-2, 1)  # (B, H, n, Rv, H)
            key_rows = key_rows.transpose(2, 3).reshape(batch, heads, count, -1).transpose(1, 2)
            left, right = _beside(left, by_head, -1), _beside(right, key_rows, -2)
            if factor.left.numel():
                value_weight = torch.einsum("grd,bndk->bgnrk", state.value_weight, factor.left)
                columns = own[..., None, None] * value_weight.repeat_interleave(repeat, dim=1)
                left, right = _beside(left, columns, -1), _beside(right, factor.right, -2)
        if factor.scalar is not None:
            scalar = factor.scalar.unsqueeze(1)  # (B, 1, n, 1)
            by_query = by_query * scalar.unsqueeze(-1)
            own = None if own is None else own * scalar.squeeze(-1)
            left = left * scalar.unsqueeze(-1)
        if not left.numel():
            return LowRankBlocks.of(by_query, query_e, own, own_shared)
        return LowRankBlocks.of(by_query, query_e, own, own_shared, left.transpose(1, 2).flatten(2, 3), right)

    def _masked(self, blocks: LowRankBlocks, positions: Positions) -> LowRankBlocks:
        valid = gather_positions(self.state.valid, positions, 1)
        if valid is None:
            return blocks
        return blocks._replace(
            rows=blocks.rows.masked_fill(~valid[:, None, :, None, None], 0.0),
            own=blocks.own.masked_fill(~valid[:, None], 0.0),
            left=blocks.left.masked_fill(~valid[..., None, None], 0.0),
        )


def _through(z: Tensor, to: Projection, shared: Tensor, factor: _RightFactor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Row vectors z `(B, H, n, m, R)` times $L_t W E_t$, up to the scalar of $E_t$, as $z' W E_0 + l\, r$.

    Returns:
        $z'$, of the shape of z, $l$ `(B, H, n, m, r)` and $r$ `(B, n, r, K)`; r may be 0.
    """
    weight, norm = to.weight, to.norm
    if to.rotation is not None and not to.norm_last:
        z = to.rotation.transpose(z)
    along = along_row = None
    if norm is not None:
        heads, width = weight.shape[:2]
        if norm.per_head:
            direction = norm.direction.transpose(1, 2)  # (B, H, n, R)
            z = norm.shared_transposed(z) * norm.inverse_scale.transpose(1, 2).unsqueeze(-1)
            z = z - (z @ direction.unsqueeze(-1)) * direction.unsqueeze(-2) / width
            if to.rotation is not None and to.norm_last:
                z = to.rotation.transpose(z)
        else:
            # A norm over all heads at once couples them: its rank of one reads the projections of all heads.
            z = z * norm.gain.reshape(heads, 1, 1, width) * norm.inverse_scale[:, None, :, :, None]
            direction = norm.direction.unflatten(-1, (heads, width)).transpose(1, 2)  # (B, H, n, R)
            along = (z @ direction.unsqueeze(-1)) / (heads * width)  # (B, H, n, m, 1)
            along_row = torch.einsum("bhnr,hrk->bnk", direction, shared).unsqueeze(-2)
    if not factor.left.numel():
        if along is None or along_row is None:
            return z, z.new_empty(0), z.new_empty(0)
        return z, -along, along_row
    pulled = torch.einsum("hrd,bndk->bhnrk", weight, factor.left)
    columns = z @ pulled
    if along is None or along_row is None:
        return z, columns, factor.right
    columns = columns - along * torch.einsum("bhnr,bhnrk->bnk", direction, pulled)[:, None, :, None]
    return z, torch.cat((-along, columns), -1), torch.cat((along_row, factor.right), -2)


def _beside(first: Tensor, second: Tensor, dim: int) -> Tensor:
    return torch.cat((first, second), dim) if first.numel() else second


def _norm_from_left(norm: NormJacobian, blocks: Tensor) -> Tensor:
    """N times blocks `(B, n, D, K)`."""
    direction = norm.direction
    along = (direction.unsqueeze(-2) @ blocks) / direction.shape[-1]
    if norm.centered:
        blocks = blocks - blocks.mean(-2, keepdim=True)
    return norm.gain.unsqueeze(-1) * (blocks - direction.unsqueeze(-1) * along) * norm.inverse_scale.unsqueeze(-1)
