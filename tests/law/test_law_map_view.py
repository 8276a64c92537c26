"""The objective as a posterior and as a Lagrangian; attraction, repulsion, and who carries the barrier's gradient."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor
from torch.testing import assert_close

from naive import attention_mean, diagonal_blocks, textbook_blocks, trajectory_jacobian
from support_tokens.errors import ArgumentError
from support_tokens.law import EmbeddingPrior, barrier_concentration, coupling_spectrum
from support_tokens.law.filtering import CategoricalEmission

SIGMA = 0.7
TOKENS = [0, 2, 1, 2]


def normal(*shape: int, seed=0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def prior_of(width=2, strength=0.6, seed=0) -> EmbeddingPrior:
    prior = EmbeddingPrior(width, noise_scale=SIGMA).double()
    with torch.no_grad():
        prior.w_q.copy_(strength * normal(width, width, seed=seed))
        prior.w_k.copy_(normal(width, width, seed=seed + 1))
    return prior


def cross_entropy(x: Tensor, emission: CategoricalEmission) -> Tensor:
    """Sum over positions of one sequence (T, D)."""
    return -torch.stack([emission.log_prob(row[None], token)[0] for row, token in zip(x, TOKENS, strict=True)]).sum()


def squared_error(prior: EmbeddingPrior, x: Tensor) -> Tensor:
    return (x - prior.mean(x[None])[0]).square().sum(-1)


# The posterior


def test_objective_is_the_negative_log_posterior_up_to_a_constant():
    """CE + the `map` penalty differs from -log p(y | x) - log p(x) by T D log(sigma sqrt(2 pi)), whatever x is."""
    prior, emission = prior_of(), CategoricalEmission(normal(3, 2))
    differences = []
    for seed in range(8):
        x = 2 * normal(4, 2, seed=seed)
        penalty = squared_error(prior, x) / (2 * SIGMA**2) - prior.margins(x[None]).log_abs_det[0]
        objective = cross_entropy(x, emission) + penalty.sum()
        log_joint = -cross_entropy(x, emission) + prior.log_prob(x[None])[0]
        differences.append((-log_joint - objective).item())
    assert np.ptp(differences) < 1e-5
    assert differences[0] == pytest.approx(4 * 2 * math.log(SIGMA * math.sqrt(2 * math.pi)), abs=1e-5)


def minimise(function, start: Tensor) -> Tensor:
    def value_and_gradient(flat: np.ndarray):
        x = torch.tensor(flat, dtype=torch.float64).reshape(start.shape).requires_grad_()
        value = function(x)
        (gradient,) = torch.autograd.grad(value, x)
        return value.item(), gradient.numpy().ravel()

    found = optimize.minimize(
        value_and_gradient, start.numpy().ravel(), jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 2000}
    )
    return torch.tensor(found.x, dtype=torch.float64).reshape(start.shape)


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_penalty_and_margin_constraint_reach_one_stationary_point(weight):
    """Squared error at scale sigma under sum of log margins >= c: the multiplier of the constraint is the weight."""
    prior, emission = prior_of(strength=0.4), CategoricalEmission(normal(3, 2))
    loss = lambda x: cross_entropy(x, emission) + squared_error(prior, x).sum() / (2 * SIGMA**2)  # noqa: E731
    margin = lambda x: prior.margins(x[None]).log_abs_det.sum()  # noqa: E731
    penalised = minimise(lambda x: loss(x) - weight * margin(x), normal(4, 2, seed=5))
    level = margin(penalised).item()

    def by_scipy(function):
        def gradient(flat):
            x = torch.tensor(flat, dtype=torch.float64).reshape(4, 2).requires_grad_()
            return torch.autograd.grad(function(x), x)[0].numpy().ravel()

        return lambda flat: function(torch.tensor(flat).reshape(4, 2)).item(), gradient

    (value, slope), (bound, bound_slope) = by_scipy(loss), by_scipy(lambda x: margin(x) - level)
    free = optimize.minimize(value, penalised.numpy().ravel(), jac=slope, method="BFGS")
    assert bound(free.x) < -1e-3, "the constraint must bind, or it says nothing"
    constrained = optimize.minimize(
        value,
        free.x,
        jac=slope,
        constraints={"type": "ineq", "fun": bound, "jac": bound_slope},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    assert constrained.success
    np.testing.assert_allclose(constrained.x, penalised.numpy().ravel(), atol=1e-4)
    # grad loss = multiplier * grad margin, and the multiplier is the weight of the penalty.
    of_loss, of_margin = slope(constrained.x), bound_slope(constrained.x)
    multiplier = of_loss @ of_margin / (of_margin @ of_margin)
    assert multiplier == pytest.approx(weight, abs=1e-3)
    np.testing.assert_allclose(of_loss, multiplier * of_margin, atol=1e-3)


def test_squared_error_bounds_what_the_margin_alone_does_not():
    """Tokens at -s and s repel: the margin of one between them grows without limit, the density does not."""
    prior = EmbeddingPrior(1).double()
    with torch.no_grad():
        prior.w_q.fill_(-0.5)
        prior.w_k.fill_(1.0)
    tokens = [torch.tensor([[[-s], [s], [0.0]]], dtype=torch.float64) for s in (1, 10, 100, 1000)]
    alone = [-prior.margins(x).log_abs_det.sum().item() for x in tokens]
    assert alone == [pytest.approx(-math.log1p(0.5 * s**2)) for s in (1, 10, 100, 1000)]
    whole = [-prior.log_prob(x).item() for x in tokens]
    assert whole == sorted(whole)


# Attraction and repulsion


def scalar_prior(a: float) -> EmbeddingPrior:
    prior = EmbeddingPrior(1).double()
    with torch.no_grad():
        prior.w_q.fill_(a)
        prior.w_k.fill_(1.0)
    return prior


@pytest.mark.parametrize("seed", range(3))
def test_spectrum_is_that_of_the_textbook_covariance_times_coupling(seed):
    prior, x = prior_of(3, seed=seed), normal(1, 5, 3, seed=seed)
    blocks = torch.eye(3) - textbook_blocks(x[0], prior.w_q.detach()[None], prior.w_k.detach()[None])
    expected = torch.linalg.eigvalsh((blocks + blocks.mT) / 2)
    found = coupling_spectrum(prior, x)
    assert_close(found.eigenvalues[0], expected, rtol=1e-9, atol=1e-10)
    assert_close(
        (found.attraction - found.repulsion)[0], blocks.diagonal(dim1=-2, dim2=-1).sum(-1), rtol=1e-8, atol=1e-10
    )
    assert 0 <= found.attractive_share <= 1


@pytest.mark.parametrize(
    ("a", "share", "word"), [(0.5, 1.0, "attractive"), (-0.5, 0.0, "repulsive"), (0.0, 0.5, "balanced")]
)
def test_sign_of_a_scalar_coupling_is_the_regime(a, share, word):
    found = coupling_spectrum(scalar_prior(a), normal(2, 6, 1))
    assert found.attractive_share == share
    assert word in found.sentence


@pytest.mark.parametrize("a", [0.5, -0.5])
def test_two_tokens_move_together_under_attraction_and_apart_under_repulsion(a):
    """One step along the gradient of the margin of a third token: the figure of the guide, in one step."""
    x = torch.tensor([[[-0.8], [0.8], [0.0]]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(scalar_prior(a).margins(x).log_abs_det.sum(), x)
    moved = x.detach() + 0.1 * gradient
    distance = (moved[0, 1] - moved[0, 0]).item()
    assert distance < 1.6 if a > 0 else distance > 1.6


# Who carries the gradient


def test_gradient_norms_are_those_of_autograd_through_the_textbook_blocks():
    prior, x = prior_of(3, strength=0.9), normal(2, 7, 3, seed=4)
    found = barrier_concentration(prior, x, k=2)
    for b in range(2):
        for t in range(7):
            leaf = x[b].clone().requires_grad_()
            block = textbook_blocks(leaf, prior.w_q.detach()[None], prior.w_k.detach()[None])[t]
            (gradient,) = torch.autograd.grad(torch.linalg.slogdet(block).logabsdet, leaf, allow_unused=True)
            expected = 0.0 if gradient is None else gradient.norm().item()
            assert found.norms[b, t].item() == pytest.approx(expected, rel=1e-7, abs=1e-10)
    chosen = found.norms.gather(1, found.support).sum(-1) / found.norms.sum(-1)
    assert_close(found.share, chosen)


def test_barrier_gradient_concentrates_on_support_tokens_near_the_boundary():
    """A coupling scaled until the smallest determinant is 0.5 and then 0.02: 2 of 22 tokens carry ever more."""
    x, share = normal(1, 24, 2, seed=1), []
    for target in (0.5, 0.02):
        prior = prior_of(strength=1.0)
        with torch.no_grad():
            prior.w_k.copy_(prior.w_q)
        raw = prior.w_q.detach().clone()

        def smallest(scale: float, prior=prior, raw=raw) -> float:
            with torch.no_grad():
                prior.w_q.copy_(scale * raw)
            weights = prior.w_q.detach()[None], prior.w_k.detach()[None]
            return float(torch.linalg.det(diagonal_blocks(trajectory_jacobian(x[0], *weights))).min())

        scale = optimize.brentq(lambda s, target=target: smallest(s) - target, 1e-6, 1.5, xtol=1e-10)
        smallest(scale)
        found = barrier_concentration(prior, x, k=2)
        share.append(found.share.item())
        assert found.even.item() == pytest.approx(2 / 22)
    assert share[1] > share[0] > found.even.item()
    assert share[1] > 0.5


def test_more_support_tokens_than_margins_are_refused():
    with pytest.raises(ArgumentError, match="k must be at most 3, the number of positions"):
        barrier_concentration(prior_of(), normal(1, 5, 2), k=4)


def test_mean_of_the_law_is_the_one_of_the_posterior():
    """What the tests above call squared error is the distance to the naive loop's mean."""
    prior, x = prior_of(), normal(4, 2)
    expected = (x - attention_mean(x, prior.w_q[None], prior.w_k[None])).square().sum(-1)
    assert_close(squared_error(prior, x), expected)
