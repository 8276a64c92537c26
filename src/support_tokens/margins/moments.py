r"""Causal attention weights and the moments they define, for chosen query positions only.

$$ \mu^h_t = \sum_s \alpha^h_{ts} v_s, \qquad
   \mathrm{Cov}_{\alpha^h_t}(v, k) = \sum_s \alpha^h_{ts} (v_s - \mu^h_t)\,\phi'_{ts}\,k_s^T, $$

with $\phi'$ the slope of the logit soft-cap (1 without one).
"""

__all__ = ["Moments", "attention_weights", "moments"]

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from support_tokens.margins.linear_maps import Positions, gather_positions
from support_tokens.margins.state import AttentionState

# Bytes of the outer products of one block of keys: inside of a processor's cache, and large enough for an efficient
# product.
_BLOCK_BYTES = 4 * 2**20
# Most keys in a block where positions before the block are skipped: a smaller block holds fewer weights that are 0.
_CAUSAL_KEYS = 64


Reach = Sequence[int] | None
"""The last key that each position, or any before it, may attend to; None: not known on the host."""


class Moments(NamedTuple):
    r"""Moments of the attended values and keys at n positions.

    Args:
        mean: $\mu^h_t$, `(B, H, n, Rv)`.
        covariance: $\mathrm{Cov}(v, k)$, `(B, H, n, Rv, R)`; of size 0 where it was not requested.
        self_weight: $\alpha_{tt}$, `(B, H, n)`; 0 under a strict mask.
        self_slope: $\phi'_{tt}$, `(B, H, n)`; 1 under a strict mask or without soft-cap.
    """

    mean: Tensor
    covariance: Tensor
    self_weight: Tensor
    self_slope: Tensor


def moments(state: AttentionState, positions: Positions, *, covariance: bool = True) -> Moments:
    """Mean, (value, key) covariance and self-weights of a state at some query positions.

    A position with no key has mean and covariance zero. Cost: O(n S Rv R) operations and O(n Rv R + n S) memory a
    head.

    Args:
        state: State of an attention layer.
        positions: Positions, a slice or indices `(B, n)`.
        covariance: Whether to compute the covariance.

    Example:
        >>> from support_tokens.margins.state import state_from_weights
        >>> x, w = torch.randn(2, 5, 4), torch.randn(1, 3, 4)
        >>> moments(state_from_weights(x, w, w), slice(0, 5)).covariance.shape
        torch.Size([2, 1, 5, 4, 3])
    """
    offset = state.key.shape[2] - state.length
    # A slice of positions never attends past its own end.
    keys = positions.stop + offset if isinstance(positions, slice) else state.key.shape[2]
    key, value = state.key[:, :, :keys], state.value[:, :, :keys]
    batch, groups = key.shape[:2]
    weights, slope = _weights_and_slope(state, positions, key)
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

    joint = value.new_empty(batch, heads, count, 0, 0)
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
            _reach(positions, offset),
        )
        joint = joint.reshape(batch, heads, count, value.shape[-1], key.shape[-1])
    if state.strict:
        return Moments(mean, joint, weights.new_zeros(weights.shape[:3]), weights.new_ones(weights.shape[:3]))
    own = _own_key(state, positions, offset).expand(batch, heads, count, 1)
    self_weight = weights.gather(-1, own).squeeze(-1)
    self_slope = torch.ones_like(self_weight) if slope is None else slope.gather(-1, own).squeeze(-1)
    return Moments(mean, joint, self_weight, self_slope)


def attention_weights(state: AttentionState, positions: slice) -> Tensor:
    r"""$\alpha_{ts}$ of a slice of query positions on all keys up to its end, `(B, H, n, keys)`.

    Example:
        >>> from support_tokens.margins.state import state_from_weights
        >>> x, w = torch.randn(2, 5, 4), torch.randn(1, 3, 4)
        >>> attention_weights(state_from_weights(x, w, w), slice(0, 5)).shape
        torch.Size([2, 1, 5, 5])
    """
    end = positions.stop + state.key.shape[2] - state.length
    return _weights_and_slope(state, positions, state.key[:, :, :end])[0]


