r"""The number of embeddings that have the same noise, and the integral of the density given a past.

$$ \int N(e(x))\, |\det J(x)|\, dx = E_\epsilon\big[\#\{x : e(x) = \epsilon\}\big] \ge 1 , $$

with equality where the map is one-to-one. The excess over one is mass that is counted more than once.
"""

__all__ = ["Mass", "Preimages", "preimages", "total_mass"]

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from support_tokens.errors import ArgumentError
from support_tokens.law.newton import CouplingFactors, all_roots_on_a_line, attend, newton, tolerance_of, working_dtype
from support_tokens.margins.linalg import each_matrix

ROUNDS = 3
"""Rounds of the search with several unknowns, each with four times as many starts as the last."""


@dataclass(frozen=True, eq=False)
class Preimages:
    r"""Embeddings that have the same noise, given one past.

    Args:
        x: `(M, K, D)`, padded with NaN; in ascending order of the query where it has one component.
        sign: Sign of $\det J$ at each, `(M, K)`, 0 in the padding. The signs of all preimages add up to 1.
        number: `(M,)`.
        complete: Whether all were searched for (the reduced equation has one unknown); otherwise there may be more, and
            there are where the signs do not add up to 1.
    """

    x: Tensor
    sign: Tensor
    number: Tensor
    complete: bool


@dataclass(frozen=True)
class Mass:
    r"""Integral of $p(x_t \mid \text{past})$ as `log_prob` has it.

    Args:
        value: 1 for a density; more where the map folds.
        standard_error: Of the Monte Carlo estimate; 0 where it was computed by quadrature.
        exact: Whether all preimages count; otherwise `value` estimates a lower bound.
    """

    value: float
    standard_error: float
    exact: bool

    @property
    def excess(self) -> float:
        """Mass that is counted more than once."""
        return max(0.0, self.value - 1)

    @property
    def sentence(self) -> str:
        """One sentence: the integral and its excess over 1."""
        least = "" if self.exact else "at least "
        error = f" +- {self.standard_error:.2g}" if self.standard_error else ""
        return (
            f"given this past the formula integrates to {least}{self.value:.4g}{error}, "
            f"{self.excess:.3g} of it counted more than once"
        )


def _images(past: Tensor, maps: CouplingFactors) -> tuple[Tensor, Tensor]:
    if past.dim() != 2 or past.shape[-1] != maps.to_query.shape[-1] or len(past) == 0:
        raise ArgumentError(
            f"past must have shape (t, {maps.to_query.shape[-1]}) with t >= 1, received {tuple(past.shape)}; pass the "
            "embeddings of one sequence."
        )
    return past @ maps.to_query.T, past @ maps.to_key.T


@torch.no_grad()
def preimages(noise: Tensor, past: Tensor, maps: CouplingFactors, *, starts: int = 16) -> Preimages:
    r"""All embeddings found with noise `(M, D)` after the past `(t, D)`.

    With one unknown (R or D is 1) by a grid and bisection, which finds all; with more by Newton from every past token,
    the centroid and `starts` random points of the hull of the past, the same points at every call.

    Example:
        >>> past, one = torch.tensor([[-2.0], [2.0]]), torch.ones(1, 1)
        >>> preimages(torch.full((1, 1), 0.1), past, CouplingFactors(one, one)).x.squeeze()
        tensor([-1.8980, -0.0334,  2.0991])
    """
    given, wide = noise.dtype, working_dtype(noise)
    noise, past, maps = noise.to(wide), past.to(wide), CouplingFactors(*(matrix.to(wide) for matrix in maps))
    queries, keys = _images(past, maps)
    target = noise @ maps.to_query.T
    if queries.shape[-1] == 1:
        wide = (len(target), len(past))
        roots, number = all_roots_on_a_line(queries[:, 0].expand(wide), keys[:, 0].expand(wide), target[:, 0])
        z = roots.unsqueeze(-1)
    else:
        z, number = _search(target, queries, keys, starts)
    shape = z.shape[:2]
    filled = z.isnan().any(-1)
    flat = z.nan_to_num(0.0).flatten(0, 1)
    weights = attend(flat, keys.expand(len(flat), *keys.shape))
    sign = _sign(weights, queries, keys).reshape(shape).masked_fill(filled, 0.0)
    x = noise.unsqueeze(1) + (weights @ past).reshape(*shape, -1)
    x = x.masked_fill(filled.unsqueeze(-1), math.nan)
    return Preimages(x.to(given), sign.to(given), number, complete=queries.shape[-1] == 1)


