"""Where the formula is a density: certificates against quadrature by scipy, and honesty past the boundary."""

import math
import re
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate
from torch import Tensor
from torch.testing import assert_close

from naive import attention_mean, diagonal_blocks, trajectory_jacobian
from strategies import law as examples
from support_tokens.errors import ArgumentError, NumericalWarning
from support_tokens.law import EmbeddingLaw, EmbeddingPrior


def prior_with(coupling: Tensor, noise_scale=1.0) -> EmbeddingPrior:
    """A prior whose coupling is the given matrix: W_K the identity, W_Q = sqrt(D) A."""
    width = len(coupling)
    prior = EmbeddingPrior(width, noise_scale=noise_scale).double()
    with torch.no_grad():
        prior.w_q.copy_(math.sqrt(width) * coupling)
        prior.w_k.copy_(torch.eye(width))
    assert_close(prior.coupling.detach(), coupling.double())
    return prior


def normal(*shape: int, seed=0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scalar(a: float) -> Tensor:
    return torch.tensor([[a]], dtype=torch.float64)


def next_density(prior: EmbeddingPrior, past: Tensor, points: Tensor) -> Tensor:
    """p(x_t | past) (n,) at points (n, D), as log_prob has it."""
    whole = torch.cat((past.expand(len(points), *past.shape), points.unsqueeze(1)), dim=1)
    return (prior.log_prob(whole) - prior.log_prob(past[None])).exp().detach()


def integral_1d(prior: EmbeddingPrior, past: Tensor, breaks: list[float] | None = None) -> float:
    f = lambda x: float(next_density(prior, past, torch.tensor([[x]], dtype=torch.float64)))  # noqa: E731
    low, high = float(past.min()) - 12, float(past.max()) + 12
    return integrate.quad(f, low, high, points=breaks, limit=200, epsabs=1e-9)[0]


# Normalisation where it is guaranteed


@pytest.mark.parametrize("a", [-3.0, -0.5, 0.0, 0.5, 0.8])
def test_certified_density_of_one_dimension_integrates_to_one(a):
    prior, past = prior_with(scalar(a)), torch.tensor([[-1.1], [0.3], [1.1]], dtype=torch.float64)
    x = torch.cat((past, torch.zeros(1, 1, dtype=torch.float64)))[None]
    certificate = prior.certificate(x)
    assert certificate.injective, "the case must be certified"
    assert certificate.globally_injective == (a <= 0)
    assert integral_1d(prior, past) == pytest.approx(1, abs=1e-6)
    assert prior.total_mass(past).value == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    "coupling",
    [[[0.5, 0.3], [-0.4, 0.2]], [[-1.5, 2.0], [-2.0, -0.5]], [[0.0, 6.0], [-6.0, 0.0]]],
    ids=["contraction", "repulsive", "rotation"],
)
def test_certified_density_of_two_dimensions_integrates_to_one(coupling):
    prior = prior_with(torch.tensor(coupling, dtype=torch.float64), noise_scale=0.6)
    past = torch.tensor([[-0.9, 0.2], [0.8, -0.3], [0.1, 0.7]], dtype=torch.float64)
    assert prior.certificate(torch.cat((past, past[:1]))[None]).injective
    axis = torch.linspace(-6, 6, 601, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)
    total = sum(float(next_density(prior, past, part).sum()) for part in points.split(60_000))
    assert total * float(axis[1] - axis[0]) ** 2 == pytest.approx(1, abs=1e-6)