def _weights_and_slope(state: AttentionState, positions: Positions, key: Tensor) -> tuple[Tensor, Tensor | None]:
    batch, groups, keys, _ = key.shape
    query = gather_positions(state.query, positions, 2)
    heads, count = query.shape[1], query.shape[2]
    stacked = query.reshape(batch, groups, heads // groups * count, -1)
    logits = (state.scale * stacked @ key.transpose(-1, -2)).reshape(batch, heads, count, keys)
    slope = None
    if state.softcap is not None:
        squashed = torch.tanh(logits / state.softcap)
        logits, slope = state.softcap * squashed, 1 - squashed.square()
    return _softmax(logits, state.allowed_at(positions, keys), state.sinks), slope


def _softmax(logits: Tensor, allowed: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over allowed keys; zeros with a zero gradient, rather than NaN, where no key is allowed."""
    allowed = allowed.expand_as(logits)
    logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
    if sinks is None:
        weights = torch.softmax(logits, dim=-1)
    else:
        column = sinks.to(logits.dtype).reshape(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        weights = torch.softmax(torch.cat((logits, column), dim=-1), dim=-1)[..., :-1]
    return weights.masked_fill(~allowed, 0.0)


def _shift(tensor: Tensor, weights: Tensor) -> Tensor:
    """A constant near the attended mean, one per sequence and key/value head: `(B, G, 1, R)`, without gradient."""
    with torch.no_grad():
        batch, groups, keys, _ = tensor.shape
        total = weights.reshape(batch, groups, -1, keys).sum(-2, keepdim=True)
        return (total @ tensor) / total.sum(-1, keepdim=True).clamp_min(torch.finfo(tensor.dtype).tiny)


def _own_key(state: AttentionState, positions: Positions, offset: int) -> Tensor:
    if isinstance(positions, slice):
        return torch.arange(positions.start, positions.stop, device=state.query.device).reshape(1, 1, -1, 1) + offset
    return positions[:, None, :, None] + offset


class _Covariance(torch.autograd.Function):
    r"""$\sum_s w_{ts} v_s k_s^T - \bar v_t \bar k_t^T$ for weights `(B, G, m, n, S)`, values `(B, G, S, Rv)`, keys
    `(B, G, S, R)` and means `(B, G, m, n, Rv)`, `(B, G, m, n, R)`: `(B, G, m, n, Rv, R)`.

    One matrix product per block of keys with the outer products $v_s k_s^T$ of that block. Autograd would keep them
    all, S Rv R numbers a head; here the backward pass forms each block again. `reach` is the last key that each
    position attends to: positions that do not reach a block of keys are left out of its product.
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
            # One more token of a text being generated: outer products of all keys would cost more than their sum.
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
            grad_rows = flat[..., first:, :].flatten(2, 3)
            block = weights[..., first:, keys]
            by_weight = (grad_rows @ _outer(value[:, :, keys], key[:, :, keys]).mT).unflatten(2, (weights.shape[2], -1))
            grad_weights.append(torch.nn.functional.pad(by_weight, (0, 0, first, 0)))
            by_outer = (block.flatten(2, 3).mT @ grad_rows).unflatten(-1, (value.shape[-1], key.shape[-1]))
            # Sums of elementwise products: a batch of matrices times vectors is slower as a matrix product.
            grad_value.append((by_outer * key[:, :, keys].unsqueeze(-2)).sum(-1))
            grad_key.append((by_outer * value[:, :, keys].unsqueeze(-1)).sum(-2))
        grad_mean_value = -(grad * mean_key.unsqueeze(-2)).sum(-1)
        grad_mean_key = -(grad * mean_value.unsqueeze(-1)).sum(-2)
        joined = torch.cat(grad_weights, dim=-1), torch.cat(grad_value, dim=2), torch.cat(grad_key, dim=2)
        return *joined, grad_mean_value, grad_mean_key, None


def _outer(value: Tensor, key: Tensor) -> Tensor:
    return (value.unsqueeze(-1) * key.unsqueeze(-2)).flatten(-2)


def _reach(positions: Positions, offset: int) -> Reach:
    if isinstance(positions, slice):
        return range(positions.start + offset, positions.stop + offset)
    if positions.device.type != "cpu" or torch.compiler.is_compiling():
        return None  # reading the indices would wait for the device
    return (positions.amax(0).cummax(0).values + offset).tolist()


def _key_blocks(weights: Tensor, value: Tensor, key: Tensor, reach: Reach) -> list[tuple[slice, int]]:
    """Blocks of keys, each with the first position that may attend to it."""
    one_key = value.shape[0] * value.shape[1] * value.shape[-1] * key.shape[-1] * value.element_size()
    size = max(16, _BLOCK_BYTES // one_key)
    if reach is not None:
        size = min(size, _CAUSAL_KEYS)
    blocks = [slice(begin, min(begin + size, key.shape[2])) for begin in range(0, key.shape[2], size)]
    return [(keys, 0 if reach is None else sum(last < keys.start for last in reach)) for keys in blocks]
