"""Likelihood: data of a known law give its identifiable part back, within the standard errors that are claimed."""

import math

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.testing import assert_close

from support_tokens.errors import ArgumentError, NumericalError
from support_tokens.law import EmbeddingPrior, fit, keep_repulsive, standard_errors


def law_of(coupling: Tensor, noise_scale: float) -> EmbeddingPrior:
    width = len(coupling)
    prior = EmbeddingPrior(width, noise_scale=noise_scale).double()
    with torch.no_grad():
        prior.w_q.copy_(math.sqrt(width) * coupling)
        prior.w_k.copy_(torch.eye(width))
    return prior


TRUTH = torch.tensor([[-0.8, 0.5], [-0.3, -0.4]], dtype=torch.float64)


@pytest.mark.parametrize("seed", range(4))
def test_coupling_and_noise_come_back_within_their_standard_errors(seed):
    x = law_of(TRUTH, 0.6).sample(300, 10, torch.Generator().manual_seed(seed))
    prior = EmbeddingPrior(2, noise_scale=1.0, generator=torch.Generator().manual_seed(seed)).double()
    found = fit(prior, x)
    assert found.converged
    assert found.certificate.sign.min() > 0
    errors = standard_errors(prior, x)
    assert float(errors.coupling.max()) < 0.15, "the data must say something"
    difference = torch.cat(
        ((prior.coupling - TRUTH).flatten(), (prior.log_noise_scale - math.log(0.6)).reshape(1))
    ).detach()
    distance = difference @ torch.linalg.solve(errors.covariance, difference)
    # Wald: chi-square with D*D + 1 degrees of freedom; 0.9995 leaves one false alarm in 500 runs of the four.
    assert float(distance) < stats.chi2.ppf(0.9995, 5)
    assert float(distance) > stats.chi2.ppf(0.0005, 5), "errors too large to be true"


def test_standard_errors_are_those_of_the_plain_inverse_where_nothing_is_flat():
    """One dimension with W_K fixed by hand: the information of (a, log sigma) is an ordinary 2 x 2 matrix."""
    x = law_of(torch.tensor([[-0.7]], dtype=torch.float64), 0.8).sample(200, 6, torch.Generator().manual_seed(1))
    prior = EmbeddingPrior(1).double()
    fit(prior, x)
    errors = standard_errors(prior, x)

    def loss(vector: Tensor) -> Tensor:
        a, log_sigma = vector
        total = torch.zeros((), dtype=torch.float64)
        for t in range(x.shape[1]):
            past, own = x[:, :t, 0], x[:, t, 0]
            if t == 0:
                mean = variance = torch.zeros_like(own)
            else:
                weights = torch.softmax(a * own[:, None] * past, -1)
                mean = (weights * past).sum(-1)
                variance = (weights * (past - mean[:, None]) ** 2).sum(-1)
            density = torch.distributions.Normal(mean, log_sigma.exp()).log_prob(own) + (1 - a * variance).abs().log()
            total = total - density.sum()
        return total

    at = torch.stack((prior.coupling.detach()[0, 0], prior.log_noise_scale.detach()))
    expected = torch.linalg.inv(torch.autograd.functional.hessian(loss, at))
    assert_close(errors.covariance, expected, rtol=1e-4, atol=1e-8)


def test_gauge_of_queries_and_keys_changes_neither_density_nor_errors():
    x = law_of(TRUTH, 0.6).sample(100, 6, torch.Generator().manual_seed(0))
    prior = EmbeddingPrior(2, generator=torch.Generator().manual_seed(0)).double()
    fit(prior, x)
    turned = EmbeddingPrior(2).double()
    gauge = torch.tensor([[1.3, 0.4], [-0.2, 0.9]], dtype=torch.float64)
    with torch.no_grad():
        turned.w_q.copy_(gauge @ prior.w_q)
        turned.w_k.copy_(torch.linalg.inv(gauge).T @ prior.w_k)
        turned.log_noise_scale.copy_(prior.log_noise_scale)
    assert_close(turned.log_prob(x), prior.log_prob(x), rtol=1e-10, atol=1e-10)
    assert_close(standard_errors(turned, x).covariance, standard_errors(prior, x).covariance, rtol=1e-3, atol=1e-7)


def test_padding_does_not_enter_the_fit():
    x = law_of(TRUTH, 0.6).sample(60, 6, torch.Generator().manual_seed(0))
    padded = torch.cat((x, torch.full((60, 2, 2), 50.0, dtype=torch.float64)), dim=1)
    mask = (torch.arange(8) < 6).expand(60, 8)
    priors = [EmbeddingPrior(2, generator=torch.Generator().manual_seed(0)).double() for _ in range(2)]
    found = [fit(priors[0], x), fit(priors[1], padded, mask)]
    assert found[0].bits_per_dimension == pytest.approx(found[1].bits_per_dimension, rel=1e-9)
    assert_close(priors[0].coupling, priors[1].coupling, rtol=1e-6, atol=1e-8)
    assert found[0].bits_per_dimension == pytest.approx(-found[0].log_likelihood / math.log(2) / x.numel())


def test_restricted_law_is_a_density_whatever_training_does():
    """Attractive data pull the free coupling past the boundary; the restricted one stays where it is certified."""
    x = 2 * torch.randn(60, 8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).cumsum(1)
    prior = keep_repulsive(EmbeddingPrior(2, generator=torch.Generator().manual_seed(0)).double())
    before = prior.log_prob(x).sum().item()
    found = fit(prior, x, iterations=40)
    assert found.log_likelihood > before
    assert found.certificate.globally_injective
    symmetric = (prior.coupling + prior.coupling.T).detach()
    assert float(torch.linalg.eigvalsh(symmetric)[-1]) <= 1e-12


def test_restriction_cuts_off_the_attractive_part_and_no_more():
    prior = law_of(torch.tensor([[-1.0, 0.5], [-0.5, 0.7]], dtype=torch.float64), 0.6)
    keep_repulsive(prior)
    assert_close(prior.coupling.detach(), torch.tensor([[-1.0, 0.5], [-0.5, -1e-3]], dtype=torch.float64))
    with pytest.raises(ArgumentError, match="twice"):
        keep_repulsive(prior)
    with pytest.raises(ArgumentError, match="rank 1 and width 2"):
        keep_repulsive(EmbeddingPrior(2, rank=1))


def test_errors_away_from_a_maximum_and_infinite_data_are_refused():
    x = law_of(TRUTH, 0.6).sample(50, 6, torch.Generator().manual_seed(0))
    with pytest.raises(ArgumentError, match="call fit first"):
        standard_errors(law_of(TRUTH, 20.0), x)
    with pytest.raises(NumericalError, match="must be finite"):
        fit(law_of(TRUTH, 0.6), torch.full((1, 4, 2), 1e200, dtype=torch.float64))
