"""The particle filter against closed forms, the `particles` library, and its own promises."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import Tensor
from torch.testing import assert_close

from naive import attention_mean, diagonal_blocks, trajectory_jacobian
from support_tokens.errors import ArgumentError, NumericalError
from support_tokens.law import EmbeddingPrior
from support_tokens.law.filtering import (
    CategoricalEmission,
    GaussianEmission,
    ParticleFilter,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed=0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def prior_of(width=2, rank=2, noise_scale=0.7, strength=0.6, seed=0) -> EmbeddingPrior:
    prior = EmbeddingPrior(width, rank=rank, noise_scale=noise_scale).double()
    with torch.no_grad():
        prior.w_q.copy_(strength * normal(rank, width, seed=seed))
        prior.w_k.copy_(normal(rank, width, seed=seed + 1))
    return prior


def uncoupled(width=2, noise_scale=0.7) -> EmbeddingPrior:
    """W_Q = 0: the mean is the plain average of the past, and the law is linear and Gaussian."""
    return prior_of(width, noise_scale=noise_scale, strength=0.0)


def joint_gaussian(length: int, sigma: float, tau: float, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Covariances (T, T) of x and of y for one coordinate of the law without coupling."""
    average = np.zeros((length, length))
    for t in range(1, length):
        first = 0 if window is None else max(0, t - window)
        average[t, first:t] = 1 / (t - first)
    root = np.linalg.inv(np.eye(length) - average)
    latent = sigma**2 * root @ root.T
    return latent, latent + tau**2 * np.eye(length)


def exact_evidence(y: Tensor, sigma: float, tau: float, window: int | None = None) -> float:
    covariance = joint_gaussian(len(y), sigma, tau, window)[1]
    return sum(float(stats.multivariate_normal.logpdf(column, cov=covariance)) for column in y.numpy().T)


# The linear Gaussian case, in closed form


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("proposal", "resampling"), [("bootstrap", "systematic"), ("guided", "residual")])
def test_evidence_is_unbiased_in_the_linear_gaussian_case(proposal, resampling, window):
    """The mean of exp(log evidence) over many runs is the exact evidence, within four standard errors."""
    prior, y = uncoupled(1), 0.8 * normal(6, 1, seed=5)
    exact = exact_evidence(y, 0.7, 0.6, window)
    source, ratios = generator(1), []
    for _ in range(300):
        filter = ParticleFilter(
            prior,
            GaussianEmission(0.6),
            particles=20,
            window=window,
            proposal=proposal,
            resampling=resampling,
            generator=source,
        )
        ratios.append(math.exp(filter.run(y).log_evidence - exact))
    ratios = np.array(ratios)
    assert abs(ratios.mean() - 1) < 4 * ratios.std() / math.sqrt(len(ratios))
    assert ratios.std() / math.sqrt(len(ratios)) < 0.05, "the runs must be able to tell a bias"


@pytest.mark.parametrize("proposal", ["bootstrap", "guided"])
def test_filtered_means_and_evidence_agree_with_the_closed_form(proposal):
    prior, y = uncoupled(2), 0.8 * normal(8, 2, seed=5)
    filter = ParticleFilter(
        prior, GaussianEmission(0.6), particles=20_000, window=None, proposal=proposal, generator=generator(2)
    )
    result = filter.run(y)
    assert result.log_evidence == pytest.approx(exact_evidence(y, 0.7, 0.6), abs=0.05)
    latent, observed = joint_gaussian(8, 0.7, 0.6, None)
    for t in range(8):
        gain = latent[t, : t + 1] @ np.linalg.inv(observed[: t + 1, : t + 1])
        assert_close(result.series("mean")[t], torch.tensor(gain @ y[: t + 1].numpy()), rtol=0, atol=0.04)
        variance = latent[t, t] - gain @ latent[: t + 1, t]
        assert result.series("spread")[t].item() == pytest.approx(math.sqrt(variance), rel=0.05)
    assert (result.series("margin_mean") == 0).all(), "without coupling every margin is 0"
    assert result.series("log_predictive").sum().item() == pytest.approx(result.log_evidence)


def test_guided_proposal_is_the_exact_posterior_without_coupling():
    """Every weight of a step is then the same, so that nothing is lost at the first position."""
    filter = ParticleFilter(uncoupled(2), GaussianEmission(0.3), particles=50, generator=generator())
    assert filter.step(normal(2)).ess == pytest.approx(50)


