r"""Diagonal Jacobian blocks $D_t = \partial \mu_t / \partial x_t$ of attention, dense or in the smaller space that has
the same determinant.

With $C_t$ the derivative of the concatenated head outputs with respect to the normed embedding,

$$ D_t = P_t W_O\, C_t\, N_t, \qquad
   C^h_t = s\,\mathrm{Cov}(v,k)\,L^q_t W_Q^h + \alpha_{tt}\big[(v_t - \mu_t)\,(s\,\phi'_{tt}\,q_t^T L^k_t W_K^g) +
   W_V^g\big], $$

$s$ the scale, $L_t$ rotation times QK norm. By Sylvester $\det(I_D \mp P_t W_O C_t N_t) = \det(I_K \mp C_t N_t P_t
W_O)$ with
$K = H R_v$; for identity values and a strict mask the determinant is $R \times R$. Both norms change a position only
by a scalar and a rank of one, so the products of weights with weights are formed once and shared by all positions.
"""

__all__ = ["JacobianBlocks"]

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from support_tokens.margins.assembly import LowRankFactors, assemble
from support_tokens.margins.moments import moments
from support_tokens.margins.state import AttentionState, NormJacobian, Projection, Rows, take

# What `JacobianBlocks` keeps of weights alone.
_SHARED = ("_weights_dense", "_output_shared", "_weights_reduced")


