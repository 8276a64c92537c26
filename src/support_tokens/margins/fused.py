r"""A weighted sum of penalties of margins and its gradient in one pass over chunks of positions.

The sum $\sum_t w_t f(\log|\det J_t|)$ is a scalar, so its gradient with respect to the attention state is known up to
one factor once the forward pass is done. It is computed there, chunk by chunk, and the backward pass only scales it: no
matrix outlives its chunk and none is factorised twice. What is kept is one gradient of the size of queries, keys,
values and weights.
"""

__all__ = ["fused_penalty"]

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from support_tokens.margins.assembly import block_penalty
from support_tokens.margins.jacobian import JacobianBlocks
from support_tokens.margins.linalg.slogdet import full_precision
from support_tokens.margins.linear_maps import Positions
from support_tokens.margins.margins import Margins, margins_of, state_margins, view_sign
from support_tokens.margins.state import AttentionState

# Bytes of a chunk's covariances, which autograd keeps for as long as the chunk lasts.
_CHUNK_BYTES = 2 * 2**20
# Large ones: this many positions, as long as they have no more bytes than that.
_FEW, _MOST_BYTES = 64, 16 * 2**20


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
        state: State of an attention layer.
        weight: $w$, `(B, n)`; 0 at padding.
        function: $f$, elementwise on a tensor of log margins.
        view: `noise` or `block`.
        positions: Indices `(B, n)`; None: all T.
        chunk_size: Positions of one sequence computed at once; None chooses by memory.

    Returns:
        The sum, a differentiable scalar, and the margins of the n positions, detached. Second derivatives are exact;
        with `create_graph` the plain path is computed as well.

    Example:
        >>> from support_tokens.margins.state import state_from_weights
        >>> x, w = torch.randn(2, 5, 4, requires_grad=True), torch.randn(1, 3, 4)
        >>> value, margins = fused_penalty(state_from_weights(x, w, w), torch.full((2, 5), 0.1), torch.neg)
        >>> value.backward()
        >>> x.grad.shape, margins.log_abs_det.requires_grad
        (torch.Size([2, 5, 4]), False)
    """
    tensors = [leaf.tensor for leaf in state.leaves()]
    # A batch without sequences has no chunks, and nothing to save either.
    if weight.numel() == 0 or not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        margins = state_margins(state, view=view, positions=positions, chunk_size=chunk_size)
        return (weight * function(margins.log_abs_det)).sum(), margins
    call = _Call(state, weight.detach(), function, view, positions, chunk_size)
    value, sign, log_abs_det = _Fused.apply(call, *tensors)
    return value, margins_of(state, sign, log_abs_det, view=view, positions=positions)


@dataclass(frozen=True)
class _Call:
    """Arguments of `fused_penalty`."""

    state: AttentionState
    weight: Tensor
    function: Callable[[Tensor], Tensor]
    view: str
    positions: Tensor | None
    chunk_size: int | None

    def groups(self) -> Iterator[tuple[slice, list[Positions], list[Tensor]]]:
        """Groups of whole sequences, each with chunks of its positions and their weights.

        A group is as many sequences as fit into one chunk: the outer products of a sequence's keys are then formed once
        for all of its positions.
        """
        batch, count = self.weight.shape
        blocks = JacobianBlocks(self.state)
        one = blocks.reduced_width * max(self.state.query.shape[-1], 1) * self.weight.element_size()
        size = self.chunk_size or max(1, _CHUNK_BYTES // one, min(_FEW, _MOST_BYTES // one))
        together = 1 if self.chunk_size else max(1, size // max(1, count))
        bounds = [(start, min(start + size, count)) for start in range(0, count, size)]
        for first in range(0, batch, together):
            group = slice(first, min(first + together, batch))
            own = None if self.positions is None else self.positions[group]
            chunks = [slice(*b) if own is None else own[:, slice(*b)] for b in bounds]
            yield group, chunks, [self.weight[group, slice(*b)] for b in bounds]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: _Call, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        by_sequence = [leaf.by_sequence for leaf in call.state.leaves()]
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        gradients: list[Tensor | None] = [None] * len(leaves)
        value, signs, log_margins = tensors[0].new_zeros(()), [], []
        with torch.enable_grad(), full_precision(tensors[0]):
            blocks = JacobianBlocks(call.state.with_leaves(leaves))
            shared = blocks.detach_shared()
            common = [leaf for leaf, own in zip(leaves, by_sequence, strict=True) if leaf.requires_grad and not own]
            for group, chunks, weights in call.groups():
                parts = [
                    leaf.detach()[group].requires_grad_(leaf.requires_grad) if own else leaf
                    for leaf, own in zip(leaves, by_sequence, strict=True)
                ]
                inputs = [part for part, own in zip(parts, by_sequence, strict=True) if own and part.requires_grad]
                inputs += [*common, *(leaf for _, leaf in shared)]
                group_blocks = blocks.of(call.state.with_leaves(parts, group))
                results = []
                for chunk, weight in zip(chunks, weights, strict=True):
                    factors = group_blocks.reduced_factors(chunk)
                    result = block_penalty(
                        factors, view_sign(call.view), weight, call.function, chunk_size=call.chunk_size
                    )
                    pairs = [(f, g) for f, g in zip(factors, result.gradient, strict=True) if f.requires_grad]
                    torch.autograd.backward([f for f, _ in pairs], [g for _, g in pairs], inputs=inputs)
                    value += result.value
                    results.append(result)
                signs.append(torch.cat([result.sign for result in results], dim=1))
                log_margins.append(torch.cat([result.log_abs_det for result in results], dim=1))
                for index, own in enumerate(by_sequence):
                    if own and (grad := parts[index].grad) is not None:
                        whole = gradients[index]
                        gradients[index] = whole = torch.zeros_like(leaves[index]) if whole is None else whole
                        whole[group] = grad
            used = [(tensor, leaf.grad) for tensor, leaf in shared if leaf.grad is not None and tensor.requires_grad]
            if used:
                torch.autograd.backward([t for t, _ in used], [g for _, g in used], inputs=common)
        for index, own in enumerate(by_sequence):
            if not own:
                gradients[index] = leaves[index].grad
        ctx.call = call
        ctx.save_for_backward(*gradients, *tensors)
        outputs = value, torch.cat(signs), torch.cat(log_margins)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        known, tensors = kept[: len(kept) // 2], kept[len(kept) // 2 :]
        if torch.is_grad_enabled():
            known = _differentiable(ctx.call, tensors)
        return None, *(None if grad is None else gradients[0] * grad for grad in known)


def _differentiable(call: _Call, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients with a graph of their own, for second derivatives, by the plain path."""
    # Aliases, so that the gradient of one tensor does not include what flows through another.
    aliases = [tensor.view_as(tensor) for tensor in tensors]
    state = call.state.with_leaves(aliases)
    margins = state_margins(state, view=call.view, positions=call.positions, chunk_size=call.chunk_size)
    value = (call.weight * call.function(margins.log_abs_det)).sum()
    inputs = [alias for alias in aliases if alias.requires_grad]
    gradients = iter(torch.autograd.grad(value, inputs, create_graph=True, allow_unused=True))
    return [next(gradients) if alias.requires_grad else None for alias in aliases]