# The law with coupling


def test_both_proposals_estimate_one_evidence_and_one_posterior():
    prior = prior_of(2, strength=1.0)
    with torch.no_grad():
        prior.w_k.copy_(-prior.w_q)  # repulsive: one-to-one for every past, so that both aim at one law
    y = prior.sample(1, 10, generator(6))[0] + 0.5 * normal(10, 2, seed=7)
    results = [
        ParticleFilter(
            prior, GaussianEmission(0.5), particles=6000, window=None, proposal=proposal, generator=generator(3)
        ).run(y)
        for proposal in ("bootstrap", "guided")
    ]
    assert results[0].log_evidence == pytest.approx(results[1].log_evidence, abs=0.15)
    for name, tolerance in [("margin_mean", 0.04), ("margin_sd", 0.04), ("mean", 0.05)]:
        assert_close(results[0].series(name), results[1].series(name), rtol=0, atol=tolerance)
    assert float(results[0].series("margin_mean").abs().max()) > 0.05, "the case must have margins"
    assert float(results[0].series("fold_share").max()) == 0


def test_evidence_of_two_positions_agrees_with_quadrature():
    """A past seen almost without noise: p(y_3 | y_1, y_2) is an integral over x_3 of the exact density."""
    prior = prior_of(1, rank=1, strength=0.9)
    y, tiny = torch.tensor([[-0.8], [0.9], [0.4]], dtype=torch.float64), 1e-3

    class Sharp(GaussianEmission):
        """Noise of 1e-3 at the first two positions, of 0.5 at the third."""

        count = 0

        def log_prob(self, x, observation):
            self.noise_scale = tiny if Sharp.count < 2 else 0.5
            Sharp.count += 1
            return super().log_prob(x, observation)

        def posterior(self, mean, noise_scale, observation):
            self.noise_scale = tiny if Sharp.count < 2 else 0.5
            return super().posterior(mean, noise_scale, observation)

    found = ParticleFilter(prior, Sharp(0.5), particles=4000, generator=generator()).run(y).steps[2].log_predictive
    grid = torch.linspace(-6, 6, 4001, dtype=torch.float64)
    whole = torch.cat([y[:2].T.expand(len(grid), 2), grid[:, None]], 1)[..., None]
    conditional = (prior.log_prob(whole) - prior.log_prob(y[None, :2])).exp().detach()
    expected = torch.trapezoid(conditional * torch.distributions.Normal(grid, 0.5).log_prob(y[2]).exp(), grid)
    assert found == pytest.approx(math.log(float(expected)), abs=0.05)


def test_margins_of_the_filter_are_those_of_the_oracle():
    """One particle is picked, its kept trajectory is laid out, and autograd says what its margin is."""
    prior, y = prior_of(2, strength=0.8), normal(5, 2, seed=7)
    filter = ParticleFilter(prior, GaussianEmission(1e-3), particles=8, window=None, generator=generator())
    steps = filter.run(y).steps
    weights = prior.w_q.detach()[None], prior.w_k.detach()[None]
    # Nothing is resampled away from the observations at this noise: all particles stand on them.
    blocks = diagonal_blocks(trajectory_jacobian(y, *weights))
    expected = torch.linalg.slogdet(blocks).logabsdet
    assert_close(torch.tensor([s.margin_mean for s in steps], dtype=torch.float64), expected, rtol=0, atol=0.02)


