r"""One position of the inverse map, from latent noise to the embedding.

Given the past, $x = \epsilon + \sum_s \alpha_s(x)\, x_s$. The weights depend on x through $z = U x$ alone, so the
equation to solve is

$$ F(z) = z - \sum_s \alpha_s(z)\, u_s - U\epsilon = 0, \qquad u_s = U x_s, \quad \alpha_s \propto \exp(c_s^T z), $$

in $k = \min(R, D)$ unknowns; $F' = I - \mathrm{Cov}_\alpha(u, c)$ has the determinant of $J_t$. A solution always
exists, by Brouwer's theorem: the sum lies in the convex hull of the past, a compact set. It is unique where $F'$ cannot
vanish; by degree theory the signs of $\det F'$ over all solutions add up to one.
"""

__all__ = [
    "CouplingFactors",
    "Roots",
    "all_roots_on_a_line",
    "attend",
    "coupling_factors",
    "is_monotone",
    "newton",
    "tolerance_of",
    "working_dtype",
]

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from support_tokens.errors import NumericalError
from support_tokens.margins.linalg import each_matrix

MAX_ITERATIONS = 40
HALVINGS = 12
GRID_PER_LOGIT = 16
"""Points of the search grid per unit change of a logit; a fold is wider than one unit."""
LARGEST_GRID = 16384
_CHUNK = 2**22  # entries of the largest matrix of a search


class CouplingFactors(NamedTuple):
    r"""Reduced maps, $u = U x$ and $c = C x$ with $x_t^T A^T x_s = c_s^T u_t$; each `(k, D)`, k = min(R, D)."""

    to_query: Tensor
    to_key: Tensor


def coupling_factors(w_q: Tensor, w_k: Tensor) -> CouplingFactors:
    r"""U and C of the smaller of the two forms: $(W_Q, W_K/\sqrt R)$ where $R \le D$, else $(I, A^T)$.

    Example:
        >>> coupling_factors(torch.randn(5, 3), torch.randn(5, 3)).to_key.shape
        torch.Size([3, 3])
    """
    rank, width = w_q.shape
    if rank <= width:
        return CouplingFactors(w_q, w_k / math.sqrt(rank))
    return CouplingFactors(torch.eye(width, dtype=w_q.dtype, device=w_q.device), w_q.T @ w_k / math.sqrt(rank))


def tolerance_of(dtype: torch.dtype) -> float:
    """Largest residual of a solution, relative to one plus the size of the queries: 1e-10, in float32 1e-5."""
    return 1e-10 if dtype == torch.float64 else 1e-5


