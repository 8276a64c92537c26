r"""Which positions to look at first: candidates for support tokens at a small part of the cost of exact margins.

To first order $\log|\det(I + s D_t)| = s\,\mathrm{tr}\, D_t$. For the law the trace needs no covariance matrix,

$$ \mathrm{tr}\,\Sigma_t A = \mathrm{scale} \Big( \sum_s \alpha_{ts}\, q_s^T k_s - \bar q_t^T \bar k_t \Big), $$

with $q_s$, $k_s$ query and key of position s and the bars means under $\alpha_t$: one product of T x T weights. For a
model's own attention the part of a token's own value is taken, $\sum_h \alpha^h_{tt}\,\mathrm{tr}\,(W_O^h W_V^h N_t)$,
as the covariance part costs nearly as much as it saves. The screen only chooses: at the candidates everything is exact.
"""

__all__ = ["first_order_margins", "gradient_share", "support_candidates"]

import torch
from torch import Tensor

from support_tokens.margins.jacobian import JacobianBlocks
from support_tokens.margins.linalg.elimination import slogdet_and_inverse
from support_tokens.margins.linalg.slogdet import full_precision
from support_tokens.margins.margins import rankable_positions, view_sign
from support_tokens.margins.moments import attention_weights
from support_tokens.margins.state import AttentionState


@torch.no_grad()
def first_order_margins(state: AttentionState, view: str = "noise") -> Tensor:
    r"""$s\,\mathrm{tr}\,D_t$, or its own-value part, at all positions, nats, `(B, T)`; 0 at padding.

    Args:
        state: State of an attention layer.
        view: `noise` or `block`.

    Example:
        >>> from support_tokens.margins.state import state_from_weights
        >>> x, w = torch.randn(2, 5, 4), torch.randn(1, 3, 4)
        >>> first_order_margins(state_from_weights(x, w, w)).shape
        torch.Size([2, 5])
    """
    if not state.batch * state.length:
        return state.query.new_zeros(state.batch, state.length)
    rows = slice(0, state.length)
    with full_precision(state.query):
        weights = attention_weights(state, rows)
        trace = _law_trace(state, weights[:, 0]) if state.output is None else _own_trace(state, weights)
    found = view_sign(view) * trace
    return found if state.valid is None else found.masked_fill(~state.valid, 0.0)


def support_candidates(state: AttentionState, count: int, view: str = "noise") -> Tensor:
    """The `count` rankable positions of each sequence whose first-order margin is smallest, in order of position.

    Deterministic: ties go to the earlier position. A sequence with fewer rankable positions (see `Margins`) gets, to
    fill the row, positions that are not rankable.

    Args:
        state: State of an attention layer.
        count: n, at most T.
        view: `noise` or `block`.

    Returns:
        Indices `(B, min(n, T))`.

    Source:
        As the working set of a support vector machine: Joachims, Making large-scale SVM learning practical, 1999.

    Example:
        >>> from support_tokens.margins.state import state_from_weights
        >>> x, w = torch.randn(2, 5, 4), torch.randn(1, 3, 4)
        >>> support_candidates(state_from_weights(x, w, w), 2).shape
        torch.Size([2, 2])
    """
    score = first_order_margins(state, view).masked_fill(~rankable_positions(state), torch.inf)
    order = score.sort(dim=-1, stable=True).indices[:, : min(count, state.length)]
    return order.sort(dim=-1).values


def gradient_share(state: AttentionState, positions: Tensor, view: str = "noise") -> Tensor:
    r"""Share of the gradient norm that `positions` carry: $\sum_{t \in P} |J_t^{-T}|_F / \sum_t |J_t^{-T}|_F$.

    Both sums are over rankable positions: where the margin is 0 by structure, no gradient moves it. Exact,
    at the full cost of all positions: what a user is told once, not at every step.

    Args:
        state: State of an attention layer.
        positions: P, indices `(B, n)`.
        view: `noise` or `block`.

    Returns:
        Scalar between 0 and 1.

    Example:
        >>> from support_tokens.margins.state import state_from_weights
        >>> x, w = torch.randn(2, 5, 4), torch.randn(1, 3, 4)
        >>> gradient_share(state_from_weights(x, w, w), torch.arange(5).expand(2, 5))
        tensor(1.)
    """
    blocks = JacobianBlocks(state)
    with torch.no_grad(), full_precision(state.query):
        norms = []
        for start in range(0, state.length, 16):
            part = blocks.reduced(slice(start, min(start + 16, state.length)))
            identity = torch.eye(part.shape[-1], dtype=part.dtype, device=part.device)
            norms.append(slogdet_and_inverse(identity + view_sign(view) * part)[2].flatten(2).norm(dim=-1))
        norm = torch.cat(norms, dim=1)
    norm = norm.masked_fill(~rankable_positions(state), 0.0)
    return norm.gather(1, positions).sum() / norm.sum()


def _law_trace(state: AttentionState, weights: Tensor) -> Tensor:
    query, key = state.query[:, 0], state.key[:, 0]
    own = (query * key).sum(-1, keepdim=True)
    means = weights @ query, weights @ key
    return state.scale * ((weights @ own).squeeze(-1) - (means[0] * means[1]).sum(-1))


def _own_trace(state: AttentionState, weights: Tensor) -> Tensor:
    assert state.to_value is not None and state.output is not None, "values and their output go together"
    value = state.to_value.weight.repeat_interleave(state.heads // state.to_value.weight.shape[0], dim=0)
    gain = value.new_ones(state.width)
    scale = value.new_ones(state.batch, state.length)
    for norm in (state.input_norm, state.output_norm):
        if norm is not None:
            gain = gain * norm.gain
            scale = scale * norm.inverse_scale.squeeze(-1)
    trace = torch.einsum("hdv,d,hvd->h", state.output, gain, value)
    offset = state.key.shape[2] - state.length
    own = weights.diagonal(offset, -2, -1)  # (B, H, T)
    return scale * torch.einsum("bht,h->bt", own, trace)
