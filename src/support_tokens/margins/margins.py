r"""Margins of positions: sign, $\log|\det J_t|$ and $\sigma_{\min}(J_t)$, and the support tokens of smallest margin."""

__all__ = [
    "Margins",
    "attention_margins",
    "attention_slogdet",
    "margins_at",
    "margins_of",
    "position_chunks",
    "rankable_positions",
    "state_margins",
    "view_sign",
]

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from support_tokens.errors import ArgumentError
from support_tokens.margins.assembly import block_slogdet
from support_tokens.margins.jacobian import JacobianBlocks
from support_tokens.margins.linalg.sigma import SigmaMin, sigma_min_with_bound
from support_tokens.margins.linalg.slogdet import Slogdet, full_precision
from support_tokens.margins.linear_maps import Positions, gather_positions
from support_tokens.margins.state import AttentionState, state_from_weights

# Bytes of one chunk's matrices. Large enough that the matrix products are efficient, small beside any model's
# activations.
_CHUNK_BYTES = 32 * 2**20


@dataclass(frozen=True, eq=False)
class Margins:
    r"""Margins of positions to degeneracy, $J_t = I \mp \partial\mu_t/\partial x_t$.

    Args:
        sign: Sign of $\det J_t$, 0 at exact singularity, `(B, n)`.
        log_abs_det: $\log|\det J_t|$ in nats, differentiable, `(B, n)`.
        valid: False at padding, `(B, n)`; there the sign is 1 and the log margin 0.
        rankable: Valid positions whose margin is not 0 by structure: under a strict mask $\Sigma_t$ vanishes with
            fewer than two keys, so the first two positions say nothing and rankings leave them out, `(B, n)`.
    """

    sign: Tensor
    log_abs_det: Tensor
    valid: Tensor
    rankable: Tensor
    _sigma_min: Callable[[], SigmaMin] = field(repr=False)

    @property
    def sigma_min(self) -> Tensor:
        r"""$\sigma_{\min}(J_t)$, `(B, n)`; computed when first read, since it needs the D x D matrices."""
        return self._smallest.value

    @property
    def sigma_min_bound(self) -> Tensor:
        r"""Bound on the absolute error of `sigma_min`, `(B, n)`; see `SigmaMin`."""
        return self._smallest.bound

    @cached_property
    def _smallest(self) -> SigmaMin:
        return self._sigma_min()

    def support_tokens(self, k: int) -> Tensor:
        """Indices of the k positions of smallest log margin, smallest first, `(B, k)`; -1 where a sequence has fewer.

        Example:
            >>> x, w = torch.randn(2, 5, 4), torch.randn(1, 3, 4)
            >>> attention_margins(x, w, w).support_tokens(2).shape
            torch.Size([2, 2])
        """
        if k < 1:
            raise ArgumentError(f"k must be at least 1, received {k}; ask for one support token or more.")
        ranked = self.log_abs_det.detach().masked_fill(~self.rankable, float("inf"))
        values, index = ranked.sort(dim=-1, stable=True)
        index = index.masked_fill(values == float("inf"), -1)[:, :k]
        return torch.nn.functional.pad(index, (0, max(0, k - index.shape[1])), value=-1)


def view_sign(view: str) -> int:
    """-1 for the noise map x - mu(x), +1 for the block map x + mu(x).

    Example:
        >>> view_sign("noise"), view_sign("block")
        (-1, 1)
    """
    if view not in ("noise", "block"):
        raise ArgumentError(f"view must be 'noise' or 'block', received {view!r}; choose one of the two.")
    return -1 if view == "noise" else 1


def attention_margins(
    x: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor | None = None,
    w_o: Tensor | None = None,
    *,
    strict: bool = True,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    view: str = "noise",
    chunk_size: int | None = None,
) -> Margins:
    r"""Margins of plain attention at all positions; see `attention_slogdet` for the arguments.

    Example:
        >>> x, w = torch.randn(2, 5, 4), torch.randn(1, 3, 4)
        >>> attention_margins(x, w, w).sigma_min.shape
        torch.Size([2, 5])
    """
    with full_precision(x):
        state = state_from_weights(x, w_q, w_k, w_v, w_o, strict=strict, scale=scale, key_padding_mask=key_padding_mask)
        return state_margins(state, view=view, chunk_size=chunk_size)


def attention_slogdet(
    x: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor | None = None,
    w_o: Tensor | None = None,
    *,
    strict: bool = True,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    view: str = "noise",
    chunk_size: int | None = None,
) -> Slogdet:
    r"""Sign and $\log|\det J_t|$ of attention with the given weights, exact at every position.

    $$ J_t = I \mp \frac{\partial}{\partial x_t} \sum_h W_O^h \sum_s \alpha^h_{ts} W_V^h x_s, \qquad
       \alpha^h_{ts} \propto \exp(\mathrm{scale}\; x_t^T W_Q^{hT} W_K^h x_s). $$

    Args:
        x: Embeddings, `(B, T, D)`. 16-bit input is computed in float32, under autocast too.
        w_q: `(H, R, D)`.
        w_k: `(H, R, D)`.
        w_v: `(H, Rv, D)`; None together with `w_o`: identity values and one head, the paper's law.
        w_o: `(H, D, Rv)`.
        strict: Mask s < t (True, the paper's) or s <= t (False, real models).
        scale: Factor of the logits; None: $1/\sqrt R$.
        key_padding_mask: True at padding, `(B, T)`, as in `torch.nn.MultiheadAttention`.
        view: `noise` for $x - \mu(x)$, `block` for $x + \mu(x)$.
        chunk_size: Positions computed at once; None chooses by memory. It never changes a result.

    Returns:
        `Slogdet(sign, log_abs_det)`, each `(B, T)`; sign 1 and 0 nats at padding.

    Raises:
        ArgumentError: Shapes do not fit, or an option is unknown.

    Source:
        arXiv:2602.22271; the inclusive mask and several heads after the chain rule.

    Example:
        >>> x, w = torch.randn(2, 5, 4), torch.randn(1, 3, 4)
        >>> attention_slogdet(x, w, w).log_abs_det[:, :2]
        tensor([[0., 0.],
                [0., 0.]])
    """
    margins = attention_margins(
        x,
        w_q,
        w_k,
        w_v,
        w_o,
        strict=strict,
        scale=scale,
        key_padding_mask=key_padding_mask,
        view=view,
        chunk_size=chunk_size,
    )
    return Slogdet(margins.sign, margins.log_abs_det)


