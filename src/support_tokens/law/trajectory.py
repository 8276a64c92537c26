r"""A trajectory of embeddings from its noise, one position after the other by Newton, with exact gradients.

With $e(x) = x - \mu(x; \theta)$ the solution of $e(x) = \epsilon$ moves, by the implicit function theorem, as

$$ dx = (\partial e / \partial x)^{-1} (d\epsilon + \partial_\theta \mu\, d\theta), $$

and $\partial e/\partial x$ is block lower triangular, so the backward pass is one substitution from the last position
to the first. It consists of differentiable operations, so gradients of any order exist.
"""

__all__ = ["Solution", "from_noise", "next_embedding", "solve"]

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Function

from support_tokens.errors import NumericalError
from support_tokens.law.newton import (
    CouplingFactors,
    all_roots_on_a_line,
    attend,
    coupling_factors,
    is_monotone,
    newton,
    tolerance_of,
    working_dtype,
)
from support_tokens.margins.linalg import each_matrix


@dataclass(frozen=True, eq=False)
class Solution:
    r"""Embeddings computed from noise, with details of the search.

    Args:
        x: $x$ with $x - \mu(x) = \epsilon$, `(B, T, D)`.
        iterations: Newton steps of every position, `(B, T)`.
        residual: Largest error of the reduced equation, in units of the queries, `(B, T)`.
        preimages: Number of embeddings with this noise and this past, `(B, T)`; 0 where it was not counted, which is
            where the reduced equation has more than one unknown.
    """

    x: Tensor
    iterations: Tensor
    residual: Tensor
    preimages: Tensor

    @property
    def sentence(self) -> str:
        """One sentence: the accuracy, and which of several solutions was taken."""
        several, unknown = int((self.preimages > 1).sum()), int((self.preimages == 0).sum())
        parts = [
            f"solved to a residual of {float(self.residual.max()):.1e} in at most {int(self.iterations.max())} steps"
        ]
        if several:
            parts.append(
                f"{several} of {self.preimages.numel()} positions have several embeddings for their noise "
                f"(up to {int(self.preimages.max())}); the one nearest to the start of the search was taken"
            )
        if unknown:
            parts.append(
                f"at {unknown} positions other solutions were not searched for; the one that Newton reaches from its "
                "start was taken"
            )
        return "; ".join(parts) + "."