def test_evidence_agrees_with_the_particles_library():
    """The same windowless model in numpy, filtered by an independent program; its map is inverted by bisection."""
    particles = pytest.importorskip("particles", reason="particles is not installed: pip install particles")
    from particles import state_space_models

    a, sigma, tau = 0.3, 0.7, 0.5
    prior = EmbeddingPrior(1, noise_scale=sigma).double()
    with torch.no_grad():
        prior.w_q.fill_(a)
        prior.w_k.fill_(1.0)
    y, draws = 0.9 * normal(6, 1, seed=11)[:, 0].numpy(), np.random.default_rng(0)

    def mean(x: np.ndarray, past: np.ndarray) -> np.ndarray:
        scores = np.exp(a * x[:, None] * past)
        return (scores * past).sum(1) / scores.sum(1)

    class Trajectories(particles.FeynmanKac):
        """States are whole trajectories (N, T): column t is filled at time t."""

        def M0(self, N):
            state = np.zeros((N, len(y)))
            state[:, 0] = sigma * draws.standard_normal(N)
            return state

        def M(self, t, xp):
            noise, past = sigma * draws.standard_normal(len(xp)), xp[:, :t]
            low, high = noise + past.min(1) - 1e-9, noise + past.max(1) + 1e-9
            for _ in range(60):
                middle = (low + high) / 2
                below = middle - mean(middle, past) < noise
                low, high = np.where(below, middle, low), np.where(below, high, middle)
            state = xp.copy()
            state[:, t] = (low + high) / 2
            return state

        def logG(self, t, xp, x):
            return stats.norm.logpdf(y[t], x[:, t], tau)

    assert issubclass(state_space_models.Bootstrap, particles.FeynmanKac)
    np.random.seed(0)  # noqa: NPY002 - the library draws from the global source
    theirs = []
    for _ in range(12):
        other = particles.SMC(fk=Trajectories(len(y)), N=2000, resampling="systematic", ESSrmin=0.5)
        other.run()
        theirs.append(other.logLt)
    source, ours = generator(4), []
    for proposal in ["bootstrap", "guided"] * 6:
        filter = ParticleFilter(
            prior, GaussianEmission(tau), particles=2000, window=None, proposal=proposal, generator=source
        )
        ours.append(filter.run(torch.from_numpy(y)[:, None]).log_evidence)
    error = math.sqrt(np.var(theirs) / 12 + np.var(ours) / 12)
    assert error < 0.08
    assert abs(np.mean(theirs) - np.mean(ours)) < 4 * error + 1e-3


# Tokens


def test_categorical_emission_is_a_softmax_and_its_proposal_stands_at_the_most_probable_embedding():
    table = 3 * normal(5, 3)
    emission, x = CategoricalEmission(table, temperature=0.5, bias=normal(5, seed=3)), normal(4, 3, seed=1)
    expected = torch.log_softmax(x @ table.T / 0.5 + normal(5, seed=3), -1)
    assert_close(emission.log_prob(x, 2), expected[:, 2])
    sigma = torch.tensor(0.7, dtype=torch.float64)
    location, scale = emission.posterior(x, sigma, 2)
    assert scale == sigma
    for row, found in zip(x, location, strict=True):
        objective = lambda z, row=row: (  # noqa: E731
            -(z - row).square().sum() / (2 * 0.7**2) + emission.log_prob(z[None], 2)[0]
        )
        best = optimize.minimize(lambda z, f=objective: -f(torch.from_numpy(z)).item(), row.numpy(), tol=1e-12)
        assert objective(found).item() > -best.fun - 0.02


def test_token_evidence_of_one_position_agrees_with_quadrature():
    prior, table = prior_of(1, rank=1, noise_scale=1.2), torch.tensor([[-2.0], [0.5], [1.5]], dtype=torch.float64)
    emission = CategoricalEmission(table)
    grid = torch.linspace(-15, 15, 20_001, dtype=torch.float64)[:, None]
    density = torch.distributions.Normal(0.0, 1.2).log_prob(grid[:, 0]).exp()
    total = 0.0
    for token in range(3):
        expected = torch.trapezoid(density * emission.log_prob(grid, token).exp(), grid[:, 0])
        for proposal in ("bootstrap", "guided"):
            filter = ParticleFilter(prior, emission, particles=40_000, proposal=proposal, generator=generator(token))
            assert math.exp(filter.step(token).log_predictive) == pytest.approx(float(expected), rel=0.03)
        total += float(expected)
    assert total == pytest.approx(1, abs=1e-5)


def test_a_position_without_observation_changes_no_evidence():
    prior, y = prior_of(2), normal(4, 2)
    filter = ParticleFilter(prior, GaussianEmission(0.5), particles=200, generator=generator())
    result = filter.run([y[0], None, y[2]])
    assert result.steps[1].log_predictive == pytest.approx(0, abs=1e-12)
    assert result.steps[1].spread > result.steps[0].spread, "what was not seen is less certain"


# Memory, repeatability, errors


