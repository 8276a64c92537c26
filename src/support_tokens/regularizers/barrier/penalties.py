r"""Penalties of margins, schedules of their weight $\lambda$, and the controller that holds a target margin."""

__all__ = [
    "PENALTIES",
    "MarginController",
    "WarmupSchedule",
    "checked_step_weight",
    "margin_penalty",
    "sample_positions",
    "token_weights",
]

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from support_tokens.errors import ArgumentError

PENALTIES = ("log", "hinge", "map")


def margin_penalty(penalty: str, target_margin: float = 0.0) -> Callable[[Tensor], Tensor]:
    r"""The part of a penalty that depends on the log margin $m = \log|\det J_t|$ alone, elementwise.

    $$ \text{log: } -m \qquad \text{hinge: } \max(0,\ m^* - m) \qquad
       \text{map: } -m, \text{ beside } \frac{|x_t - \mu_t|^2}{2 \sigma^2} $$

    `log` alone is unbounded below; `hinge` acts on support tokens only, those below the target, as a soft-margin SVM
    does; `map` is the negative log posterior up to a constant, which the squared error bounds.

    Args:
        penalty: `log`, `hinge` or `map`.
        target_margin: $m^*$ in nats.

    Raises:
        ArgumentError: Unknown penalty.

    Example:
        >>> margin_penalty("hinge", 1.0)(torch.tensor([0.25, 2.0]))
        tensor([0.7500, 0.0000])
    """
    if penalty not in PENALTIES:
        raise ArgumentError(f"penalty must be one of {', '.join(PENALTIES)}, received {penalty!r}; choose one of them.")
    if penalty == "hinge":
        return lambda log_abs_det: (target_margin - log_abs_det).clamp_min(0.0)
    return torch.neg


def token_weights(valid: Tensor, sequence_weight: Tensor) -> Tensor:
    r"""$w_b / n_b$ at the $n_b$ valid positions of sequence b and 0 elsewhere, `(B, n)`.

    A sum of penalties with these weights is a mean over the valid positions of each sequence, weighted by sequence;
    positions drawn uniformly give an unbiased estimate of it.

    Args:
        valid: `(B, n)`.
        sequence_weight: $w_b$, `(B,)`.

    Example:
        >>> token_weights(torch.tensor([[True, True, False]]), torch.ones(1))
        tensor([[0.5000, 0.5000, 0.0000]])
    """
    return valid * (sequence_weight / valid.sum(-1).clamp_min(1)).unsqueeze(-1)


