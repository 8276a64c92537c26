r"""A weighted sum of penalties of margins and its gradient in one pass over chunks of positions.

The sum $\sum_t w_t f(\log|\det J_t|)$ is a scalar, so its gradient with respect to the attention state is known up to
one factor once the forward pass is done. It is formed right there, chunk by chunk, and the backward pass only scales
it: no matrix outlives its chunk and none is factorised twice. What is kept is one gradient of the size of queries,
keys, values and weights.
"""

__all__ = ["fused_penalty"]

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from support_tokens.attention import AttentionState, Rows
from support_tokens.jacobian import JacobianBlocks
from support_tokens.logdet import full_precision
from support_tokens.margins import Margins, margins_at, margins_of, position_chunks, state_margins

# Smaller than where no gradient is wanted: a chunk holds its matrices, their factors, inverses and gradients at once.
_CHUNK_BYTES = 4 * 2**20


def fused_penalty(
    state: AttentionState,
    weight: Tensor,
    function: Callable[[Tensor], Tensor],
    *,
    view: str = "noise",
    positions: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Margins]:
    r"""$\sum_{b,t} w_{bt}\, f(\log|\det J_{bt}|)$ with its gradient, and the margins without one.

    Args:
        state: What a layer did to a batch.
        weight: $w$, `(B, n)`; 0 at padding.
        function: $f$, elementwise on a tensor of log margins.
        view: `noise` or `block`.
        positions: Indices `(B, n)`; None: all T.
        chunk_size: Positions computed at once; None chooses by memory.

    Returns:
        The sum, a scalar that is differentiable once, and the margins of the n positions, detached.

    Raises:
        RuntimeError: A second derivative is asked for; sum over `state_margins` where it is needed.

    Example:
        >>> from support_tokens.attention import state_from_weights
        >>> x, w = torch.randn(2, 5, 4, requires_grad=True), torch.randn(1, 3, 4)
        >>> value, margins = fused_penalty(state_from_weights(x, w, w), torch.full((2, 5), 0.1), torch.neg)
        >>> value.backward()
        >>> x.grad.shape, margins.log_abs_det.requires_grad
        (torch.Size([2, 5, 4]), False)
    """
    tensors = _tensors(state)
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        margins = state_margins(state, view=view, positions=positions, chunk_size=chunk_size)
        return (weight * function(margins.log_abs_det)).sum(), margins
    call = _Call(state, weight.detach(), function, view, positions, chunk_size)
    value, sign, log_abs_det = _Fused.apply(call, *tensors)
    return value, margins_of(state, sign, log_abs_det, view=view, positions=positions)


@dataclass(frozen=True)
class _Call:
    """What `fused_penalty` was asked for."""

    state: AttentionState
    weight: Tensor
    function: Callable[[Tensor], Tensor]
    view: str
    positions: Tensor | None
    chunk_size: int | None

    def chunks(self) -> list[tuple[Rows, Tensor]]:
        """Query positions of each chunk, with their weights."""
        width = JacobianBlocks(self.state).reduced_width
        chunks = position_chunks(self.state, self.positions, width, self.chunk_size, budget=_CHUNK_BYTES)
        sizes = [rows.stop - rows.start if isinstance(rows, slice) else rows.shape[1] for rows in chunks]
        return list(zip(chunks, self.weight.split(sizes, dim=1), strict=True))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: _Call, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        value, sign, log_abs_det = tensors[0].new_zeros(()), [], []
        with torch.enable_grad(), full_precision(tensors[0]):
            blocks = JacobianBlocks(_rebuilt(call.state, iter(leaves)))
            shared = blocks.cut()
            for rows, weight in call.chunks():
                found = margins_at(blocks, rows, call.view)
                part = (weight * call.function(found.log_abs_det)).sum()
                part.backward(inputs=[*wanted, *(leaf for _, leaf in shared)])
                value += part.detach()
                sign.append(found.sign)
                log_abs_det.append(found.log_abs_det.detach())
            used = [(tensor, leaf.grad) for tensor, leaf in shared if leaf.grad is not None and tensor.requires_grad]
            if used:
                torch.autograd.backward([t for t, _ in used], [g for _, g in used], inputs=wanted)
        ctx.save_for_backward(*(leaf.grad for leaf in leaves))
        outputs = value, torch.cat(sign, dim=1), torch.cat(log_abs_det, dim=1)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(None if grad is None else gradients[0] * grad for grad in ctx.saved_tensors)


def _tensors(value: Any) -> list[Tensor]:
    """Floating tensors of nested frozen dataclasses, in order of their fields."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    return [t for f in fields(value) for t in _tensors(getattr(value, f.name))] if is_dataclass(value) else []


def _rebuilt(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same with other tensors in their places."""
    if isinstance(value, Tensor):
        return next(tensors) if value.is_floating_point() else value
    if not is_dataclass(value):
        return value
    return replace(value, **{f.name: _rebuilt(getattr(value, f.name), tensors) for f in fields(value)})  # type: ignore[type-var]