@pytest.mark.slow
def test_memory_is_constant_over_ten_thousand_positions():
    filter = ParticleFilter(prior_of(2, strength=0.5), GaussianEmission(0.5), particles=8, window=16)
    sizes, source = set(), generator(8)
    y = torch.zeros(2, dtype=torch.float64)
    for t in range(10_000):
        y = 0.5 * y + 0.5 * torch.randn(2, generator=source, dtype=torch.float64)
        step = filter.step(y)
        if t >= 16 and t % 500 == 0:
            sizes.add(tuple(buffer.untyped_storage().nbytes() for buffer in filter._buffers))
            assert math.isfinite(step.log_predictive)
    assert filter.position == 10_000
    assert filter.trajectories.shape == (8, 16, 2)
    assert len(sizes) == 1


def test_window_forgets_the_oldest_and_a_long_one_equals_none():
    prior, y = prior_of(2), normal(12, 2)
    run = lambda window: (  # noqa: E731
        ParticleFilter(prior, GaussianEmission(0.5), particles=64, window=window, generator=generator()).run(y)
    )
    # None grows its buffers past 16 positions; both keep all twelve here.
    assert_close(run(12).log_evidence, run(None).log_evidence, rtol=1e-12, atol=1e-12)
    assert run(3).log_evidence != run(None).log_evidence
    long = normal(40, 2)
    kept = ParticleFilter(prior, GaussianEmission(0.5), particles=16, window=None, generator=generator())
    kept.run(long)
    assert kept.trajectories.shape == (16, 40, 2)


def test_ring_holds_the_last_embeddings_of_the_same_trajectory():
    """The mean that the filter uses at the last position is attention over the window, by the naive loop."""
    prior = prior_of(2, strength=0.8)
    filter = ParticleFilter(prior, GaussianEmission(0.5), particles=4, window=3, ess_threshold=0, generator=generator())
    filter.run(normal(7, 2))
    past = filter.trajectories.clone()
    x = normal(4, 2, seed=3)
    mean = filter._at(x, filter._past())[2]
    weights = prior.w_q.detach()[None], prior.w_k.detach()[None]
    for i in range(4):
        assert_close(mean[i], attention_mean(torch.cat((past[i], x[i : i + 1])), *weights)[-1])


def test_filter_repeats_by_its_generator():
    prior, y = prior_of(2), normal(6, 2)
    run = lambda seed: (  # noqa: E731
        ParticleFilter(prior, GaussianEmission(0.5), particles=32, generator=generator(seed)).run(y).log_evidence
    )
    assert run(0) == run(0) != run(1)


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_threshold_of_the_effective_sample_size_decides_on_resampling(threshold):
    filter = ParticleFilter(
        prior_of(2), GaussianEmission(0.3), particles=64, proposal="bootstrap", ess_threshold=threshold
    )
    resampled = filter.run(normal(6, 2)).series("resampled").bool()
    assert not resampled[0]
    assert (resampled[1:] == bool(threshold)).all()


@pytest.mark.parametrize("proposal", ["bootstrap", "guided"])
def test_weights_that_all_vanish_end_in_a_clear_error(proposal):
    class Impossible(GaussianEmission):
        def log_prob(self, x, observation):
            return torch.full_like(x[:, 0], -torch.inf)

    filter = ParticleFilter(prior_of(2), Impossible(0.5), particles=16, proposal=proposal)
    with pytest.raises(NumericalError, match=r"weights of 16 particles .* at position 0.*use more particles"):
        filter.step(torch.zeros(2).double())
    with pytest.raises(NumericalError, match="position 0"):
        ParticleFilter(prior_of(2), GaussianEmission(0.5)).step(torch.full((2,), math.nan).double())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"particles": 1}, "at least 2, received 1"),
        ({"window": 0}, "window must be at least 1"),
        ({"proposal": "best"}, "bootstrap, guided"),
        ({"resampling": "best"}, "systematic, residual"),
        ({"ess_threshold": 1.5}, "between 0 and 1"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(ArgumentError, match=words):
        ParticleFilter(prior_of(2), GaussianEmission(0.5), **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GaussianEmission(0.0),
        lambda: CategoricalEmission(torch.ones(3)),
        lambda: CategoricalEmission(torch.eye(3), 0.0),
    ],
)
def test_emissions_refuse_what_is_no_law(make):
    with pytest.raises(ArgumentError):
        make()
