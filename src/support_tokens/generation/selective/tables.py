r"""Tables of scores of many sequences, for fast metrics under a bootstrap over sequences."""

__all__ = ["ScoreTable"]

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from support_tokens.errors import ArgumentError
from support_tokens.generation.selective.levels import Floats, area_of, auroc_of, rejection_ratio_of
from support_tokens.report.records import CALIBRATION_BINS


@dataclass(frozen=True, eq=False)
class ScoreTable:
    r"""Counts and errors of each sequence at each level of a score; each metric is a `Statistic` of `Bootstrap`.

    A metric is computed over all predictions of the resampled sequences together. Scores are rounded to at most
    `levels` quantiles, which changes AUROC by at most 1e-5 at 256 levels.

    Args:
        count: Predictions of seed s in sequence n at level l, `(S, N, L)`.
        wrong: Wrong ones among them, `(S, N, L)`.

    Example:
        >>> from support_tokens.robustness import Bootstrap
        >>> draws = np.random.default_rng(0)
        >>> score = draws.random((1, 40, 8))
        >>> table = ScoreTable.of(score, draws.random((1, 40, 8)) < score)
        >>> estimate = Bootstrap(resamples=200).interval(table.auroc, seeds=table.seeds, sequences=table.sequences)
        >>> 0.5 < estimate.low < estimate.value < estimate.high < 1
        True
    """

    count: Floats
    wrong: Floats

    @classmethod
    def of(
        cls, score: ArrayLike, error: ArrayLike, valid: ArrayLike | None = None, *, levels: int = 256
    ) -> "ScoreTable":
        """The table of scores and errors (0 or 1) `(S, N, T)`, or `(N, T)` for one seed.

        Raises:
            ArgumentError: Shapes differ, a valid number is out of range, or there are fewer than two levels.
        """
        scores, errors, kept = _checked(score, error, valid)
        if levels < 2:
            raise ArgumentError(f"levels must be at least 2, received {levels}; 256 is the default.")
        place = np.zeros(scores.shape, np.intp)
        for seed, (row, mask) in enumerate(zip(scores, kept, strict=True)):
            edges = np.unique(np.quantile(row[mask], np.linspace(0, 1, levels), method="lower"))
            place[seed] = np.searchsorted(edges, row, side="right").clip(1, len(edges)) - 1
        return cls(_sums(place, kept, levels), _sums(place, kept * errors, levels))

    @classmethod
    def calibration(cls, probability: ArrayLike, event: ArrayLike, valid: ArrayLike | None = None) -> "ScoreTable":
        """The table behind the ECE of a probability: `count` is one row of counts and `wrong` the sums of
        $p - y$ in `CALIBRATION_BINS` bins; arguments as in `of`.

        Raises:
            ArgumentError: As `of`, or a probability does not lie between 0 and 1.
        """
        p, y, kept = _checked(probability, event, valid)
        if p.min() < -1e-6 or p.max() > 1 + 1e-6:  # exponentials of float32 pass 1 by their rounding
            raise ArgumentError(
                f"probability must be between 0 and 1, received {p.min():g} to {p.max():g}; pass probabilities, not "
                "scores."
            )
        place = (p.clip(0, 1) * CALIBRATION_BINS).astype(np.intp).clip(0, CALIBRATION_BINS - 1)
        return cls(_sums(place, kept, CALIBRATION_BINS), _sums(place, kept * (p - y), CALIBRATION_BINS))

    @property
    def seeds(self) -> int:
        """Number of seeds, S."""
        return self.count.shape[0]

    @property
    def sequences(self) -> int:
        """Number of sequences, N."""
        return self.count.shape[1]

    def auroc(self, weights: Floats) -> Floats:
        """AUROC of each seed `(..., S)` under weights of the sequences `(..., N)`."""
        return auroc_of(*self._at(weights))

    def risk_coverage_area(self, weights: Floats) -> Floats:
        """Area under the risk-coverage curve of each seed."""
        return area_of(*self._at(weights))

    def prediction_rejection_ratio(self, weights: Floats) -> Floats:
        """Prediction rejection ratio of each seed."""
        count, wrong = self._at(weights)
        errors = wrong.sum(-1)
        best = np.stack((count.sum(-1) - errors, errors), axis=-1)
        return rejection_ratio_of(count, wrong, area_of(best, np.stack((np.zeros_like(errors), errors), axis=-1)))

    def calibration_error(self, weights: Floats) -> Floats:
        """ECE of each seed, for a table from `calibration`."""
        count, gaps = self._at(weights)
        return np.abs(gaps).sum(-1) / count.sum(-1)

    def _at(self, weights: Floats) -> tuple[Floats, Floats]:
        """Counts and errors `(..., S, L)` of weighted sequences."""
        seeds, sequences, levels = self.count.shape
        shape = (*weights.shape[:-1], seeds, levels)
        by_sequence = (table.transpose(1, 0, 2).reshape(sequences, -1) for table in (self.count, self.wrong))
        count, wrong = ((weights @ table).reshape(shape) for table in by_sequence)
        return count, wrong


def _sums(place: NDArray[np.intp], values: NDArray, levels: int) -> Floats:
    """Sums of `values` `(S, N, T)` by level, `(S, N, L)`."""
    seeds, sequences, _ = place.shape
    row = np.arange(seeds * sequences).reshape(seeds, sequences, 1) * levels
    flat = np.bincount((row + place).ravel(), values.ravel().astype(np.float64), seeds * sequences * levels)
    return flat.astype(np.float64).reshape(seeds, sequences, levels)


def _checked(score: ArrayLike, error: ArrayLike, valid: ArrayLike | None) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    scores, errors = np.asarray(score, dtype=np.float64), np.asarray(error, dtype=np.float64)
    kept = np.ones(scores.shape, bool) if valid is None else np.asarray(valid).astype(bool)
    if scores.ndim not in (2, 3) or errors.shape != scores.shape or kept.shape != scores.shape:
        raise ArgumentError(
            "score, error and valid must have one shape, (S, N, T) or (N, T), received "
            f"{scores.shape}, {errors.shape} and {kept.shape}; pass one row per sequence."
        )
    if scores.ndim == 2:
        scores, errors, kept = scores[None], errors[None], kept[None]
    if not kept.any((-1, -2)).all() or not np.isfinite(scores[kept]).all() or not np.isin(errors[kept], (0, 1)).all():
        raise ArgumentError(
            "valid predictions must have a finite score and an error of 0 or 1, and each seed one of them, received "
            "others; mark them in valid."
        )
    return np.where(kept, scores, 0.0), np.where(kept, errors, 0.0), kept
