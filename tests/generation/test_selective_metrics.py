"""Figures of uncertainty against error, held against their definitions written out, and against scikit-learn."""

from itertools import permutations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from support_tokens.errors import ArgumentError
from support_tokens.generation.selective import (
    ScoreTable,
    auroc,
    expected_calibration_error,
    prediction_rejection_ratio,
    risk_coverage,
    risk_coverage_area,
)

FIGURES = [auroc, risk_coverage_area, prediction_rejection_ratio]


def tied(seed: int, size: int, distinct: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of few distinct values, and errors that grow with them; both classes are there."""
    draws = np.random.default_rng(seed)
    score = draws.integers(distinct, size=size) / distinct
    error = (draws.random(size) < score).astype(float)
    error[:2] = 0, 1
    return score, error


def naive_auroc(score: np.ndarray, error: np.ndarray) -> float:
    pairs = [(u > v) + 0.5 * (u == v) for u in score[error == 1] for v in score[error == 0]]
    return sum(pairs) / len(pairs)


def naive_area(score: np.ndarray, error: np.ndarray) -> float:
    """Mean over every order that sorts the scores of the mean risk among the first k."""
    orders = [order for order in permutations(range(len(score))) if (np.diff(score[list(order)]) >= 0).all()]
    risks = [np.mean([error[list(order[:k])].mean() for k in range(1, len(score) + 1)]) for order in orders]
    return float(np.mean(risks))


@pytest.mark.parametrize("distinct", [2, 5, 10**6])
def test_auroc_counts_pairs_and_agrees_with_scikit_learn(distinct: int) -> None:
    score, error = tied(0, 200, distinct)
    assert auroc(score, error) == pytest.approx(naive_auroc(score, error), abs=1e-12)
    assert auroc(score, error) == pytest.approx(roc_auc_score(error, score), abs=1e-12)


@pytest.mark.parametrize("distinct", [2, 3, 10**6])
@pytest.mark.parametrize("graded", [False, True])
def test_area_is_the_mean_over_orders_of_ties(distinct: int, graded: bool) -> None:
    score, error = tied(1, 7, distinct)
    if graded:
        error = np.random.default_rng(2).random(7)
    assert risk_coverage_area(score, error) == pytest.approx(naive_area(score, error), abs=1e-12)


@pytest.mark.parametrize("graded", [False, True])
def test_rejection_ratio_is_that_of_its_definition(graded: bool) -> None:
    """Quality of what is kept, summed over how much is kept, between that of a random order and of an oracle."""
    draws = np.random.default_rng(3)
    score = draws.random(300)
    error = draws.random(300) if graded else (draws.random(300) < score).astype(float)

    def area(uncertainty: np.ndarray) -> float:
        quality = (1 - error)[np.argsort(uncertainty)]
        return float(np.mean([quality[:k].mean() for k in range(1, len(quality) + 1)]))

    at_random = (1 - error).mean()
    expected = (area(score) - at_random) / (area(error) - at_random)
    assert prediction_rejection_ratio(score, error) == pytest.approx(expected, abs=1e-12)


def test_known_values() -> None:
    score, error = tied(4, 400, 10**6)
    assert prediction_rejection_ratio(error, error) == pytest.approx(1)
    assert auroc(error, error) == 1
    constant = np.zeros(400)
    assert auroc(constant, error) == 0.5
    assert prediction_rejection_ratio(constant, error) == pytest.approx(0, abs=1e-12)
    assert risk_coverage_area(constant, error) == pytest.approx(error.mean())
    assert auroc(-score, error) == pytest.approx(1 - auroc(score, error))


@pytest.mark.parametrize("figure", FIGURES)
def test_only_the_order_of_scores_counts(figure) -> None:
    score, error = tied(5, 300, 20)
    shuffled = np.random.default_rng(6).permutation(300)
    assert figure(np.exp(3 * score) - 7, error) == pytest.approx(figure(score, error), abs=1e-12)
    assert figure(score[shuffled], error[shuffled]) == pytest.approx(figure(score, error), abs=1e-12)


def test_curve_is_risk_and_coverage_at_each_threshold() -> None:
    score, error = tied(7, 60, 8)
    curve = risk_coverage(score, error)
    for threshold, coverage, risk in zip(curve.threshold, curve.coverage, curve.risk, strict=True):
        assert coverage == pytest.approx((score <= threshold).mean())
        assert risk == pytest.approx(error[score <= threshold].mean())
    assert curve.coverage[-1] == 1


def test_calibration_error_is_that_of_its_definition() -> None:
    draws = np.random.default_rng(8)
    p = draws.random(500)
    p[:3] = 0, 1, 1 / 3
    y = (draws.random(500) < p**2).astype(float)
    naive = 0.0
    for bin in range(10):
        inside = (p >= bin / 10) & ((p < (bin + 1) / 10) | (bin == 9))
        naive += inside.mean() * abs(p[inside].mean() - y[inside].mean())
    assert expected_calibration_error(p, y, bins=10) == pytest.approx(naive, abs=1e-12)
    assert expected_calibration_error(y, y) == 0
    assert expected_calibration_error(np.full(4, 0.75), [1, 1, 1, 0]) == 0


def test_table_weighs_sequences_as_repeating_them_does() -> None:
    score, error = (a.reshape(2, 12, 5) for a in tied(9, 120, 30))
    valid = np.random.default_rng(10).random(score.shape) < 0.8
    table, chances = ScoreTable.of(score, error, valid), ScoreTable.calibration(score, error, valid)
    times = np.random.default_rng(11).integers(0, 3, size=12)
    for seed in range(2):
        kept = np.repeat(valid[seed], times, axis=0)
        repeated = [np.repeat(a[seed], times, axis=0)[kept] for a in (score, error)]
        for name in ("auroc", "risk_coverage_area", "prediction_rejection_ratio"):
            expected = next(f for f in FIGURES if f.__name__ == name)(*repeated)
            assert getattr(table, name)(times.astype(float))[seed] == pytest.approx(expected, abs=1e-12)
        expected = expected_calibration_error(*repeated)
        assert chances.calibration_error(times.astype(float))[seed] == pytest.approx(expected, abs=1e-12)
    assert table.auroc(np.ones((4, 3, 12))).shape == (4, 3, 2)


def test_rounding_to_levels_hardly_changes_a_figure() -> None:
    draws = np.random.default_rng(12)
    score = draws.normal(size=(50, 100))
    error = (draws.random(score.shape) < 1 / (1 + np.exp(-score))).astype(float)
    table = ScoreTable.of(score, error)
    for figure in FIGURES:
        rounded = getattr(table, figure.__name__)(np.ones(50)).item()
        assert rounded == pytest.approx(figure(score, error), abs=1e-4)


@pytest.mark.parametrize(
    ("figure", "arguments", "text"),
    [
        (auroc, ([1.0, 2.0], [0, 0]), "must have a wrong and a right prediction, received 0 wrong ones of 2"),
        (auroc, ([1.0, 2.0], [0, 0.5]), "error must be 0 or 1"),
        (risk_coverage_area, ([1.0], [0, 1]), "must have one shape"),
        (risk_coverage_area, ([], []), "at least one entry"),
        (risk_coverage_area, ([np.nan, 1.0], [0, 1]), "1 entries that are not; remove positions"),
        (risk_coverage_area, ([0.0, 1.0], [0, 2]), "error must lie between 0 and 1"),
        (prediction_rejection_ratio, ([0.0, 1.0], [1, 1]), "must differ between predictions"),
        (expected_calibration_error, ([0.0, 1.5], [0, 1]), "pass probabilities, not scores"),
        (ScoreTable.of, ([[0.0, np.nan]], [[0, 1]]), "must have a finite score"),
        (ScoreTable.of, ([0.0, 1.0], [0, 1]), "pass one row per sequence"),
    ],
)
def test_errors_say_what_to_do(figure, arguments, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        figure(*arguments)


@pytest.mark.parametrize("outside", [-0.1, 1.5])
def test_a_table_of_probabilities_takes_no_scores(outside: float) -> None:
    with pytest.raises(ArgumentError, match="probability must be between 0 and 1"):
        ScoreTable.calibration([[0.5, outside]], [[1, 0]])
    ScoreTable.calibration([[0.5, outside]], [[1, 0]], [[True, False]])
    ScoreTable.calibration([[0.5, 1 + 1e-7]], [[1, 0]])  # what float32 makes of 1
