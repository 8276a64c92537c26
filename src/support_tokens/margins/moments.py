r"""Causal attention weights and the moments they define, for chosen query positions only.

$$ \mu^h_t = \sum_s \alpha^h_{ts} v_s, \qquad
   \mathrm{Cov}_{\alpha^h_t}(v, k) = \sum_s \alpha^h_{ts} (v_s - \mu^h_t)\,\phi'_{ts}\,k_s^T, $$

with $\phi'$ the slope of the logit soft-cap (1 without one). Memory is that of one chunk of positions.
"""

__all__ = ["Moments", "attention_weights", "moments"]

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from support_tokens.margins.state import AttentionState, Rows, take

# Bytes of the outer products of one block of keys: inside of a processor's cache, and large enough for an efficient
# product.
_BLOCK_BYTES = 4 * 2**20
# Keys in a block at most where rows before it are left out: the smaller a block, the less it holds of what is 0.
_CAUSAL_KEYS = 64


Reach = Sequence[int] | None
"""The last key that each row, and any row before it, may look at, in order of rows; None: not known on the host."""


class Moments(NamedTuple):
    r"""Moments of the attended values and keys at n positions.

    Args:
        mean: $\mu^h_t$, `(B, H, n, Rv)`.
        covariance: $\mathrm{Cov}(v, k)$, `(B, H, n, Rv, R)`; None unless asked for.
        self_weight: $\alpha_{tt}$, `(B, H, n)`; None under a strict mask.
        self_slope: $\phi'_{tt}$, `(B, H, n)`; None under a strict mask or without soft-cap.
    """

    mean: Tensor
    covariance: Tensor | None
    self_weight: Tensor | None
    self_slope: Tensor | None


