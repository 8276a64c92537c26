r"""Metrics of an uncertainty score against errors: AUROC, risk-coverage, rejection ratio, calibration."""

__all__ = [
    "RiskCoverage",
    "auroc",
    "expected_calibration_error",
    "prediction_rejection_ratio",
    "risk_coverage",
    "risk_coverage_area",
]

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from support_tokens.errors import ArgumentError
from support_tokens.generation.selective.levels import Floats, area_of, auroc_of, levels_of, rejection_ratio_of
from support_tokens.report.records import CALIBRATION_BINS


def auroc(score: ArrayLike, error: ArrayLike) -> float:
    r"""Area under the ROC curve, $P(u > u') + \tfrac12 P(u = u')$ for u of a wrong and u' of a right prediction.

    Args:
        score: Uncertainty $u$ of each prediction, any shape; higher is more uncertain.
        error: 1 where the prediction is wrong, 0 where it is right, same shape.

    Returns:
        0.5 for an uninformative score, 1 if every error scores above every right prediction.

    Raises:
        ArgumentError: Shapes differ, a number is out of range, or all predictions are right or all are wrong.

    Example:
        >>> auroc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
        0.75
    """
    if not np.isin(error, (0, 1)).all():
        raise ArgumentError(
            "error must be 0 or 1 for AUROC, received other numbers; use prediction_rejection_ratio for graded errors."
        )
    count, wrong = levels_of(score, error)
    if wrong.sum() in (0, count.sum()):
        raise ArgumentError(
            f"error must have a wrong and a right prediction, received {int(wrong.sum())} wrong ones of "
            f"{int(count.sum())}; pass more predictions."
        )
    return float(auroc_of(count, wrong))


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """The risk-coverage curve: error among the answered predictions at each threshold.

    Args:
        threshold: Distinct scores, ascending, `(L,)`; predictions that score at most this are answered.
        coverage: Fraction of predictions that are answered, `(L,)`.
        risk: Mean error among them, `(L,)`.
    """

    threshold: Floats
    coverage: Floats
    risk: Floats


def risk_coverage(score: ArrayLike, error: ArrayLike) -> RiskCoverage:
    r"""Risk and coverage at every threshold, $c(\tau) = P(u \le \tau)$ and $r(\tau) = E[e \mid u \le \tau]$.

    Args:
        score: Uncertainty $u$, any shape; higher is more uncertain.
        error: Error $e$ between 0 and 1, same shape.

    Raises:
        ArgumentError: Shapes differ or a number is out of range.

    Example:
        >>> curve = risk_coverage([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
        >>> curve.coverage.tolist(), curve.risk[:2].tolist()
        ([0.25, 0.5, 0.75, 1.0], [0.0, 0.5])
    """
    count, wrong = levels_of(score, error)
    answered = count.cumsum()
    return RiskCoverage(np.unique(np.asarray(score, np.float64)), answered / answered[-1], wrong.cumsum() / answered)


def risk_coverage_area(score: ArrayLike, error: ArrayLike) -> float:
    r"""Area under the risk-coverage curve, $A = \tfrac1N \sum_{k=1}^N r_k$, with $r_k$ the mean error among the k least
    uncertain; lower is better. Ties: the mean over all orders of equal scores.

    Args:
        score: Uncertainty, any shape; higher is more uncertain.
        error: Error between 0 and 1, same shape.

    Raises:
        ArgumentError: Shapes differ or a number is out of range.

    References:
        Geifman, Uziel and El-Yaniv 2019 (arXiv:1805.08206).

    Example:
        >>> risk_coverage_area([0.1, 0.9], [0, 1]), risk_coverage_area([0.9, 0.1], [0, 1])
        (0.25, 0.75)
    """
    return float(area_of(*levels_of(score, error)))


def prediction_rejection_ratio(score: ArrayLike, error: ArrayLike) -> float:
    r"""Prediction rejection ratio, $\mathrm{PRR} = (\bar e - A) / (\bar e - A^*)$, with A the area under the
    risk-coverage curve, $A^*$ that of an oracle that ranks by the error itself, and $\bar e$ that of a random order.

    It is that of lm-polygraph with quality $1 - e$, except that ties are averaged over all orders rather than kept in
    the order of the data, and the random order is replaced by its expectation.

    Args:
        score: Uncertainty, any shape; higher is more uncertain.
        error: Error between 0 and 1, same shape.

    Returns:
        1 for an oracle, 0 for a random order, negative for worse.

    Raises:
        ArgumentError: Shapes differ, a number is out of range, or all errors are equal.

    References:
        Malinin and Gales 2021 (arXiv:2002.07650); Vashurin et al. 2025 (arXiv:2406.15627).

    Example:
        >>> round(prediction_rejection_ratio([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]), 4)
        0.5714
    """
    count, wrong = levels_of(score, error)
    if np.ptp(np.asarray(error, np.float64)) == 0:
        raise ArgumentError(
            "error must differ between predictions, received one value everywhere; pass more predictions."
        )
    return float(rejection_ratio_of(count, wrong, area_of(*levels_of(error, error))))


def expected_calibration_error(probability: ArrayLike, event: ArrayLike, *, bins: int = CALIBRATION_BINS) -> float:
    r"""ECE of a probability: $\sum_b \tfrac{n_b}{N} |\bar p_b - \bar y_b|$ over bins of equal width.

    Args:
        probability: $p$, between 0 and 1, any shape.
        event: $y$, 1 where the event happened, else 0, same shape.
        bins: Number of bins; the last one includes 1.

    Raises:
        ArgumentError: Shapes differ, a number is out of range, or there is no bin.

    References:
        Guo et al. 2017 (arXiv:1706.04599).

    Example:
        >>> round(expected_calibration_error([0.9, 0.9, 0.1], [1, 0, 0]), 6)
        0.3
    """
    levels_of(probability, event)
    p, y = (np.asarray(a, dtype=np.float64).ravel() for a in (probability, event))
    if p.min() < 0 or p.max() > 1 or bins < 1:
        raise ArgumentError(
            f"probability must be between 0 and 1 and bins at least 1, received {p.min()} to {p.max()} and "
            f"bins={bins}; pass probabilities, not scores."
        )
    place = np.minimum((p * bins).astype(np.intp), bins - 1)
    return float(np.abs(np.bincount(place, weights=p - y, minlength=bins)).sum() / p.size)
