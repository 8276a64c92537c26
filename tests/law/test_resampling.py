"""Resampling schemes: unbiased, and equal to what their definitions leave no choice about."""

import pytest
import torch
from torch.testing import assert_close

from support_tokens.errors import ArgumentError
from support_tokens.law.filtering import effective_sample_size, resample


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("scheme", ["systematic", "residual"])
def test_resampling_is_unbiased(scheme):
    log_weights = torch.tensor([0.5, 0.26, 0.17, 0.07, 0.0], dtype=torch.float64).log()
    counts = torch.zeros(5)
    draws, source = 4000, generator()
    for _ in range(draws):
        chosen = resample(log_weights, scheme, source)
        assert chosen.shape == (5,)
        copies = torch.bincount(chosen, minlength=5)
        # Both schemes keep at least the whole part of N W; systematic is never more than one above it.
        assert (copies >= (5 * log_weights.exp() + 1e-9).floor()).all()
        if scheme == "systematic":
            assert (copies <= (5 * log_weights.exp()).floor() + 1).all()
        counts += copies
    assert counts[4] == 0
    assert_close(counts.double() / draws, 5 * log_weights.exp(), rtol=0, atol=0.05)


def test_resampling_of_one_surviving_particle_copies_it():
    log_weights = torch.full((50,), -torch.inf)
    log_weights[7] = -1000.0
    for scheme in ("systematic", "residual"):
        assert (resample(log_weights, scheme, generator()) == 7).all()


def test_resampling_refuses_what_it_cannot_do():
    with pytest.raises(ArgumentError, match=r"systematic, residual.*'best'"):
        resample(torch.zeros(3), "best")
    with pytest.raises(ArgumentError, match="log_weights"):
        resample(torch.full((3,), -torch.inf))


def test_effective_sample_size_counts_equal_weights():
    assert effective_sample_size(torch.zeros(8)).item() == pytest.approx(8)
    weights = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    assert effective_sample_size(weights.log() - 500).item() == pytest.approx(1 / float(weights.square().sum()))
