r"""Paired bootstrap intervals over evaluated sequences and, where there are several, over training seeds."""

__all__ = ["Bootstrap", "Statistic"]

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from support_tokens.errors import ArgumentError
from support_tokens.report.records import Estimate

Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Maps weights of the sequences `(..., N)` to the figure of each seed `(..., S)`."""

_RESAMPLES_AT_ONCE = 512  # bounds the memory of one bootstrap to 512 x N numbers, whatever the number of resamples


@dataclass(frozen=True)
class Bootstrap:
    r"""Bias-corrected and accelerated (BCa) bootstrap of a mean over seeds of a figure over sequences.

    With tables of $S$ seeds $\times$ $N$ sequences, a resample draws $N$ sequences and $S$ seeds with replacement,
    independently: the two factors are crossed, since every seed reads the same sequences. The statistic receives the
    multiplicities of the sequences as weights, so all arms and perturbations are computed on the same resample, and
    differences and ratios are paired. With one seed only sequences are drawn, and the interval does not cover the
    choice of the seed.

    Args:
        confidence: Coverage of the interval, between 0 and 1.
        resamples: Number of resamples.
        seed: Seed of the resampling; the same seed gives the same interval.

    Raises:
        ArgumentError: The confidence is outside of (0, 1), or there are fewer than 100 resamples.

    References:
        Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, sections 14.3 and 15.4; `scipy.stats.bootstrap`.

    Example:
        >>> import numpy as np
        >>> nats = np.random.default_rng(0).normal(2.0, 0.1, size=(1, 64))
        >>> mean = lambda weights: weights @ nats.T / weights.sum(-1, keepdims=True)
        >>> estimate = Bootstrap().interval(mean, seeds=1, sequences=64)
        >>> estimate.low < estimate.value < estimate.high
        True
    """

    confidence: float = 0.95
    resamples: int = 5000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise ArgumentError(f"confidence must be between 0 and 1, received {self.confidence!r}; pass 0.95, say.")
        if self.resamples < 100:
            raise ArgumentError(f"resamples must be at least 100, received {self.resamples!r}; pass 5000, the default.")

    def interval(self, statistic: Statistic, *, seeds: int, sequences: int) -> Estimate:
        r"""Mean of `statistic` over seeds, with its interval.

        Args:
            statistic: Maps weights `(..., N)` to the figure of each seed `(..., S)`.
            seeds: $S$, at least 1.
            sequences: $N$, at least 1.

        Returns:
            The estimate. It has no interval if there is one seed and one sequence, or if BCa is undefined because
            (nearly) all resamples fall on one side. A figure that does not vary, such as an arm minus itself, has an
            interval of width zero.
        """
        value = float(statistic(np.ones(sequences)).mean(-1))
        samples = [np.arange(n) for n in (sequences, seeds) if n > 1]
        if not samples:
            return Estimate(value)

        def resampled(*drawn: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
            # scipy passes the drawn indices as floats, in the order of `samples`, along the last axis.
            del axis
            by_factor = list(drawn)
            weights = _multiplicities(by_factor.pop(0), sequences) if sequences > 1 else np.ones(1)
            figures = statistic(weights)
            if not by_factor:
                return figures.mean(-1)
            return (figures * _multiplicities(by_factor.pop(0), seeds)).sum(-1) / seeds

        with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
            # Degenerate resamples are recognised below, from the distribution itself.
            warnings.simplefilter("ignore", stats.DegenerateDataWarning)
            warnings.simplefilter("ignore", RuntimeWarning)
            result = stats.bootstrap(
                samples,
                resampled,
                vectorized=True,
                axis=-1,
                n_resamples=self.resamples,
                batch=_RESAMPLES_AT_ONCE,
                confidence_level=self.confidence,
                method="BCa",
                rng=np.random.default_rng(self.seed),
            )
        if np.ptp(result.bootstrap_distribution) <= 1e-12 * max(1.0, abs(value)):
            return Estimate(value, value, value)
        low, high = (float(end) for end in result.confidence_interval)
        return Estimate(value, low, high) if np.isfinite(low) and np.isfinite(high) else Estimate(value)


def _multiplicities(drawn: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Counts of each of `size` items along the last axis: indices `(..., n)` to counts `(..., size)`."""
    rows = drawn.reshape(-1, drawn.shape[-1]).astype(np.intp)
    flat = (rows + size * np.arange(len(rows))[:, None]).ravel()
    return np.bincount(flat, minlength=size * len(rows)).reshape(*drawn.shape[:-1], size).astype(np.float64)