def state_margins(
    state: AttentionState, *, view: str = "noise", positions: Tensor | None = None, chunk_size: int | None = None
) -> Margins:
    r"""Margins of an attention state, at all positions or at `positions` only.

    Chunks of positions are recomputed in the backward pass, so memory is that of one chunk.

    Args:
        state: State of an attention layer, float32 or float64.
        view: `noise` or `block`.
        positions: Indices `(B, n)`; None: all T.
        chunk_size: Positions computed at once; None chooses by memory.

    Example:
        >>> x, w = torch.randn(2, 5, 4), torch.randn(1, 3, 4)
        >>> state_margins(state_from_weights(x, w, w), positions=torch.tensor([[4], [3]])).log_abs_det.shape
        torch.Size([2, 1])
    """
    shape = state.batch, state.length if positions is None else positions.shape[1]
    if 0 in shape:
        # Nothing to compute, and a graph all the same: a loss over an empty batch has gradients of 0.
        nothing = state.query.sum() * 0 + state.query.new_zeros(shape)
        return margins_of(state, torch.ones_like(nothing), nothing, view=view, positions=positions)
    blocks = JacobianBlocks(state)
    chunks = position_chunks(state, positions, blocks.reduced_width, chunk_size)
    with full_precision(state.query):
        blocks.prepare()
        recompute = torch.is_grad_enabled() and len(chunks) > 1
        parts = [
            checkpoint(margins_at, blocks, chunk, view, use_reentrant=False, preserve_rng_state=False)
            if recompute
            else margins_at(blocks, chunk, view)
            for chunk in chunks
        ]
    sign, log_abs_det = (torch.cat(values, dim=1) for values in zip(*parts, strict=True))
    return margins_of(state, sign, log_abs_det, view=view, positions=positions)


def margins_at(blocks: JacobianBlocks, positions: Positions, view: str) -> Slogdet:
    """Sign and log margin of one chunk of positions, `(B, n)`, by the smaller of the matrices that have its
    determinant."""
    return block_slogdet(blocks.reduced_factors(positions), view_sign(view))


def margins_of(
    state: AttentionState, sign: Tensor, log_abs_det: Tensor, *, view: str, positions: Tensor | None = None
) -> Margins:
    """`Margins` from what was computed, with what the state knows of its positions."""
    every: Positions = slice(0, state.length) if positions is None else positions

    def smallest() -> SigmaMin:
        if not log_abs_det.numel():
            return SigmaMin(torch.zeros_like(log_abs_det), torch.zeros_like(log_abs_det))
        identity = torch.eye(state.width, dtype=state.query.dtype, device=state.query.device)
        blocks = JacobianBlocks(state)
        chunks = position_chunks(state, positions, state.width)
        with full_precision(state.query):
            parts = [sigma_min_with_bound(identity + view_sign(view) * blocks.dense(chunk)) for chunk in chunks]
        return SigmaMin(*(torch.cat(values, dim=1) for values in zip(*parts, strict=True)))

    valid, rankable = (gather_positions(mask, every, 1) for mask in (_valid(state), rankable_positions(state)))
    return Margins(sign, log_abs_det, valid, rankable, smallest)


def _valid(state: AttentionState) -> Tensor:
    if state.valid is not None:
        return state.valid
    return torch.ones(state.batch, state.length, dtype=torch.bool, device=state.query.device)


def rankable_positions(state: AttentionState) -> Tensor:
    r"""Valid positions whose margin is not 0 by structure, `(B, T)`: under a strict mask those with two keys or more.

    Example:
        >>> x, w = torch.randn(1, 4, 4), torch.randn(1, 3, 4)
        >>> rankable_positions(state_from_weights(x, w, w))
        tensor([[False, False,  True,  True]])
    """
    valid = _valid(state)
    if not state.strict:
        return valid
    keys = state.allowed_at(slice(0, state.length), state.key.shape[2]).sum(-1)[:, 0]
    return valid & (keys >= 2)


def position_chunks(
    state: AttentionState,
    positions: Positions | None,
    width: int,
    chunk_size: int | None = None,
    budget: int = _CHUNK_BYTES,
) -> list[Positions]:
    """Query positions in chunks, slices of the sequence or columns of indices `(B, n)`, `budget` bytes of matrices in
    each."""
    if isinstance(positions, slice):
        begin, end = positions.start, positions.stop
    else:
        begin, end = 0, state.length if positions is None else positions.shape[1]
    if chunk_size is None:
        chunk_size = max(1, budget // (state.batch * width * width * state.query.element_size()))
    elif chunk_size < 1:
        raise ArgumentError(f"chunk_size must be at least 1, received {chunk_size}; leave it None to choose by memory.")
    chunks = [slice(start, min(start + chunk_size, end)) for start in range(begin, end, chunk_size)]
    return [positions[:, chunk] for chunk in chunks] if isinstance(positions, Tensor) else [*chunks]