@dataclass(frozen=True)
class _RightFactor:
    r"""A matrix of every position, $E_t = c_t (E_0 + U_t V_t^T)$, of shape `(D, K)`, with $E_0$ shared by all
    positions.

    `shared` maps weights `(..., D)` to `(..., K)` by $E_0$; it is a tensor, or None for the identity.
    """

    shared: Tensor | None
    scalar: Tensor | None  # (B, n, 1)
    left: Tensor | None  # U_t: (B, n, D, r)
    right: Tensor | None  # V_t: (B, n, K, r)

    def after(self, rows_of: Tensor) -> Tensor:
        """W E_0 for weights `(..., D)`."""
        return rows_of if self.shared is None else rows_of @ self.shared


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
        state: What a layer did to a batch.

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

        Needed before chunks that are recomputed in the backward pass: what is cached inside of the first of them would
            be missing
        from its recomputation.
        """
        if self._uses_dense:
            _ = self._weights_dense
        elif self.state.output is not None:
            _ = self._weights_reduced

    def cut(self) -> list[tuple[Tensor, Tensor]]:
        """Cuts what `prepare` computes out of the autograd graph: each shared tensor, with the leaf that takes its
        place."""
        self.prepare()
        pairs = []
        for name in _SHARED:
            if name in self.__dict__:
                leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.__dict__[name]]
                pairs += zip(self.__dict__[name], leaves, strict=True)
                self.__dict__[name] = tuple(leaves)
        return [pair for pair in pairs if pair[1].requires_grad]

    def of(self, state: AttentionState) -> "JacobianBlocks":
        """Blocks of some sequences of the same batch: `state` has the same weights, and what they share is kept."""
        blocks = JacobianBlocks(state)
        blocks.__dict__.update({name: self.__dict__[name] for name in _SHARED if name in self.__dict__})
        return blocks

    @property
    def _uses_dense(self) -> bool:
        state = self.state
        if state.output is None:
            return not state.strict
        return self.reduced_width < state.heads * state.value.shape[-1]

    def dense(self, rows: Rows) -> Tensor:
        r"""$D_t$ at positions `rows`, `(B, n, D, D)`; zero where the position is padding."""
        state = self.state
        inner = assemble(self.inner_factors(rows))
        if state.output is not None:
            inner = state.output.transpose(0, 1).flatten(1) @ inner
        if state.output_norm is not None:
            inner = _norm_from_left(state.output_norm.at(rows), inner)
        valid = take(state.valid, rows, 1)
        return inner if valid is None else inner.masked_fill(~valid[..., None, None], 0.0)

    def inner_factors(self, rows: Rows) -> LowRankFactors:
        """$C_t N_t$, the derivative of the concatenated head outputs, as a sum of few products."""
        norm = self.state.input_norm and self.state.input_norm.at(rows)
        return self._head_factors(rows, _norm_factor(norm, self.state.width), self._weights_dense)

    def inner_weights(self) -> tuple[Tensor, Tensor]:
        """What all positions share in `inner_factors`: weights of queries `(H, R, D)` and of values `(G, Rv, D)`."""
        query, _, value = self._weights_dense
        return query, value

    def reduced(self, rows: Rows) -> Tensor:
        r"""A matrix $M_t$, `(B, n, K, K)`, with $\det(I_K \mp M_t) = \det(I_D \mp D_t)$ and K = `reduced_width`."""
        return assemble(self.reduced_factors(rows))

    def reduced_factors(self, rows: Rows) -> LowRankFactors:
        """The matrix of `reduced` as a sum of few products."""
        state = self.state
        if self._uses_dense:
            return LowRankFactors(self.dense(rows).unsqueeze(1))
        if state.output is None:
            return self._masked(LowRankFactors(moments(self._queries_as_values, rows).covariance), rows)  # type: ignore[arg-type]
        return self._masked(self._head_factors(rows, self._output_factor(rows), self._weights_reduced), rows)

    def per_head(self, rows: Rows) -> Tensor:
        r"""Matrices $M^h_t$, `(B, n, H, Rv, Rv)`, with $\det(I \mp M^h_t)$ the determinant of head h alone.

        A diagnostic: heads add up before the determinant is taken, so these are no factors of it. Under identity values
        there is one head and the matrix is that of `reduced`.
        """
        state = self.state
        if state.output is None:
            return self.reduced(rows).unsqueeze(2)
        whole = assemble(self._masked(self._head_factors(rows, self._output_factor(rows), self._weights_reduced), rows))
        heads, width = state.heads, state.value.shape[-1]  # type: ignore[union-attr]
        parts = whole.unflatten(-1, (heads, width)).unflatten(-3, (heads, width))
        return parts.diagonal(dim1=2, dim2=4).permute(0, 1, 4, 2, 3)

    @property
    def _queries_as_values(self) -> AttentionState:
        # s Cov(x, k) W_Q has the non-zero spectrum of Cov(s W_Q x, k): the scaled queries of all keys become the
        # values.
        return replace(self.state, value=self.state.scale * self.state.query)

    @_computed_once
    def _weights_dense(self) -> tuple[Tensor, Tensor, Tensor | None]:
        state = self.state
        factor = state.input_norm.shared_transposed if state.input_norm is not None else lambda w: w
        if state.to_value is None:
            values = torch.eye(state.width, dtype=state.query.dtype, device=state.query.device).unsqueeze(0)
        else:
            values = factor(state.to_value.weight)
        return factor(state.to_query.weight), factor(state.to_key.weight), values

    @_computed_once
    def _output_shared(self) -> tuple[Tensor, Tensor, Tensor]:
        """W_O as `(D, K)`, the same behind the shared part of the output norm, and both behind that of the input
        norm."""
        state = self.state
        output = state.output.transpose(0, 1).flatten(1)  # type: ignore[union-attr]
        normed = output if state.output_norm is None else state.output_norm.shared(output)
        both = normed if state.input_norm is None else state.input_norm.shared(normed)
        return output, normed, both

    @_computed_once
    def _weights_reduced(self) -> tuple[Tensor, Tensor, Tensor]:
        both = self._output_shared[2]
        state = self.state
        return state.to_query.weight @ both, state.to_key.weight @ both, state.to_value.weight @ both  # type: ignore[union-attr]

    def _output_factor(self, rows: Rows) -> _RightFactor:
        r"""$N_t P_t W_O$ as shared matrix plus a rank of at most two."""
        state = self.state
        output, normed, both = self._output_shared
        left, right, scalar = [], [], None
        if state.input_norm is not None:
            norm = state.input_norm.at(rows)
            left.append(-norm.gain * norm.direction / state.width)
            right.append(norm.direction @ normed)
            scalar = norm.inverse_scale
        if state.output_norm is not None:
            # N (F - u f^T), with u f^T the rank-one part of the output norm: its column u passes the input norm too.
            post = state.output_norm.at(rows)
            column = -post.gain * post.direction / state.width
            if state.input_norm is not None:
                norm = state.input_norm.at(rows)
                projected = column - column.mean(-1, keepdim=True) if norm.centered else column
                along = (norm.direction * column).sum(-1, keepdim=True) / state.width
                column = norm.gain * (projected - norm.direction * along)
            left.append(column)
            right.append(post.direction @ output)
            scalar = post.inverse_scale if scalar is None else scalar * post.inverse_scale
        stack = lambda parts: torch.stack(parts, dim=-1) if parts else None  # noqa: E731
        return _RightFactor(both, scalar, stack(left), stack(right))

    def _head_factors(self, rows: Rows, factor: _RightFactor, weights: tuple) -> LowRankFactors:
        r"""LowRankFactors of $C_t E_t$ for all heads; `weights` are $W_Q E_0$, $W_K E_0$, $W_V E_0$."""
        state, m = self.state, moments(self.state, rows)
        query_e, key_e, value_e = weights
        batch, heads, count, _ = m.mean.shape
        repeat = heads // state.key.shape[1]
        by_query, left, right = _through(state.scale * m.covariance, state.to_query.at(rows), query_e, factor)  # type: ignore[operator]
        own = own_shared = None
        if not state.strict:
            query = take(state.query, rows, 2) * state.scale  # type: ignore[operator]
            if m.self_slope is not None:
                query = query * m.self_slope.unsqueeze(-1)
            per_kv = query.reshape(batch, -1, repeat, count, query.shape[-1]).transpose(2, 3)  # (B, G, n, H/G, R)
            by_key, key_left, key_right = _through(per_kv, state.to_key.at(rows), key_e, factor)
            regroup = lambda t: t.transpose(2, 3).reshape(batch, heads, count, -1)  # noqa: E731
            key_rows = torch.einsum("bgnmr,grk->bgnmk", by_key, key_e)
            offset = state.key.shape[2] - state.length
            own_value = take(state.value[:, :, offset:], rows, 2).repeat_interleave(repeat, dim=1)  # type: ignore[union-attr]
            deviation = m.self_weight.unsqueeze(-1) * (own_value - m.mean)  # type: ignore[union-attr]
            own, own_shared = m.self_weight, value_e.repeat_interleave(repeat, dim=0)
            if key_left is not None:
                key_rows = key_rows + key_left @ key_right.unsqueeze(1)  # type: ignore[union-attr]
            # One column a head: the deviation of its own values, times what its query makes of the token's own key.
            by_head = torch.diag_embed(deviation.movedim(1, -1)).movedim(-2, 1)  # (B, H, n, Rv, H)
            left = _beside(left, by_head, -1)
            right = _beside(right, regroup(key_rows).transpose(1, 2), -2)
            if factor.left is not None:
                value_weight = torch.einsum("grd,bndk->bgnrk", self._value_weight, factor.left)
                columns = own[..., None, None] * value_weight.repeat_interleave(repeat, dim=1)  # type: ignore[index]
                left = _beside(left, columns, -1)
                right = _beside(right, factor.right.transpose(-1, -2), -2)  # type: ignore[union-attr]
        if factor.scalar is not None:
            scalar = factor.scalar.unsqueeze(1)  # (B, 1, n, 1)
            by_query = by_query * scalar.unsqueeze(-1)
            own = None if own is None else own * scalar.squeeze(-1)
            left = None if left is None else left * scalar.unsqueeze(-1)
        left = None if left is None else left.transpose(1, 2).flatten(2, 3)
        return LowRankFactors(by_query, query_e, own, own_shared, left, right)

    @property
    def _value_weight(self) -> Tensor:
        if self.state.to_value is None:
            return torch.eye(self.state.width, dtype=self.state.query.dtype, device=self.state.query.device).unsqueeze(
                0
            )
        return self.state.to_value.weight

    def _masked(self, factors: LowRankFactors, rows: Rows) -> LowRankFactors:
        valid = take(self.state.valid, rows, 1)
        if valid is None:
            return factors
        rows_, shared, own, own_shared, left, right = factors
        return LowRankFactors(
            rows_.masked_fill(~valid[:, None, :, None, None], 0.0),
            shared,
            None if own is None else own.masked_fill(~valid[:, None], 0.0),
            own_shared,
            None if left is None else left.masked_fill(~valid[..., None, None], 0.0),
            right,
        )


def _through(
    heads_rows: Tensor, to: Projection, shared: Tensor, factor: _RightFactor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    r"""Row vectors z `(B, H, n, m, R)` with $z L_t W E_t = z' W E_0 + l\, r$ up to the scalar of $E_t$: z', l `(B, H,
    n, m, r)` and r `(B, n, r, K)`."""
    weight = to.weight
    rows = heads_rows if to.rotation is None else to.rotation.transpose(heads_rows)
    pulled = None if factor.left is None else torch.einsum("hrd,bndk->bhnrk", weight, factor.left)
    last = None if factor.right is None else factor.right.transpose(-1, -2)
    norm = to.norm
    if norm is None:
        return rows, None if pulled is None else rows @ pulled, last
    heads, width = weight.shape[:2]
    if norm.per_head:
        direction = norm.direction.transpose(1, 2)  # (B, H, n, R)
        rows = norm.shared_transposed(rows) * norm.inverse_scale.transpose(1, 2).unsqueeze(-1)
        rows = rows - (rows @ direction.unsqueeze(-1)) * direction.unsqueeze(-2) / width
        return rows, None if pulled is None else rows @ pulled, last
    # A norm over all heads at once ties them: its rank of one reads every head's projection.
    rows = rows * norm.gain.reshape(heads, 1, 1, width) * norm.inverse_scale[:, None, :, :, None]
    direction = norm.direction.unflatten(-1, (heads, width)).transpose(1, 2)  # (B, H, n, R)
    along = (rows @ direction.unsqueeze(-1)) / (heads * width)  # (B, H, n, m, 1)
    seen = torch.einsum("bhnr,hrk->bnk", direction, shared).unsqueeze(-2)
    if pulled is None:
        return rows, -along, seen
    columns = rows @ pulled - along * torch.einsum("bhnr,bhnrk->bnk", direction, pulled)[:, None, :, None]
    return rows, torch.cat((-along, columns), -1), torch.cat((seen, last), -2)  # type: ignore[arg-type]


def _beside(first: Tensor | None, second: Tensor, dim: int) -> Tensor:
    return second if first is None else torch.cat((first, second), dim)


def _norm_factor(norm: NormJacobian | None, width: int) -> _RightFactor:
    if norm is None:
        return _RightFactor(None, None, None, None)
    left = (-norm.gain * norm.direction / width).unsqueeze(-1)
    return _RightFactor(None, norm.inverse_scale, left, norm.direction.unsqueeze(-1))


def _norm_from_left(norm: NormJacobian, blocks: Tensor) -> Tensor:
    """N times blocks `(B, n, D, K)`."""
    direction = norm.direction
    along = (direction.unsqueeze(-2) @ blocks) / direction.shape[-1]
    if norm.centered:
        blocks = blocks - blocks.mean(-2, keepdim=True)
    return norm.gain.unsqueeze(-1) * (blocks - direction.unsqueeze(-1) * along) * norm.inverse_scale.unsqueeze(-1)