def working_dtype(tensor: Tensor) -> torch.dtype:
    """Dtype of the search: float64, or float32 on devices without float64."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def attend(z: Tensor, keys: Tensor) -> Tensor:
    """Weights `(N, t)` of queries z `(N, k)` on keys `(N, t, k)`."""
    return torch.softmax((keys @ z.unsqueeze(-1)).squeeze(-1), dim=-1)


def _residual(z: Tensor, queries: Tensor, keys: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    weights = attend(z, keys)
    return z - (weights.unsqueeze(-2) @ queries).squeeze(-2) - target, weights


def _derivative(weights: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    row = weights.unsqueeze(-2)
    centred = queries - row @ queries
    covariance = (centred * weights.unsqueeze(-1)).mT @ (keys - row @ keys)
    return torch.eye(queries.shape[-1], dtype=queries.dtype, device=queries.device) - covariance


@dataclass(frozen=True)
class Roots:
    r"""Solutions of $F(z) = 0$.

    Args:
        z: `(N, k)`.
        iterations: Newton steps, `(N,)`.
        residual: $\max |F|$, `(N,)`.
        converged: Whether it is within the tolerance, `(N,)`.
    """

    z: Tensor
    iterations: Tensor
    residual: Tensor
    converged: Tensor


def newton(start: Tensor, queries: Tensor, keys: Tensor, target: Tensor, tolerance: float) -> Roots:
    r"""Damped Newton with the exact derivative, for N independent rows at once; $O(t k^2 + k^3)$ per step and row.

    A step is halved until $|F|$ decreases. Where no step does, near a fold, the row takes the fixed-point step
    $z \leftarrow U\epsilon + \sum_s \alpha_s u_s$, which never leaves the hull of the past.

    Args:
        start: Initial $z$, `(N, k)`.
        queries: $u_s$, `(N, t, k)`.
        keys: $c_s$, `(N, t, k)`.
        target: $U \epsilon$, `(N, k)`.
        tolerance: Relative, see `tolerance_of`.

    Example:
        >>> u = torch.tensor([[[-1.0], [1.0]]])
        >>> newton(torch.zeros(1, 1), u, 0.5 * u, torch.ones(1, 1), 1e-5).z
        tensor([[1.6879]])
    """
    z = start.clone()
    value, weights = _residual(z, queries, keys, target)
    iterations = torch.zeros(z.shape[0], dtype=torch.long, device=z.device)
    limit = tolerance * (1 + target.abs().amax(-1) + queries.abs().amax((-1, -2)))
    for _ in range(MAX_ITERATIONS):
        todo = (value.abs().amax(-1) > limit).nonzero().squeeze(-1)
        if not len(todo):
            break
        some = len(todo) < len(z)
        pick = (lambda tensor: tensor[todo]) if some else (lambda tensor: tensor)  # noqa: B023
        u, c, goal, here, error = pick(queries), pick(keys), pick(target), pick(z), pick(value)
        step, info = each_matrix(torch.linalg.solve_ex, _derivative(pick(weights), u, c), error.unsqueeze(-1))
        step = step.squeeze(-1)
        usable = (info == 0) & torch.isfinite(step).all(-1)
        step = torch.where(usable.unsqueeze(-1), step, error)
        size = error.norm(dim=-1)
        factor = torch.ones_like(size)
        for halving in range(HALVINGS):
            moved, weight = _residual(here - factor.unsqueeze(-1) * step, u, c, goal)
            better = moved.norm(dim=-1) <= (1 - 1e-4 * factor) * size
            if better.all():
                break
            factor = torch.where(better, factor, 0.5 * factor if halving < HALVINGS - 1 else 0 * factor)
        stuck = (factor == 0).unsqueeze(-1)
        after = torch.where(stuck, here - error, here - factor.unsqueeze(-1) * step)
        error, weight = _residual(after, u, c, goal)
        if some:
            z[todo], value[todo], weights[todo] = after, error, weight
        else:
            z, value, weights = after, error, weight
        iterations[todo] += 1
    residual = value.abs().amax(-1)
    return Roots(z, iterations, residual, residual <= limit)


def is_monotone(queries: Tensor, keys: Tensor) -> Tensor:
    r"""Whether $F$ of one unknown cannot fold: $\mathrm{range}(u)\,\mathrm{range}(c)/4 < 1$, by Popoviciu, `(N,)`."""
    spread = lambda tensor: tensor.amax(-2) - tensor.amin(-2)  # noqa: E731
    return (spread(queries) * spread(keys)).squeeze(-1) / 4 < 1


def all_roots_on_a_line(queries: Tensor, keys: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    r"""Every solution of M rows with one unknown, by sign changes on a grid and bisection to working precision.

    All solutions lie in $U\epsilon + [\min u, \max u]$. The grid has 16 points per unit change of a logit, at most
    16384. Two solutions that are closer than a step of the grid, which happens only at a fold, are missed.

    Args:
        queries: $u_s$, `(M, t)`.
        keys: $c_s$, `(M, t)`.
        target: $U\epsilon$, `(M,)`.

    Returns:
        Solutions in ascending order `(M, K)`, padded with NaN, and their number `(M,)`; it is odd.

    Example:
        >>> u = torch.tensor([[-2.0, 2.0]])
        >>> all_roots_on_a_line(u, u, torch.tensor([0.1]))[0]
        tensor([[-1.8980, -0.0334,  2.0991]])
    """
    low, high = queries.amin(-1), queries.amax(-1)
    logits = float(((high - low) * (keys.amax(-1) - keys.amin(-1))).max())
    count = int(min(LARGEST_GRID, 64 + GRID_PER_LOGIT * logits))
    chunk = max(1, _CHUNK // (count * queries.shape[-1]))
    if len(target) > chunk:
        parts = [
            all_roots_on_a_line(*part) for part in zip(*(t.split(chunk) for t in (queries, keys, target)), strict=True)
        ]
        most = max(roots.shape[1] for roots, _ in parts)
        pad = torch.nn.functional.pad
        return (
            torch.cat([pad(roots, (0, most - roots.shape[1]), value=math.nan) for roots, _ in parts]),
            torch.cat([number for _, number in parts]),
        )
    unit = torch.linspace(0, 1, count, dtype=queries.dtype, device=queries.device)
    # F <= 0 at the left end and F >= 0 at the right one; the margin makes both strict where all weight is on one token.
    margin = 1e-3 * (high - low) + 16 * torch.finfo(queries.dtype).eps * (1 + queries.abs().amax(-1))
    left_end = target + low - margin
    grid = left_end[:, None] + unit * (high - low + 2 * margin)[:, None]

    def residual(z: Tensor, row: Tensor) -> Tensor:
        weights = torch.softmax(z.unsqueeze(-1) * keys[row].unsqueeze(-2), dim=-1)
        return z - (weights * queries[row].unsqueeze(-2)).sum(-1) - target[row].unsqueeze(-1)

    positive = residual(grid, torch.arange(len(target), device=grid.device)) >= 0
    row, column = (positive[:, 1:] != positive[:, :-1]).nonzero(as_tuple=True)
    left, right, rising = grid[row, column], grid[row, column + 1], positive[row, column + 1]
    for _ in range(60):
        middle = 0.5 * (left + right)
        go_left = (residual(middle.unsqueeze(-1), row).squeeze(-1) >= 0) == rising
        left, right = torch.where(go_left, left, middle), torch.where(go_left, middle, right)
    number = torch.bincount(row, minlength=len(target))
    if not (number % 2 == 1).all():
        raise NumericalError(
            "the number of solutions of an equation of one unknown must be odd, received "
            f"{sorted(set(number.tolist()))}; pass finite embeddings."
        )
    first = torch.cumsum(number, 0) - number
    roots = torch.full((len(target), int(number.max())), math.nan, dtype=grid.dtype, device=grid.device)
    roots[row, torch.arange(len(row), device=row.device) - first[row]] = 0.5 * (left + right)
    return roots, number
