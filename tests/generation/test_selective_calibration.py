"""Thresholds: their definition written out, and their guarantees over many draws of calibration sequences."""

import numpy as np
import pytest
from scipy import stats

from support_tokens.errors import ArgumentError
from support_tokens.generation.selective import (
    ScoreTable,
    betting_p_value,
    conformal_risk_control,
    learn_then_test,
    measure_threshold,
)

RISK = 0.15


def population(seed: int, count: int = 2000, length: int = 12, steep: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Sequences whose tokens depend on each other: each has a difficulty of its own, in scores and in errors."""
    draws = np.random.default_rng(seed)
    hard = draws.random((count, 1))
    score = hard + 0.5 * draws.random((count, length))
    return score, (draws.random((count, length)) < (0.4 * score) ** steep).astype(float)


def naive_shares(score, error, valid, threshold: float, prefix: bool) -> tuple[float, float]:
    """Mean shares of answered, and of answered and wrong, token by token."""
    answered, wrong = [], []
    for row, errors, kept in zip(score, error, valid, strict=True):
        count, good, bad, open_ = kept.sum(), 0, 0.0, True
        for u, e, real in zip(row, errors, kept, strict=True):
            if not real:
                continue
            open_ = open_ and u <= threshold
            if open_ if prefix else u <= threshold:
                good, bad = good + 1, bad + e
        answered.append(good / count)
        wrong.append(bad / count)
    return float(np.mean(answered)), float(np.mean(wrong))


@pytest.mark.parametrize("prefix", [False, True])
def test_conformal_threshold_is_the_largest_that_satisfies_its_definition(prefix: bool) -> None:
    draws = np.random.default_rng(0)
    score = draws.integers(40, size=(30, 9)) / 40
    error = (draws.random(score.shape) < score).astype(float)
    valid = draws.random(score.shape) < 0.8
    valid[:, 0] = True
    scores = np.where(valid, score, np.nan)  # what stands at padding is not looked at
    found = conformal_risk_control(scores, error, risk=RISK, valid=valid, prefix=prefix, signal="entropy")
    satisfied = [
        u for u in np.unique(score) if (30 * naive_shares(score, error, valid, u, prefix)[1] + 1) / 31 <= RISK + 1e-12
    ]
    assert found.value == max(satisfied)
    assert found.stop_above == {"entropy": found.value}
    answered, wrong = naive_shares(score, error, valid, found.value, prefix)
    outcome = measure_threshold(found, scores, error, valid)
    assert (outcome.coverage, outcome.error_share) == pytest.approx((answered, wrong))
    assert outcome.risk == pytest.approx(wrong / answered)
    assert outcome == found.measured


@pytest.mark.parametrize("prefix", [False, True])
def test_expected_error_share_is_kept_and_not_by_much(prefix: bool) -> None:
    """Over draws of n sequences, the mean of the true loss is at most the risk, and at least risk - 2 / (n + 1)."""
    score, error = population(1)
    draws = np.random.default_rng(2)
    losses = []
    for _ in range(400):
        rows = draws.integers(len(score), size=30)
        threshold = conformal_risk_control(score[rows], error[rows], risk=RISK, prefix=prefix)
        losses.append(measure_threshold(threshold, score, error).error_share)
    tolerance = 4 * np.std(losses) / np.sqrt(len(losses))
    assert RISK - 2 / 31 - tolerance <= np.mean(losses) <= RISK + tolerance


def test_tokens_of_few_sequences_are_no_many_draws() -> None:
    """Each sequence counts once, however long: the correction is 1 / (n + 1) and never 1 / (n T + 1)."""
    assert conformal_risk_control(np.zeros((5, 1000)), np.zeros((5, 1000)), risk=0.16).abstains
    assert not conformal_risk_control(np.zeros((6, 1000)), np.zeros((6, 1000)), risk=0.16).abstains


@pytest.mark.parametrize(("steep", "prefix"), [(1.0, False), (1.0, True), (-0.3, False)])
def test_selective_risk_is_kept_with_the_stated_confidence(steep: float, prefix: bool) -> None:
    """Also for a signal that ranks the wrong way round, where risk falls as more is answered."""
    score, error = population(3, steep=steep)
    error = error if steep > 0 else (np.random.default_rng(4).random(score.shape) < 0.3 / (1 + 3 * score)).astype(float)
    draws = np.random.default_rng(5)
    broken = answered = 0
    for _ in range(200):
        rows = draws.integers(len(score), size=120)
        threshold = learn_then_test(score[rows], error[rows], risk=0.25, confidence=0.8, prefix=prefix)
        outcome = measure_threshold(threshold, score, error)
        broken += outcome.risk is not None and outcome.risk > 0.25
        answered += not threshold.abstains
    assert broken <= stats.binom.ppf(0.9999, 200, 0.2)
    assert answered > 100


def test_p_value_is_the_wealth_of_the_definition() -> None:
    x = np.random.default_rng(6).beta(2, 8, size=(40, 3))
    for column, found in zip(x.T, betting_p_value(x, 0.4, level=0.1), strict=True):
        wealth, best, seen = 1.0, 1.0, []
        spread = 0.25
        for t, value in enumerate(column, start=1):
            bet = min(np.sqrt(2 * np.log(1 / 0.1) / (40 * spread)), 0.9 / 0.6)
            wealth *= 1 + bet * (0.4 - value)
            best = max(best, wealth)
            seen.append(value)
            centres = [(0.5 + sum(seen[: i + 1])) / (i + 2) for i in range(t)]
            spread = (0.25 + sum((v - c) ** 2 for v, c in zip(seen, centres, strict=True))) / (t + 1)
        assert found == pytest.approx(1 / best)


@pytest.mark.parametrize("level", [0.05, 0.2])
def test_p_value_is_valid_at_the_boundary(level: float) -> None:
    draws = np.random.default_rng(7)
    for x in (
        (draws.random((60, 2000)) < 0.3).astype(float),
        draws.beta(3, 7, size=(60, 2000)),
        np.where(draws.random((60, 2000)) < 0.02, 1.0, 0.2857142857142857),
    ):
        small = int((betting_p_value(x, 0.3, level=level) <= level).sum())
        assert small <= stats.binom.ppf(0.9999, 2000, level)


def test_a_threshold_that_nothing_reaches_abstains_and_says_so() -> None:
    score, error = np.random.default_rng(8).random((50, 6)), np.ones((50, 6))
    for found in (conformal_risk_control(score, error, risk=0.01), learn_then_test(score, error, risk=0.2)):
        assert found.abstains
        assert found.stop_above == {"score": -np.inf}
        assert found.sentence.startswith("No threshold of score keeps the")
        assert "so everything is abstained from" in found.sentence
        outcome = measure_threshold(found, score, error)
        assert (outcome.coverage, outcome.error_share, outcome.risk) == (0, 0, None)


def test_one_decision_a_sequence() -> None:
    draws = np.random.default_rng(9)
    score = draws.random(600)
    error = draws.random(600) < score
    found = learn_then_test(score, error, risk=0.3, signal="Perplexity")
    assert found.value is not None
    assert 0.35 < found.value < 0.62
    assert "Answering while Perplexity is at most" in found.sentence
    assert "selective risk at or below 0.3 with confidence 0.95, calibrated on 600 sequences" in found.sentence


@pytest.mark.parametrize("control", [conformal_risk_control, learn_then_test])
def test_order_of_sequences_and_padding(control) -> None:
    score, error = population(10, count=60)
    padded = [np.concatenate((a, np.full((60, 3), np.nan)), axis=1) for a in (score, error)]
    valid = ~np.isnan(padded[0])
    assert control(*padded, risk=0.3, valid=valid) == control(score, error, risk=0.3)
    left = [np.concatenate((np.full((60, 3), np.nan), a), axis=1) for a in (score, error)]
    assert control(*left, risk=0.3, valid=~np.isnan(left[0])).value == control(score, error, risk=0.3).value


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"score": np.zeros((2, 3)), "error": np.zeros((3, 2))}, "must have one shape, .* received"),
        ({"score": np.full((2, 2), np.nan), "error": np.zeros((2, 2))}, "received 4 entries that are not; mark them"),
        ({"score": np.zeros((2, 2)), "error": np.full((2, 2), 2)}, "error must lie between 0 and 1"),
        (
            {"score": np.zeros((2, 2)), "error": np.zeros((2, 2)), "valid": [[1, 1], [0, 0]]},
            "received none in sequence 1",
        ),
        ({"score": np.zeros((2, 2)), "error": np.zeros((2, 2)), "risk": 1.0}, "risk must be between 0 and 1"),
    ],
)
@pytest.mark.parametrize("control", [conformal_risk_control, learn_then_test])
def test_errors_say_what_to_do(control, arguments: dict, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        control(**{"risk": 0.1, **arguments})


def test_one_sequence_is_too_few_to_test() -> None:
    with pytest.raises(ArgumentError, match="must have at least 2 sequences, received 1"):
        learn_then_test([[0.1]], [[0]], risk=0.1)
    assert ScoreTable.of([[0.1, 0.2]], [[0, 1]]).sequences == 1