def moments(state: AttentionState, rows: Rows, *, covariance: bool = True) -> Moments:
    """Mean, (value, key) covariance and self-weights of `state` at query positions `rows`.

    A row with no key has mean and covariance zero. Cost: O(n S Rv R) operations and O(n Rv R + n S) memory a
    head.

    Args:
        state: What a layer did to a batch.
        rows: Positions, a slice or indices `(B, n)`.
        covariance: Whether the covariance is wanted.

    Example:
        >>> from support_tokens.margins.state import state_from_weights
        >>> x, w = torch.randn(2, 5, 4), torch.randn(1, 3, 4)
        >>> moments(state_from_weights(x, w, w), slice(0, 5)).covariance.shape
        torch.Size([2, 1, 5, 4, 3])
    """
    offset = state.key.shape[2] - state.length
    # A slice of positions never looks past its own end: the keys behind it need not be touched.
    keys = rows.stop + offset if isinstance(rows, slice) else state.key.shape[2]
    key, value = state.key[:, :, :keys], state.value[:, :, :keys]
    batch, groups = key.shape[:2]
    weights, slope = _weights_and_slope(state, rows, key)
    heads, count = weights.shape[1:3]

    # Covariance does not change under shifts of values, nor of keys where the weights alone multiply them. Shifting by
    # a constant near the mean keeps the difference E[vk] - E[v]E[k] accurate in float32; the shift carries no gradient.
    shift_value = _shift(value, weights) if state.sinks is None else None
    shift_key = _shift(key, weights) if state.sinks is None and slope is None else None
    centred_value = value if shift_value is None else value - shift_value
    centred_key = key if shift_key is None else key - shift_key

    by_group = lambda w: w.reshape(batch, groups, -1, keys)  # noqa: E731
    centred_mean = (by_group(weights) @ centred_value).reshape(batch, heads, count, -1)
    total = weights.sum(-1, keepdim=True)
    mean = centred_mean
    if shift_value is not None:
        mean = centred_mean + total * shift_value.repeat_interleave(heads // groups, dim=1)

    joint = None
    if covariance:
        tilted = weights if slope is None else weights * slope
        stacked_weights = tilted.reshape(batch, groups, heads // groups, count, keys)
        tilted_key = by_group(tilted) @ centred_key
        joint = _Covariance.apply(
            stacked_weights,
            centred_value,
            centred_key,
            centred_mean.reshape(batch, groups, heads // groups, count, -1),
            tilted_key.reshape(batch, groups, heads // groups, count, -1),
            _reach(rows, offset),
        )
        joint = joint.reshape(batch, heads, count, value.shape[-1], key.shape[-1])
    if state.strict:
        return Moments(mean, joint, None, None)
    own = _own_key(state, rows, offset)
    pick = lambda w: w.gather(-1, own.expand(batch, heads, count, 1)).squeeze(-1)  # noqa: E731
    return Moments(mean, joint, pick(weights), None if slope is None else pick(slope))


def attention_weights(state: AttentionState, rows: slice) -> Tensor:
    r"""$\alpha_{ts}$ of query positions `rows` on all keys up to their end, `(B, H, n, keys)`.

    Example:
        >>> from support_tokens.margins.state import state_from_weights
        >>> x, w = torch.randn(2, 5, 4), torch.randn(1, 3, 4)
        >>> attention_weights(state_from_weights(x, w, w), slice(0, 5)).shape
        torch.Size([2, 1, 5, 5])
    """
    end = rows.stop + state.key.shape[2] - state.length
    return _weights_and_slope(state, rows, state.key[:, :, :end])[0]


def _weights_and_slope(state: AttentionState, rows: Rows, key: Tensor) -> tuple[Tensor, Tensor | None]:
    batch, groups, keys, _ = key.shape
    query = take(state.query, rows, 2)
    heads, count = query.shape[1], query.shape[2]
    stacked = query.reshape(batch, groups, heads // groups * count, -1)
    logits = (state.scale * stacked @ key.transpose(-1, -2)).reshape(batch, heads, count, keys)
    slope = None
    if state.softcap is not None:
        squashed = torch.tanh(logits / state.softcap)
        logits, slope = state.softcap * squashed, 1 - squashed.square()
    return _softmax(logits, state.allowed_rows(rows, keys), state.sinks), slope


def _softmax(logits: Tensor, allowed: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over allowed keys; a row with none gets zeros, with a zero gradient rather than NaN."""
    allowed = allowed.expand_as(logits)
    logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
    if sinks is None:
        weights = torch.softmax(logits, dim=-1)
    else:
        column = sinks.to(logits.dtype).reshape(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        weights = torch.softmax(torch.cat((logits, column), dim=-1), dim=-1)[..., :-1]
    return weights.masked_fill(~allowed, 0.0)


def _shift(tensor: Tensor, weights: Tensor) -> Tensor:
    """A constant near the attended mean, one a sequence and key/value head: `(B, G, 1, R)`, without gradient."""
    with torch.no_grad():
        batch, groups, keys, _ = tensor.shape
        mass = weights.reshape(batch, groups, -1, keys).sum(-2, keepdim=True)
        return (mass @ tensor) / mass.sum(-1, keepdim=True).clamp_min(torch.finfo(tensor.dtype).tiny)


def _own_key(state: AttentionState, rows: Rows, offset: int) -> Tensor:
    if isinstance(rows, slice):
        return torch.arange(rows.start, rows.stop, device=state.query.device).reshape(1, 1, -1, 1) + offset
    return rows[:, None, :, None] + offset


class _Covariance(torch.autograd.Function):
    r"""$\sum_s w_{ts} v_s k_s^T - \bar v_t \bar k_t^T$ for weights `(B, G, m, n, S)`, values `(B, G, S, Rv)`, keys
    `(B, G, S, R)` and means `(B, G, m, n, Rv)`, `(B, G, m, n, R)`: `(B, G, m, n, Rv, R)`.

    One matrix product per block of keys with the outer products $v_s k_s^T$ of that block. Autograd would keep them
    all, S Rv R numbers a head; here the backward pass forms each block again. `reach` says how far rows look: those
    that do not reach a block of keys are left out of its product.
    """

    @staticmethod
    def forward(
        ctx, weights: Tensor, value: Tensor, key: Tensor, mean_value: Tensor, mean_key: Tensor, reach: Reach
    ) -> Tensor:
        ctx.save_for_backward(weights, value, key, mean_value, mean_key)
        ctx.reach = reach
        shape = *weights.shape[:-1], value.shape[-1], key.shape[-1]
        joint = torch.mul(mean_value.unsqueeze(-1), -mean_key.unsqueeze(-2))
        if weights.shape[3] == 1:
            # One more token of a text that is being written: outer products of all keys would cost more than their sum.
            weighted = weights.unsqueeze(-1) * value[:, :, None, None]
            return joint.add_(weighted.mT @ key[:, :, None, None])
        stacked = joint.view(*weights.shape[:2], -1, shape[-2] * shape[-1])
        for keys, first in _key_blocks(weights, value, key, reach):
            outer = _outer(value[:, :, keys], key[:, :, keys])
            part = weights[..., first:, keys]
            for batch in range(shape[0]):
                if shape[2] == 1:
                    stacked[batch, :, first:].baddbmm_(part[batch, :, 0], outer[batch])
                else:
                    product = part[batch].flatten(1, 2) @ outer[batch]
                    joint[batch, ..., first:, :, :] += product.view(*part.shape[1:4], *shape[-2:])
        return joint

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weights, value, key, mean_value, mean_key = ctx.saved_tensors
        (grad,) = gradients
        flat = grad.flatten(-2)
        grad_weights, grad_value, grad_key = [], [], []
        for keys, first in _key_blocks(weights, value, key, ctx.reach):
            rows = flat[..., first:, :].flatten(2, 3)
            block = weights[..., first:, keys]
            by_weight = (rows @ _outer(value[:, :, keys], key[:, :, keys]).mT).unflatten(2, (weights.shape[2], -1))
            grad_weights.append(torch.nn.functional.pad(by_weight, (0, 0, first, 0)))
            by_outer = (block.flatten(2, 3).mT @ rows).unflatten(-1, (value.shape[-1], key.shape[-1]))
            # Sums of elementwise products: a batch of matrices times vectors is slower as a matrix product.
            grad_value.append((by_outer * key[:, :, keys].unsqueeze(-2)).sum(-1))
            grad_key.append((by_outer * value[:, :, keys].unsqueeze(-1)).sum(-2))
        grad_mean_value = -(grad * mean_key.unsqueeze(-2)).sum(-1)
        grad_mean_key = -(grad * mean_value.unsqueeze(-1)).sum(-2)
        joined = torch.cat(grad_weights, dim=-1), torch.cat(grad_value, dim=2), torch.cat(grad_key, dim=2)
        return *joined, grad_mean_value, grad_mean_key, None


def _outer(value: Tensor, key: Tensor) -> Tensor:
    return (value.unsqueeze(-1) * key.unsqueeze(-2)).flatten(-2)


def _reach(rows: Rows, offset: int) -> Reach:
    if isinstance(rows, slice):
        return range(rows.start + offset, rows.stop + offset)
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return None  # to ask would be to wait for the device
    return (rows.amax(0).cummax(0).values + offset).tolist()


def _key_blocks(weights: Tensor, value: Tensor, key: Tensor, reach: Reach) -> list[tuple[slice, int]]:
    """Blocks of keys, each with the first row that may look at it."""
    one_key = value.shape[0] * value.shape[1] * value.shape[-1] * key.shape[-1] * value.element_size()
    size = max(16, _BLOCK_BYTES // one_key)
    if reach is not None:
        size = min(size, _CAUSAL_KEYS)
    blocks = [slice(begin, min(begin + size, key.shape[2])) for begin in range(0, key.shape[2], size)]
    return [(keys, 0 if reach is None else sum(last < keys.start for last in reach)) for keys in blocks]