def _sign(weights: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    r"""Sign of $\det F'$ where the weights are `(N, t)`."""
    centred = queries - (weights @ queries).unsqueeze(-2)
    identity = torch.eye(queries.shape[-1], dtype=queries.dtype, device=queries.device)
    return each_matrix(torch.linalg.slogdet, identity - (centred * weights.unsqueeze(-1)).mT @ keys)[0]


def _search(target: Tensor, queries: Tensor, keys: Tensor, starts: int) -> tuple[Tensor, Tensor]:
    """Solutions by Newton from many starts, and from more where the signs do not add up to one."""
    generator = torch.Generator().manual_seed(0)
    z = target.new_full((len(target), 0, target.shape[-1]), math.nan)
    todo = torch.arange(len(target), device=target.device)
    for attempt in range(ROUNDS):
        # Higher powers of exponentials are points nearer to the corners and edges of the hull.
        mixes = torch.empty(starts * 4**attempt, len(queries)).exponential_(generator=generator) ** (1 + attempt)
        mixes = (mixes / mixes.sum(-1, keepdim=True)).to(queries)
        begin = torch.cat((queries, queries.mean(0, keepdim=True), mixes @ queries))
        goal = target[todo].repeat_interleave(len(begin), 0)
        many = lambda tensor: tensor.expand(len(goal), *tensor.shape)  # noqa: B023, E731
        roots = newton(goal + begin.repeat(len(todo), 1), many(queries), many(keys), goal, tolerance_of(target.dtype))
        new = torch.where(roots.converged.unsqueeze(-1), roots.z, math.nan).reshape(len(todo), len(begin), -1)
        more = target.new_full((len(target), new.shape[1], new.shape[2]), math.nan)
        more[todo] = new
        z, number = _distinct(torch.cat((z, more), dim=1))
        there = ~z.isnan().any(-1)
        weights = attend(z.nan_to_num(0.0).flatten(0, 1), many(keys)[:1].expand(z[..., 0].numel(), *keys.shape))
        total = (_sign(weights, queries, keys).reshape(there.shape) * there).sum(-1)
        todo = (total.round() != 1).nonzero().squeeze(-1)
        if not len(todo):
            break
    return z, number


def _distinct(z: Tensor) -> tuple[Tensor, Tensor]:
    """Solutions that differ by more than the accuracy of the search, in order; NaN entries are dropped."""
    there = ~z.isnan().any(-1)
    plain = z.nan_to_num(0.0)
    near = torch.cdist(plain, plain) < 1e3 * tolerance_of(z.dtype) * (1 + plain.abs().amax())
    earlier = torch.ones_like(near).tril(-1) & there.unsqueeze(1)
    kept = there & ~(near & earlier).any(-1)
    number = kept.sum(-1)
    order = kept.int().argsort(dim=-1, descending=True, stable=True)[:, : int(number.max())]
    z = plain.gather(1, order.unsqueeze(-1).expand(-1, -1, z.shape[-1]))
    return z.masked_fill(~kept.gather(1, order).unsqueeze(-1), math.nan), number


@torch.no_grad()
def total_mass(
    past: Tensor,
    maps: CouplingFactors,
    noise_scale: float,
    *,
    samples: int = 256,
    generator: torch.Generator | None = None,
) -> Mass:
    r"""Integral of the density of the next embedding given the past `(t, D)`.

    With one unknown it is the total variation of $z \mapsto \Phi(F(z)/\sigma_z)$, which needs no samples; otherwise the
    mean number of preimages found over `samples` noises.

    Example:
        >>> past, one = torch.tensor([[-2.0], [2.0]]), torch.ones(1, 1)
        >>> (
        ...     total_mass(past, CouplingFactors(one, 0.2 * one), 1.0).value,
        ...     total_mass(past, CouplingFactors(one, one), 1.0).value > 1.3,
        ... )
        (1.0, True)
    """
    queries, keys = _images(past, maps)
    if queries.shape[-1] == 1:
        scale = noise_scale * float(maps.to_query.norm())
        return Mass(_total_variation(queries[:, 0], keys[:, 0], scale), 0.0, exact=True)
    noise = noise_scale * torch.randn(samples, past.shape[1], generator=generator, dtype=past.dtype, device=past.device)
    number = preimages(noise, past, maps).number.double()
    return Mass(float(number.mean()), float(number.std()) / math.sqrt(samples), exact=False)


def _total_variation(queries: Tensor, keys: Tensor, scale: float) -> float:
    queries, keys = queries.double(), keys.double()
    low, high = float(queries.min()), float(queries.max())
    logits = (high - low) * float(keys.max() - keys.min())
    if scale == 0 or logits / 4 < 1:
        return 1.0
    # Between the ends of the hull F may turn; outside of [low, high] + 10 sigma nothing of the noise is left.
    pieces = min(200_000, int(4096 + 256 * logits + 64 * (high - low) / scale))
    inner = torch.linspace(low - 10 * scale, high + 10 * scale, pieces, dtype=torch.float64, device=queries.device)
    values = torch.cat([z - torch.softmax(z.unsqueeze(-1) * keys, -1) @ queries for z in inner.split(4096)])
    height = torch.special.ndtr(values / scale)
    return float(height[0] + (height[1:] - height[:-1]).abs().sum() + (1 - height[-1]))