def next_embedding(
    noise: Tensor, values: Tensor, queries: Tensor, keys: Tensor, maps: CouplingFactors, tolerance: float | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""The embedding that follows a past, for N independent rows: $x = \epsilon + \mu(x)$.

    The search starts at the noise plus the mean at the centroid of the past shifted by the noise. With one unknown
    (R or D is 1) and a past that may fold, all solutions are found and the one nearest to that start is taken.

    Args:
        noise: $\epsilon$, `(N, D)`.
        values: Past embeddings, `(N, t, D)`.
        queries: Their images, `(N, t, k)`.
        keys: Their images under `maps`, `(N, t, k)`.
        maps: See `coupling_factors`.
        tolerance: Relative residual; None: `tolerance_of` the dtype.

    Returns:
        x `(N, D)`, Newton steps, residuals and numbers of preimages (0: not counted), each `(N,)`.

    Raises:
        NumericalError: A row has no solution within the tolerance after all starts.
    """
    rows, past = values.shape[:2]
    count = torch.ones(rows, dtype=torch.long, device=noise.device)
    if past == 0:
        return noise, torch.zeros_like(count), torch.zeros_like(noise[:, 0]), count
    given, wide = noise.dtype, working_dtype(noise)
    noise, values, queries, keys = (tensor.to(wide) for tensor in (noise, values, queries, keys))
    maps = CouplingFactors(*(matrix.to(wide) for matrix in maps))
    tolerance = tolerance_of(wide) if tolerance is None else tolerance
    target = noise @ maps.to_query.T
    first = target + queries.mean(-2)
    start = target + (attend(first, keys).unsqueeze(-2) @ queries).squeeze(-2)
    roots = newton(start, queries, keys, target, tolerance)
    z, residual, converged = roots.z, roots.residual, roots.converged
    if queries.shape[-1] == 1:
        folding = (~is_monotone(queries, keys)).nonzero().squeeze(-1)
        if len(folding):
            u, c, goal = queries[folding], keys[folding], target[folding]
            roots_on_line, number = all_roots_on_a_line(u[..., 0], c[..., 0], goal[:, 0])
            nearest = (roots_on_line - start[folding]).abs().nan_to_num(math.inf).argmin(-1, keepdim=True)
            # Newton removes the rounding errors of bisection and gives the residual.
            again = newton(roots_on_line.gather(-1, nearest), u, c, goal, tolerance)
            z[folding], residual[folding], converged[folding] = again.z, again.residual, again.converged
            count[folding] = number
    elif past > 1:
        count.zero_()
    for row in (~converged).nonzero().squeeze(-1).tolist():
        again = _from_other_starts(start[row], queries[row], keys[row], target[row], tolerance)
        if again is not None:
            z[row], residual[row], converged[row] = *again, True
    if not converged.all():
        raise NumericalError(
            f"the relative residual must be at most {tolerance:g} at every position, received "
            f"{float(residual.max()):.1e} after {past} past positions; weaken the coupling (see certificate), or "
            "compute in float64."
        )
    x = noise + (attend(z, keys).unsqueeze(-2) @ values).squeeze(-2)
    return x.to(given), roots.iterations, residual, count


def _from_other_starts(
    start: Tensor, queries: Tensor, keys: Tensor, target: Tensor, tolerance: float
) -> tuple[Tensor, Tensor] | None:
    """The solution nearest to `start` out of Newton from past tokens, the nearest eight first, or None."""
    near = (target + queries - start).norm(dim=-1).argsort()
    for tokens in (near[:8], near[8:]):
        # A token and a point halfway to the centroid: near a fold the first start may lead nowhere.
        mixed = torch.cat((queries[tokens], 0.5 * (queries[tokens] + queries.mean(0))))
        repeat = lambda tensor, m=mixed: tensor.expand(len(m), *tensor.shape)  # noqa: E731
        roots = newton(target + mixed, repeat(queries), repeat(keys), repeat(target), tolerance)
        if roots.converged.any():
            best = torch.where(roots.converged, (roots.z - start).norm(dim=-1), math.inf).argmin()
            return roots.z[best], roots.residual[best]
    return None


@torch.no_grad()
def solve(
    noise: Tensor, w_q: Tensor, w_k: Tensor, *, past: Tensor | None = None, tolerance: float | None = None
) -> Solution:
    r"""Embeddings $x$ with $x - \mu(x) = \epsilon$, one position after the other.

    Keys of the past are cached: a Newton step at position t costs $O(t)$.

    Args:
        noise: $\epsilon$, `(B, T, D)`.
        w_q: `(R, D)`.
        w_k: `(R, D)`.
        past: Embeddings `(B, P, D)` that come before; None: none.
        tolerance: Relative residual; None: 1e-10. The search runs in float64 for any dtype of the noise.

    Raises:
        NumericalError: No solution was found at some position.

    Example:
        >>> solution = solve(torch.randn(2, 5, 3), torch.randn(2, 3), torch.randn(2, 3))
        >>> solution.x.shape, solution.preimages.shape
        (torch.Size([2, 5, 3]), torch.Size([2, 5]))
    """
    batch, length, width = noise.shape
    given = noise.dtype
    # Buffers in the dtype of the search: nothing is converted again at every position.
    noise, w_q, w_k = (tensor.to(working_dtype(noise)) for tensor in (noise, w_q, w_k))
    maps = coupling_factors(w_q, w_k)
    before = 0 if past is None else past.shape[1]
    x = noise.new_empty(batch, before + length, width)
    queries, keys = (noise.new_empty(batch, before + length, len(m)) for m in maps)
    if past is not None:
        x[:, :before], queries[:, :before], keys[:, :before] = past, past @ maps.to_query.T, past @ maps.to_key.T
    record = []
    for t in range(before, before + length):
        row, *info = next_embedding(noise[:, t - before], x[:, :t], queries[:, :t], keys[:, :t], maps, tolerance)
        x[:, t], queries[:, t], keys[:, t] = row, row @ maps.to_query.T, row @ maps.to_key.T
        record.append(info)
    iterations, residual, count = (torch.stack(parts, dim=1) for parts in zip(*record, strict=True))
    return Solution(x[:, before:].to(given, copy=True), iterations, residual, count)


def from_noise(noise: Tensor, w_q: Tensor, w_k: Tensor) -> Tensor:
    r"""Embeddings from noise `(B, T, D)`, differentiable in noise and weights by the implicit function theorem.

    Example:
        >>> noise = torch.randn(2, 5, 3, requires_grad=True)
        >>> from_noise(noise, torch.randn(2, 3), torch.randn(2, 3)).sum().backward()
        >>> noise.grad.shape
        torch.Size([2, 5, 3])
    """
    return _FromNoise.apply(noise, w_q, w_k)  # type: ignore[return-value]


class _FromNoise(Function):
    @staticmethod
    def forward(ctx, noise: Tensor, w_q: Tensor, w_k: Tensor) -> Tensor:
        x = solve(noise, w_q, w_k).x
        ctx.save_for_backward(x, w_q, w_k)
        return x

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, w_q, w_k = ctx.saved_tensors
        (grad,) = gradients
        scale = 1 / math.sqrt(w_q.shape[0])
        length = x.shape[1]
        query, key = x @ w_q.T, x @ w_k.T
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(-1)
        logits = (scale * query @ key.mT).masked_fill(~causal, torch.finfo(x.dtype).min)
        weights = torch.softmax(logits, dim=-1).masked_fill(~causal, 0.0)
        mean = weights @ x
        # Row t of the derivative of mu by the logits, contracted with lambda_t: alpha_ts (x_s - mu_t)^T lambda_t.
        maps = coupling_factors(w_q, w_k)
        identity = torch.eye(len(maps.to_query), dtype=x.dtype, device=x.device)
        pushed = query @ w_k * scale  # A x_t: derivative of the logit of t by a key
        multipliers: list[Tensor] = []
        for t in reversed(range(length)):
            right = grad[:, t]
            if t > 1:
                weight = weights[:, t, :t]
                centred = x[:, :t] - mean[:, t : t + 1]
                cross = (centred * weight.unsqueeze(-1)).mT @ (x[:, :t] @ maps.to_key.T)  # Cov(x, c), (B, D, k)
                # J = I - Cov(x, c) U; J^{-T} by Woodbury, in k unknowns.
                inner = identity - (maps.to_query @ cross).mT
                inside = each_matrix(torch.linalg.solve, inner, (right.unsqueeze(-2) @ cross).mT)
                right = right + inside.squeeze(-1) @ maps.to_query
            multipliers.append(right)
            if t > 0:
                along = ((x[:, :t] - mean[:, t : t + 1]) @ right.unsqueeze(-1)).squeeze(-1)
                to_past = weights[:, t, :t].unsqueeze(-1) * (
                    right.unsqueeze(1) + along.unsqueeze(-1) * pushed[:, t : t + 1]
                )
                grad = torch.cat((grad[:, :t] + to_past, grad[:, t:]), dim=1)
        multiplier = torch.stack(multipliers[::-1], dim=1)
        slope = scale * weights * ((multiplier @ x.mT) - (multiplier * mean).sum(-1, keepdim=True))
        grad_q = torch.einsum("btr,btd->rd", slope @ key, x)
        grad_k = torch.einsum("bsr,bsd->rd", slope.mT @ query, x)
        return multiplier, grad_q, grad_k
