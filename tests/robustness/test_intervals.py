"""Bootstrap intervals: deterministic, paired, and of the coverage they promise."""

import math

import numpy as np
import pytest
from scipy import stats

from support_tokens.errors import ArgumentError
from support_tokens.report.records import Estimate
from support_tokens.robustness import Bootstrap


def mean_of(table):
    return lambda weights: weights @ table.T / weights.sum(-1, keepdims=True)


def test_one_seed_equals_scipy_on_the_plain_sample():
    sample = np.random.default_rng(1).exponential(size=40)
    ours = Bootstrap(resamples=2000, seed=5).interval(mean_of(sample[None]), seeds=1, sequences=40)
    theirs = stats.bootstrap((sample,), np.mean, n_resamples=2000, rng=np.random.default_rng(5), batch=512)
    assert ours.value == pytest.approx(sample.mean())
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs.confidence_interval), rel=1e-12)


def test_several_seeds_cover_the_spread_between_seeds():
    rng = np.random.default_rng(2)
    table = rng.normal(size=(6, 1)) + 0.01 * rng.normal(size=(6, 50))
    both = Bootstrap().interval(mean_of(table), seeds=6, sequences=50)
    one = Bootstrap().interval(mean_of(table[:1]), seeds=1, sequences=50)
    assert both.value == pytest.approx(table.mean())
    assert both.high - both.low > 20 * (one.high - one.low)
    # The standard error of a mean over seeds, as resampling (without Bessel's correction) sees it.
    spread = table.mean(1).std() / math.sqrt(6)
    assert both.high - both.low == pytest.approx(2 * 1.96 * spread, rel=0.25)


def test_the_same_seed_gives_the_same_interval():
    table = np.random.default_rng(3).normal(size=(2, 30))
    first, again = (Bootstrap(seed=1).interval(mean_of(table), seeds=2, sequences=30) for _ in range(2))
    assert first == again != Bootstrap(seed=2).interval(mean_of(table), seeds=2, sequences=30)


def test_pairing_removes_what_sequences_share():
    rng = np.random.default_rng(4)
    shared, small = rng.normal(size=(1, 60)), 0.01 * rng.normal(size=(1, 60))
    one, other = mean_of(shared), mean_of(shared + 0.1 + small)
    paired = Bootstrap().interval(lambda weights: other(weights) - one(weights), seeds=1, sequences=60)
    assert paired.excludes(0) and paired.high - paired.low < 0.01


def test_coverage_of_a_skewed_statistic():
    rng = np.random.default_rng(6)
    hits = sum(
        not Bootstrap(resamples=500)
        .interval(mean_of(rng.exponential(size=(1, 60))), seeds=1, sequences=60)
        .excludes(1.0)
        for _ in range(150)
    )
    assert stats.binomtest(hits, 150, 0.93).pvalue > 1e-3


def test_what_does_not_vary_has_no_width():
    assert Bootstrap().interval(lambda w: 0 * w[..., :1], seeds=1, sequences=9) == Estimate(0.0, 0.0, 0.0)


def test_one_sequence_and_one_seed_have_no_interval():
    estimate = Bootstrap().interval(mean_of(np.array([[2.0]])), seeds=1, sequences=1)
    assert estimate == Estimate(2.0) and not estimate.excludes(0)


def test_one_sequence_and_several_seeds_have_an_interval_over_seeds():
    table = np.random.default_rng(7).normal(size=(5, 1))
    estimate = Bootstrap().interval(mean_of(table), seeds=5, sequences=1)
    assert estimate.low < estimate.value < estimate.high


@pytest.mark.parametrize("arguments", [{"confidence": 1.0}, {"confidence": 95}, {"resamples": 10}])
def test_bad_settings_are_refused(arguments):
    with pytest.raises(ArgumentError, match=str(next(iter(arguments.values())))):
        Bootstrap(**arguments)
