r"""Counts of predictions and errors at each level of an uncertainty score.

Rank metrics of a score against errors are functions of the count $n_l$ and the errors $e_l$ at level $l$, from the
least to the most uncertain. Equal scores are one level; metrics are means over all orders of ties. Counts may be
weighted, as a bootstrap needs.
"""

__all__ = ["area_of", "auroc_of", "levels_of", "rejection_ratio_of"]

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import digamma

from support_tokens.errors import ArgumentError

Floats = NDArray[np.float64]


def levels_of(score: ArrayLike, error: ArrayLike) -> tuple[Floats, Floats]:
    r"""Counts $n_l$ and errors $e_l$ of the distinct scores, ascending.

    Args:
        score: Uncertainty of each prediction, any shape; higher is more uncertain.
        error: Error of each, same shape, between 0 (right) and 1 (wrong).

    Returns:
        Two arrays `(L,)`.

    Raises:
        ArgumentError: Shapes differ, there is no entry, a number is not finite, or an error is outside [0, 1].

    Example:
        >>> [row.tolist() for row in levels_of([0.5, 0.1, 0.5], [1, 0, 0])]
        [[1.0, 2.0], [0.0, 1.0]]
    """
    scores, errors = np.asarray(score, dtype=np.float64).ravel(), np.asarray(error, dtype=np.float64).ravel()
    if np.shape(score) != np.shape(error) or not scores.size:
        raise ArgumentError(
            "score and error must have one shape and at least one entry, received shapes "
            f"{np.shape(score)} and {np.shape(error)}; pass the error of each prediction beside its score."
        )
    if not np.isfinite(scores).all():
        raise ArgumentError(
            f"score must be finite, received {int((~np.isfinite(scores)).sum())} entries that are not; remove "
            "positions without a score from score and error."
        )
    if not (np.isfinite(errors).all() and errors.min() >= 0 and errors.max() <= 1):
        raise ArgumentError(
            f"error must lie between 0 and 1, received {errors.min()} to {errors.max()}; pass 1 where a prediction is "
            "wrong and 0 where it is right."
        )
    _, place = np.unique(scores, return_inverse=True)
    count, wrong = np.bincount(place), np.bincount(place, weights=errors)
    return count.astype(np.float64), wrong.astype(np.float64)


def auroc_of(count: Floats, wrong: Floats) -> Floats:
    r"""Fraction of pairs (right, wrong) in which the wrong one has the higher level, ties counted half, `(...)`.

    Args:
        count: $n_l$, `(..., L)`.
        wrong: $e_l$, `(..., L)`.

    Returns:
        The fraction; NaN if all are right or all are wrong.

    Example:
        >>> auroc_of(np.array([1.0, 2.0]), np.array([0.0, 1.0])).item()
        0.75
    """
    right = count - wrong
    below = right.cumsum(-1) - right / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        return (wrong * below).sum(-1) / (wrong.sum(-1) * right.sum(-1))


def area_of(count: Floats, wrong: Floats) -> Floats:
    r"""Mean over $k = 1 \dots N$ of the risk among the k least uncertain, `(...)`.

    Within a level of n predictions and e errors, after N' predictions with E' errors, the mean over orders is
    $\sum_{k=1}^{n} \frac{E' + k e/n}{N' + k} = e + (E' - N' e/n)\,[\psi(N' + n + 1) - \psi(N' + 1)]$.

    Example:
        >>> area_of(np.array([1.0, 1.0]), np.array([0.0, 1.0])).item()
        0.25
    """
    before, wrong_before = count.cumsum(-1) - count, wrong.cumsum(-1) - wrong
    rate = np.divide(wrong, count, out=np.zeros_like(wrong), where=count > 0)
    harmonic = digamma(before + count + 1) - digamma(before + 1)
    return (wrong + (wrong_before - before * rate) * harmonic).sum(-1) / count.sum(-1)


def rejection_ratio_of(count: Floats, wrong: Floats, oracle: Floats) -> Floats:
    r"""Prediction rejection ratio $(\bar r - A) / (\bar r - A^*)$, `(...)`, from the area A of a score and $A^*$ of an
    oracle; NaN where the oracle gains nothing.

    Example:
        >>> count, wrong = np.array([1.0, 1.0]), np.array([0.0, 1.0])
        >>> rejection_ratio_of(count, wrong, area_of(count, wrong)).item()
        1.0
    """
    at_random = wrong.sum(-1) / count.sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (at_random - area_of(count, wrong)) / (at_random - oracle)