def test_repulsive_joint_law_of_three_positions_integrates_to_one_whatever_the_past():
    law = EmbeddingLaw(prior_with(scalar(-2.0), noise_scale=0.7), 3, validate_args=True)
    axis = torch.linspace(-6, 6, 101, dtype=torch.float64)
    cube = torch.cartesian_prod(axis, axis, axis).unsqueeze(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        law.log_prob(cube[:50])  # nothing to warn of
    total = sum(float(law.prior.log_prob(part).detach().exp().sum()) for part in cube.split(200_000))
    assert total * float(axis[1] - axis[0]) ** 3 == pytest.approx(1, abs=1e-6)


# Kolmogorov


@pytest.mark.parametrize("a", [-1.5, 0.3])
def test_last_position_integrates_out(a):
    """The marginal over x_3, by quadrature, is the law of two positions."""
    prior = prior_with(scalar(a), noise_scale=0.8)
    for first, second in [(-0.4, 0.6), (0.1, 0.2), (1.0, -0.9)]:
        past = torch.tensor([[first], [second]], dtype=torch.float64)
        f = lambda x, past=past: float(prior.log_prob(torch.cat((past, scalar(x)))[None]).exp().detach())  # noqa: E731
        marginal = integrate.quad(f, -12, 12, limit=200, epsabs=1e-12)[0]
        shorter = EmbeddingLaw(prior, 3, validate_args=False).marginal(2)
        assert marginal == pytest.approx(float(shorter.log_prob(past).detach().exp()), rel=1e-6)


def test_shorter_trajectory_is_the_beginning_of_the_longer_one():
    prior, noise = prior_with(0.4 * normal(3, 3)), normal(2, 6, 3)
    assert_close(prior.from_noise(noise)[:, :4], prior.from_noise(noise[:, :4]), rtol=0, atol=1e-9)
    with pytest.raises(ArgumentError, match="between 1 and 3, received 4"):
        EmbeddingLaw(prior, 3).marginal(4)


def test_variable_lengths_batch_together_exactly():
    prior, x = prior_with(0.4 * normal(3, 3)), normal(3, 6, 3)
    lengths = [6, 4, 1]
    mask = torch.arange(6)[None] < torch.tensor(lengths)[:, None]
    garbage = torch.where(mask[..., None], x, math.nan)
    together = prior.log_prob(garbage, mask)
    alone = torch.stack([EmbeddingLaw(prior, n, validate_args=False).log_prob(x[i, :n]) for i, n in enumerate(lengths)])
    assert_close(together, alone, rtol=0, atol=1e-10)
    certificate = prior.certificate(garbage, mask)
    assert certificate.bound == pytest.approx(
        max(prior.certificate(x[i : i + 1, :n]).bound for i, n in enumerate(lengths)), abs=1e-12
    )


# The certificate itself


@examples
@given(st.integers(0, 10_000), st.sampled_from([0.3, 1.0, 3.0]), st.sampled_from([1, 2, 3]))
def test_certificate_reports_what_the_textbook_says(seed, strength, width):
    prior, x = prior_with(strength * normal(width, width, seed=seed)), normal(1, 5, width, seed=seed + 1)
    certificate = prior.certificate(x)
    weights = prior.w_q.detach()[None], prior.w_k.detach()[None]
    blocks = diagonal_blocks(trajectory_jacobian(x[0], *weights))
    assert certificate.min_symmetric_eigenvalue == pytest.approx(
        min(float(torch.linalg.eigvalsh((j + j.T) / 2).min()) for j in blocks), abs=1e-9
    )
    assert_close(certificate.sign[0], torch.linalg.det(blocks).sign())
    a = prior.coupling.detach()
    radius = [max([float((x[0, i] - x[0, j]).norm()) for i in range(t) for j in range(i)] or [0]) / 2 for t in range(5)]
    norm = float(torch.linalg.svdvals(a)[0])
    largest = float(torch.linalg.eigvalsh((a + a.T) / 2)[-1])
    assert certificate.bound == pytest.approx(norm * max(radius) ** 2, abs=1e-10)
    assert certificate.contraction == (certificate.bound < 1)
    assert certificate.monotone_bound == pytest.approx(largest * max(radius) ** 2, abs=1e-10)
    if not certificate.globally_injective:
        assert certificate.certified[0].tolist() == [largest * r**2 < 1 for r in radius]
    if certificate.contraction:
        assert certificate.injective


@examples
@given(st.integers(0, 10_000), st.sampled_from([1, 2, 3]))
def test_certified_positions_have_one_preimage_and_a_positive_determinant_everywhere(seed, width):
    """The theorem at work: the bound of the symmetric part of A is 0.95, its skew part as large as it comes."""
    raw, past = normal(width, width, seed=seed), 2 * normal(5, width, seed=seed + 1)
    symmetric, skew = (raw + raw.T) / 2, 3 * (raw - raw.T) / 2
    radius = max(float((p - q).norm()) for p in past for q in past) / 2
    largest = float(torch.linalg.eigvalsh(symmetric)[-1])
    if largest > 0:
        symmetric = symmetric * 0.95 / (largest * radius**2)
    prior = prior_with(symmetric + skew)
    found = prior.preimages(2 * normal(20, width, seed=seed + 2), past)
    assert (found.number == 1).all()
    points = torch.cat((3 * normal(200, width, seed=seed + 3), past))
    whole = torch.cat((past.expand(len(points), *past.shape), points.unsqueeze(1)), dim=1)
    assert prior.certificate(whole).certified[:, -1].all()
    assert (prior.margins(whole).sign[:, -1] == 1).all()


def test_bound_of_the_symmetric_part_certifies_what_the_norm_cannot():
    rotation = 6 * torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    certificate = prior_with(rotation).certificate(normal(1, 6, 2))
    assert not certificate.contraction
    assert certificate.injective
    assert "every past" in certificate.sentence


def test_bound_is_tight():
    """Two tokens at +-1 and a = 1 stand on the boundary: below it one preimage, above it three."""
    past = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    for a, number in [(0.99, 1), (1.01, 3)]:
        prior = prior_with(scalar(a))
        assert prior.certificate(torch.cat((past, past[:1]))[None]).injective == (number == 1)
        assert prior.preimages(scalar(0.0), past).number.item() == number


@examples
@given(st.integers(0, 10_000), st.sampled_from([2, 3, 4]))
def test_a_positive_eigenvalue_of_the_symmetric_part_folds_for_some_past(seed, width):
    """The converse of repulsion: two tokens along the eigenvector, just past the radius, and the point between them."""
    raw = normal(width, width, seed=seed)
    values, vectors = torch.linalg.eigh((raw + raw.T) / 2)
    if values[-1] < 0.1:
        raw, values = raw + torch.eye(width), values + 1
    radius = 1 / values[-1].sqrt()
    prior = prior_with(raw)
    for factor, number in [(0.99, 1), (1.01, 3)]:
        past = factor * radius * torch.stack((vectors[:, -1], -vectors[:, -1]))
        whole = torch.cat((past, torch.zeros_like(past[:1])))[None]
        certificate = prior.certificate(whole)
        assert certificate.injective == (number == 1)
        assert certificate.sign[0, 2] == (1 if number == 1 else -1)
        found = prior.preimages(torch.zeros(1, width, dtype=torch.float64), past)
        assert found.number.item() == number
        assert found.sign.sum() == 1


def test_check_looks_at_every_position_that_could_fold():
    """The widest past is harmless, since it is crowded; a narrower one of three tokens is not."""
    crowded = torch.cat((torch.tensor([-1.5, 1.5]), torch.linspace(-1.6, 1.6, 12))).double()[None, :, None]
    prior = prior_with(scalar(0.6))
    assert prior.total_mass(crowded[0, :13]).value == pytest.approx(1.0)
    with pytest.warns(NumericalWarning, match="At position 3 of sequence 0, the worst of 12"):
        prior.log_prob(crowded, check=True)


@pytest.mark.parametrize(
    ("a", "last", "words"),
    [
        (-1.0, 0.0, "Guaranteed for every past and length"),
        (0.2, 0.0, r"Guaranteed for these pasts.*\(bound 0.8 < 1\)"),
        (1.0, 0.0, "Not a density: at 1 of 3 positions"),
        (1.0, 3.0, r"Not guaranteed at 1 of 3 positions \(bound 4 >= 1\)"),
    ],
)
def test_sentence_says_what_is_guaranteed_and_what_is_not(a, last, words):
    certificate = prior_with(scalar(a)).certificate(torch.tensor([[[-2.0], [2.0], [last]]], dtype=torch.float64))
    assert re.search(words, certificate.sentence)


# Past the boundary


@pytest.mark.parametrize(("a", "past"), [(1.0, [-2.0, 2.0]), (0.7, [-3.0, 0.5, 2.0]), (2.0, [-2.0, 0.0, 2.0])])
def test_past_the_boundary_the_integral_is_not_one_and_the_code_says_by_how_much(a, past):
    prior, past = prior_with(scalar(a), noise_scale=0.8), torch.tensor(past, dtype=torch.float64)[:, None]
    found = prior.total_mass(past)
    assert found.exact
    assert found.excess > 0.1, "the case must fold"
    # The integrand has kinks where the determinant changes its sign; a fine sum needs no list of them.
    axis = torch.linspace(-14, 14, 400_001, dtype=torch.float64)
    weights = torch.softmax(a * axis[:, None] * past[:, 0], -1)
    mean = weights @ past[:, 0]
    slope = 1 - a * (weights @ past[:, 0].square() - mean.square())
    density = torch.exp(-((axis - mean) ** 2) / (2 * 0.64)) / math.sqrt(2 * math.pi * 0.64) * slope.abs()
    assert found.value == pytest.approx(float(torch.trapezoid(density, axis)), abs=1e-5)
    # ... which is the formula of log_prob, and the number of preimages that one noise has on average.
    some = axis[::40_000]
    assert_close(next_density(prior, past, some[:, None]), density[::40_000], rtol=1e-6, atol=1e-9)
    counts = prior.preimages(0.8 * normal(4000, 1), past).number.double()
    assert abs(float(counts.mean()) - found.value) < 4 * float(counts.std()) / math.sqrt(4000)


def test_mass_in_two_unknowns_agrees_with_quadrature():
    prior, past = prior_with(1.2 * torch.eye(2).double(), 0.5), 1.5 * normal(4, 2, seed=3)
    found = prior.total_mass(past, samples=400, generator=torch.Generator().manual_seed(0))
    assert not found.exact
    axis = torch.linspace(-7, 7, 351, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)
    total = sum(float(next_density(prior, past, part).sum()) for part in points.split(60_000))
    total *= float(axis[1] - axis[0]) ** 2
    assert total > 1.2, "the case must fold"
    assert abs(found.value - total) < 4 * found.standard_error + 1e-3
    assert "at least" in found.sentence


def test_log_prob_warns_with_the_mass_that_counts_more_than_once():
    prior, x = prior_with(scalar(1.0)), torch.tensor([[[-2.0], [2.0], [0.5]]], dtype=torch.float64)
    unchecked = prior.log_prob(x)  # training: silent
    with pytest.warns(
        NumericalWarning, match=r"position 2 of sequence 0, the worst of 1 .*integrates to 2\.434, 1\.43 of it counted"
    ):
        checked = prior.log_prob(x, check=True)
    assert_close(checked, unchecked, rtol=0, atol=0)


def test_log_prob_does_not_warn_where_nothing_is_wrong():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prior_with(scalar(0.2)).log_prob(torch.tensor([[[-2.0], [2.0], [0.5]]], dtype=torch.float64), check=True)
        # The bound of Popoviciu is not met (1.35), yet the map does not fold: the search sees that and is silent.
        many = torch.linspace(-1.5, 1.5, 9, dtype=torch.float64)[None, :, None]
        prior = prior_with(scalar(0.6))
        assert not prior.certificate(many).injective
        assert prior.total_mass(many[0, :8]).value == pytest.approx(1.0)
        prior.log_prob(many, check=True)


def test_density_of_the_sampler_integrates_to_one_past_the_boundary():
    """Of several preimages the sampler takes one; there the formula is its density, and elsewhere that is 0."""
    prior, past = prior_with(scalar(1.0), 0.8), torch.tensor([[-2.0], [2.0]], dtype=torch.float64)
    axis = torch.linspace(-8, 8, 801, dtype=torch.float64)[:, None]
    whole = torch.cat((past.expand(len(axis), 2, 1), axis.unsqueeze(1)), dim=1)
    noise = axis - torch.stack([attention_mean(row, prior.w_q[None], prior.w_k[None])[2] for row in whole]).detach()
    taken = prior.solve(noise.unsqueeze(1), past=past.expand(len(axis), 2, 1)).x[:, 0]
    density = next_density(prior, past, axis) * ((taken - axis).abs() < 1e-6).squeeze(-1)
    assert float(torch.trapezoid(density, axis[:, 0])) == pytest.approx(1, abs=0.04)


def test_past_of_a_wrong_shape_is_refused():
    with pytest.raises(ArgumentError, match=r"past must have shape \(t, 1\)"):
        prior_with(scalar(1.0)).total_mass(torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(ArgumentError, match=r"past must have shape \(B, P, D\) = \(2, P, 1\)"):
        prior_with(scalar(1.0)).solve(torch.zeros(2, 3, 1).double(), past=torch.zeros(1, 3, 1).double())
    with pytest.raises(ArgumentError, match=r"noise must have shape \(M, 1\)"):
        prior_with(scalar(1.0)).preimages(torch.zeros(2, 3).double(), torch.zeros(2, 1).double())
