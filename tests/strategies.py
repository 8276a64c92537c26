"""What hypothesis draws: whole attention problems, small enough for the oracle and on both sides of the boundary."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from naive import oracle, textbook_blocks

__all__ = ["CONFIGURATIONS", "Problem", "every_configuration", "law", "paddings", "problem", "problems"]

CONFIGURATIONS = {
    f"{shape}-{'strict' if strict else 'inclusive'}": {"strict": strict, "heads": heads, "values": values}
    for shape, heads, values in [("identity", 1, False), ("one-head", 1, True), ("two-heads", 2, True)]
    for strict in (True, False)
}
every_configuration = pytest.mark.parametrize("configuration", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())

# Derandomised: the same examples on every machine, so that a red run is a change of the code and can be repeated.
law = settings(max_examples=12, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Problem:
    """Embeddings `x` (B, T, D), the weights of one attention, and the options that say which map is meant."""

    x: Tensor
    weights: tuple[Tensor, ...]  # (w_q, w_k) for identity values, else (w_q, w_k, w_v, w_o)
    strict: bool = True
    scale: float | None = None
    view: str = "noise"

    @property
    def options(self) -> dict:
        return {"strict": self.strict, "scale": self.scale, "view": self.view}

    def to(self, dtype: torch.dtype) -> "Problem":
        return replace(self, x=self.x.to(dtype), weights=tuple(w.to(dtype) for w in self.weights))

    def oracle(self, padding: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Sign, log|det| and sigma_min (B, T) by autograd, row after row."""
        masks = [None] * len(self.x) if padding is None else padding
        rows = [oracle(x, *self.weights, padding=p, **self.options) for x, p in zip(self.x, masks, strict=True)]
        sign, log_abs_det, sigma_min = (torch.stack(parts) for parts in zip(*rows, strict=True))
        return sign, log_abs_det, sigma_min

    def textbook(self) -> Tensor:
        """J_t (B, T, D, D) by the textbook formula, differentiable."""
        return torch.stack([textbook_blocks(row, *self.weights, **self.options) for row in self.x])

    def clearance(self, padding: Tensor | None = None) -> float:
        """The smallest sigma_min of all positions: the distance of the whole problem to the boundary."""
        return float(self.oracle(padding)[2].min())


def problem(
    *, batch=2, length=5, width=4, rank=3, heads=1, value_width=None, strict=True, view="noise", strength=1.0, seed=0
) -> Problem:
    """One problem out of a seed; `value_width` None means identity values, `strength` scales the coupling."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = [strength * normal(heads, rank, width) / width**0.5, normal(heads, rank, width) / width**0.5]
    if value_width is not None:
        weights += [
            normal(heads, value_width, width) / width**0.5,
            normal(heads, width, value_width) / value_width**0.5,
        ]
    return Problem(normal(batch, length, width), tuple(weights), strict=strict, view=view)


@st.composite
def problems(draw, *, strict: bool, heads: int, values: bool, batch: int | None = None) -> Problem:
    """One configuration in any size (rank below, at and above the width), view, scale and strength of the coupling."""
    drawn = problem(
        batch=draw(st.integers(1, 3)) if batch is None else batch,
        length=draw(st.sampled_from([4, 6, 5, 3, 2, 1])),
        width=draw(st.sampled_from([3, 4, 2, 1])),
        rank=draw(st.sampled_from([2, 3, 1, 5])),
        heads=heads,
        value_width=draw(st.sampled_from([2, 3, 1, 4])) if values else None,
        strict=strict,
        view=draw(st.sampled_from(["noise", "block"])),
        strength=draw(st.sampled_from([1.0, 3.0, 0.3])),
        seed=draw(st.integers(0, 10_000)),
    )
    return replace(drawn, scale=draw(st.sampled_from([None, 0.25, 0.7])))


@st.composite
def paddings(draw, batch: int, length: int) -> Tensor:
    """A key padding mask (B, T), True where padding: left, right, both, inside, all or none of a row."""
    rows = st.lists(st.booleans(), min_size=length, max_size=length)
    return torch.tensor(draw(st.lists(rows, min_size=batch, max_size=batch)))