def sample_positions(valid: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """`count` valid positions of each sequence, uniform without replacement, in order, `(B, min(count, T))`.

    A sequence with fewer valid positions gets all of them and, to fill the row, positions that are not valid.

    Example:
        >>> sample_positions(torch.tensor([[True, True, False]]), 2)
        tensor([[0, 1]])
    """
    scores = torch.rand(valid.shape, generator=generator, device=generator.device if generator is not None else None)
    scores = scores.to(valid.device, non_blocking=True).masked_fill(~valid, -1.0)
    return scores.topk(min(count, valid.shape[-1]), dim=-1).indices.sort(dim=-1).values


@dataclass(frozen=True)
class WarmupSchedule:
    r"""$\lambda$ that rises linearly over `warmup` steps and then follows a cosine from `peak` to `final` at `total`
    steps.

    Raises:
        ArgumentError: A number is negative or not finite.

    Example:
        >>> schedule = WarmupSchedule(peak=0.1, warmup=10, total=100)
        >>> schedule(0), schedule(10), round(schedule(100), 3)
        (0.0, 0.1, 0.1)
    """

    peak: float
    warmup: int = 0
    total: int | None = None
    final: float | None = None

    def __post_init__(self) -> None:
        for name in ("peak", "warmup", "total", "final"):
            value = getattr(self, name)
            if not ((_is_finite(value) and value >= 0) or (value is None and name in ("total", "final"))):
                raise ArgumentError(
                    f"{name} of a WarmupSchedule must be a finite number of at least 0, received {value!r}; pass "
                    f"peak=0.02, warmup=100, say."
                )

    def __call__(self, step: int) -> float:
        """The weight at a training step."""
        if step < self.warmup:
            return self.peak * step / self.warmup
        if self.total is None or self.final is None:
            return self.peak
        progress = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        return self.final + (self.peak - self.final) * 0.5 * (1 + math.cos(math.pi * progress))


class MarginController:
    r"""$\lambda$ that holds a mean log margin: dual ascent on $\mathbb{E}\log|\det J_t| \ge m^*$.

    $$ \lambda \leftarrow \mathrm{clip}\big(\lambda \exp(\eta\,(m^* - \overline{\log|\det J|})),\ \lambda_{\min},\
    \lambda_{\max}\big) $$

    Args:
        target: $m^*$, nats.
        initial: First $\lambda$.
        rate: $\eta$, per step.
        bounds: $\lambda_{\min} > 0$ and $\lambda_{\max}$.

    Raises:
        ArgumentError: A number is not finite, or out of its range.

    Example:
        >>> controller = MarginController(target=1.0, initial=0.01, rate=0.1)
        >>> controller.update(torch.tensor(0.0))
        >>> bool(controller(0) > 0.01)
        True
    """

    def __init__(
        self, target: float, initial: float = 0.01, rate: float = 0.01, bounds: tuple[float, float] = (1e-5, 1.0)
    ) -> None:
        low, high = bounds
        for name, value, least in (("target", target, -math.inf), ("initial", initial, 0), ("rate", rate, 0)):
            if not (_is_finite(value) and value >= least):
                required = "a finite number" if name == "target" else "a finite number of at least 0"
                raise ArgumentError(
                    f"{name} of a MarginController must be {required}, received {value!r}; pass target=1.0, "
                    f"initial=0.01, rate=0.01, say."
                )
        if not (_is_finite(low) and _is_finite(high) and 0 < low <= high):
            raise ArgumentError(
                f"bounds of a MarginController must be two finite numbers, 0 < lowest <= highest, received {bounds!r}; "
                f"pass (1e-5, 1.0), say."
            )
        self.target, self.rate, self.bounds = target, rate, bounds
        # A tensor, so that the update needs no host synchronisation.
        self._weight = torch.tensor(float(initial))

    def __call__(self, step: int) -> Tensor:
        """The present weight; the step plays no part."""
        return self._weight

    def load(self, weight: Tensor) -> None:
        """Go on from a weight that `controller(step)` gave."""
        self._weight = weight.detach().clone()

    def update(self, mean_log_margin: Tensor) -> None:
        """One step of dual ascent from the mean log margin of a training step; none where that is not finite."""
        excess = (self.target - mean_log_margin.detach()) * self.rate
        weight = self._weight.to(excess.device)
        # NaN would stay for good: a weight that was NaN once is NaN times anything.
        moved = (weight * excess.exp()).clamp(*self.bounds)
        self._weight = torch.where(mean_log_margin.detach().isfinite() & moved.isfinite(), moved, weight)


Weight = float | Callable[[int], "float | Tensor"]
"""A constant, a schedule of the step, or a `MarginController`."""


def checked_step_weight(value: object, step: int) -> Tensor:
    r"""What a schedule gave as $\lambda$ at a step, if it can be one; a tensor on a device is not waited for.

    Raises:
        ArgumentError: It is no finite number of at least 0.

    Example:
        >>> checked_step_weight(0.5, 3)
        tensor(0.5000)
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        if value.device.type != "cpu" or (_is_finite(value.item()) and value.item() >= 0):
            return value.reshape(())
    elif _is_finite(value) and value >= 0:  # type: ignore[operator]
        return torch.tensor(float(value))  # type: ignore[arg-type]
    raise ArgumentError(
        f"the schedule of the weight must give a finite number of at least 0 at every step, received {value!r} at step "
        f"{step}; clamp it to max(0.0, value), say."
    )


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
