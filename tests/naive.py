"""Textbook formulas with loops, and the autograd oracle: what the package is measured against.

Nothing here imports `support_tokens`. Every function takes one sequence `x` of shape (T, D); weights are
`w_q` (H, R, D), `w_k` (G, R, D), `w_v` (G, Rv, D), `w_o` (H, D, Rv), where G divides H and query head h reads
key/value head h // (H / G); `w_v` and `w_o` None mean identity values. `padding` (T,) is True where a position is none.
The symbols are those of the legend: `weights` are alpha_ts, `mean` is mu_t, `jacobian` is J_t.
"""

import math

import torch
from torch import Tensor

__all__ = [
    "attention_mean",
    "diagonal_blocks",
    "gaussian_log_density",
    "oracle",
    "textbook_blocks",
    "textbook_slogdet",
    "trajectory_jacobian",
]

SIGN_OF_VIEW = {"noise": -1.0, "block": 1.0}


def attended(t: int, strict: bool, padding: Tensor | None) -> list[int]:
    """The positions that position t attends to: earlier ones, itself too under the inclusive mask, never padding."""
    last = t if strict else t + 1
    return [s for s in range(last) if padding is None or not padding[s]]


def is_padding(t: int, padding: Tensor | None) -> bool:
    return padding is not None and bool(padding[t])


def value_weights(x: Tensor, w_v: Tensor | None, w_o: Tensor | None) -> tuple[Tensor, Tensor]:
    """Identity values are one head whose value and output weights are the identity matrix."""
    if w_v is not None and w_o is not None:
        return w_v, w_o
    identity = torch.eye(x.shape[-1], dtype=x.dtype)[None]
    return identity, identity


def softmax_weights(x: Tensor, t: int, keys: list[int], w_q: Tensor, w_k: Tensor, scale: float) -> Tensor:
    """alpha_ts for one head, with `w_q`, `w_k` (R, D): exponentials of scaled scores over their sum."""
    scores = torch.stack([scale * torch.dot(w_q @ x[t], w_k @ x[s]) for s in keys])
    exponentials = torch.exp(scores - scores.detach().max())
    return exponentials / exponentials.sum()


def attention_mean(x, w_q, w_k, w_v=None, w_o=None, *, strict=True, scale=None, padding=None) -> Tensor:
    """mu_t(x) = sum_h W_O^h sum_s alpha_ts^h W_V^h x_s, (T, D); zero where there is nothing to attend to."""
    heads, head_width, _ = w_q.shape
    scale = 1 / math.sqrt(head_width) if scale is None else scale
    w_v, w_o = value_weights(x, w_v, w_o)
    rows = []
    for t in range(len(x)):
        row = torch.zeros_like(x[t])
        keys = [] if is_padding(t, padding) else attended(t, strict, padding)
        for h in range(heads if keys else 0):
            group = h // (heads // len(w_k))
            weights = softmax_weights(x, t, keys, w_q[h], w_k[group], scale)
            for weight, s in zip(weights, keys, strict=True):
                row = row + weight * (w_o[h] @ (w_v[group] @ x[s]))
        rows.append(row)
    return torch.stack(rows)


def trajectory_jacobian(x, *arguments, view="noise", **options) -> Tensor:
    """Autograd's derivative (T, D, T, D) of the whole map: x - mu(x) in the noise view, x + mu(x) in the block view."""

    def residual(x: Tensor) -> Tensor:
        return x + SIGN_OF_VIEW[view] * attention_mean(x, *arguments, **options)

    jacobian = torch.autograd.functional.jacobian(residual, x.detach(), vectorize=True)
    assert isinstance(jacobian, Tensor)
    return jacobian


def diagonal_blocks(jacobian: Tensor) -> Tensor:
    """J_t (T, D, D) out of the derivative (T, D, T, D) of a trajectory."""
    return torch.stack([jacobian[t, :, t, :] for t in range(len(jacobian))])


def oracle(x, *arguments, **options) -> tuple[Tensor, Tensor, Tensor]:
    """Sign, log|det| and sigma_min (T,) of the diagonal blocks that autograd finds: no closed form is involved."""
    blocks = diagonal_blocks(trajectory_jacobian(x, *arguments, **options))
    sign, log_abs_det = torch.linalg.slogdet(blocks)
    return sign, log_abs_det, torch.linalg.svdvals(blocks)[:, -1]


def textbook_blocks(x, w_q, w_k, w_v=None, w_o=None, *, strict=True, scale=None, padding=None, view="noise") -> Tensor:
    """J_t (T, D, D) by the formula of the theory, one position, head and key at a time; differentiable."""
    heads, head_width, _ = w_q.shape
    scale = 1 / math.sqrt(head_width) if scale is None else scale
    w_v, w_o = value_weights(x, w_v, w_o)
    blocks = []
    for t in range(len(x)):
        jacobian = torch.eye(x.shape[-1], dtype=x.dtype)
        keys = [] if is_padding(t, padding) else attended(t, strict, padding)
        for h in range(heads if keys else 0):
            group = h // (heads // len(w_k))
            weights = softmax_weights(x, t, keys, w_q[h], w_k[group], scale)
            key = {s: w_k[group] @ x[s] for s in keys}
            value = {s: w_v[group] @ x[s] for s in keys}
            pairs = list(zip(weights, keys, strict=True))
            mean_key = torch.stack([a * key[s] for a, s in pairs]).sum(0)
            mean_value = torch.stack([a * value[s] for a, s in pairs]).sum(0)
            covariance = torch.stack([a * torch.outer(value[s] - mean_value, key[s] - mean_key) for a, s in pairs]).sum(
                0
            )
            derivative = scale * covariance @ w_q[h]
            if not strict:
                own_key = scale * torch.outer(value[t] - mean_value, w_k[group].T @ (w_q[h] @ x[t]))
                derivative = derivative + weights[-1] * (own_key + w_v[group])
            jacobian = jacobian + SIGN_OF_VIEW[view] * w_o[h] @ derivative
        blocks.append(jacobian)
    return torch.stack(blocks)


def textbook_slogdet(x, *arguments, **options) -> tuple[Tensor, Tensor]:
    """Sign and log|det| (T,) of the textbook blocks."""
    return tuple(torch.linalg.slogdet(textbook_blocks(x, *arguments, **options)))


def gaussian_log_density(residual: Tensor, sigma: float) -> Tensor:
    """The density log N(e; 0, sigma^2 I) of one vector or of many rows together, in nats, written out."""
    count = residual.numel()
    return -0.5 * (residual**2).sum() / sigma**2 - count * math.log(sigma) - 0.5 * count * math.log(2 * math.pi)
