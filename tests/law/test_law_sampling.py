"""The map from noise to embeddings: solved, differentiated, and carried by torch's and zuko's distributions."""

import math

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.distributions import AffineTransform, Independent, Normal, TransformedDistribution, transforms
from torch.testing import assert_close

from naive import attention_mean
from support_tokens.errors import ArgumentError, NumericalError, NumericalWarning
from support_tokens.law import (
    EmbeddingLaw,
    EmbeddingPrior,
    NoiseToEmbeddings,
    all_roots_on_a_line,
    attend,
    from_noise,
    newton,
    solve,
)


def prior_of(width=3, rank=None, noise_scale=0.7, strength=1.0, seed=0) -> EmbeddingPrior:
    generator = torch.Generator().manual_seed(seed)
    prior = EmbeddingPrior(width, rank=rank, noise_scale=noise_scale).double()
    with torch.no_grad():
        for weight in (prior.w_q, prior.w_k):
            weight.copy_(strength * torch.randn(weight.shape, generator=generator, dtype=torch.float64) / width**0.5)
    return prior


def scalar_prior(coupling: float, noise_scale: float = 1.0) -> EmbeddingPrior:
    prior = EmbeddingPrior(1, noise_scale=noise_scale).double()
    with torch.no_grad():
        prior.w_q.fill_(coupling)
        prior.w_k.fill_(1.0)
    return prior


def normal(*shape: int, seed=0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# The solver


@pytest.mark.parametrize(("width", "rank"), [(1, 1), (1, 3), (3, 1), (4, 2), (3, 3), (2, 5)])
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.5])
def test_embeddings_have_the_noise_they_were_made_from(width, rank, strength):
    prior = prior_of(width, rank, strength=strength)
    noise = normal(4, 7, width, seed=1)
    x = prior.from_noise(noise)
    expected = torch.stack([row - attention_mean(row, prior.w_q.detach()[None], prior.w_k.detach()[None]) for row in x])
    assert_close(expected, noise, rtol=0, atol=1e-8)
    assert_close(prior.residual(x), noise, rtol=0, atol=1e-8)


def test_solution_continues_a_past_and_gives_account_of_itself():
    prior, noise = prior_of(4, 2, strength=0.8), normal(3, 8, 4)
    whole = prior.solve(noise)
    rest = prior.solve(noise[:, 5:], past=whole.x[:, :5])
    assert_close(rest.x, whole.x[:, 5:], rtol=0, atol=1e-8)
    assert whole.iterations.shape == whole.residual.shape == whole.preimages.shape == (3, 8)
    assert (whole.preimages[:, :2] == 1).all(), "one past token cannot fold"
    assert (whole.preimages[:, 2:] == 0).all(), "two unknowns: other solutions are not counted"
    assert "not searched for" in whole.sentence
    assert float(whole.residual.max()) < 1e-8


def test_newton_converges_in_a_few_steps_where_the_mean_is_a_contraction():
    iterations = prior_of(4, 3, strength=0.5).solve(normal(16, 20, 4)).iterations
    assert int(iterations.max()) <= 8


def test_cost_of_a_position_grows_with_its_past_and_no_faster(monkeypatch):
    """The past is projected once a position: keys handed to the solver are those kept, not computed again."""
    import support_tokens.law.trajectory as trajectory

    sizes, pointers = [], set()
    original = trajectory.next_embedding

    def counting(noise, values, queries, keys, *rest):
        sizes.append(keys.shape[1])
        pointers.add(keys.data_ptr())
        return original(noise, values, queries, keys, *rest)

    monkeypatch.setattr(trajectory, "next_embedding", counting)
    prior_of(4, 2).solve(normal(1, 6, 4))
    assert sizes == list(range(6))
    assert len(pointers - {0}) == 1, "one buffer of keys serves every position"


def test_rows_are_solved_apart():
    prior, noise = prior_of(3, 2, strength=1.2), normal(4, 6, 3)
    together = prior.from_noise(noise)
    assert_close(together, torch.cat([prior.from_noise(row[None]) for row in noise]), rtol=0, atol=1e-8)


def test_float32_reaches_its_own_tolerance():
    prior, noise = prior_of(3, 2), normal(2, 6, 3)
    x = prior.float().from_noise(noise.float())
    assert x.dtype == torch.float32
    assert_close(prior.residual(x), noise.float(), rtol=0, atol=1e-4)


def test_unreachable_tolerance_is_an_error_that_says_what_to_do():
    with pytest.raises(NumericalError, match=r"1e-30.*weaken the coupling"):
        solve(normal(1, 5, 3), *(prior_of().w_q, prior_of(seed=1).w_k), tolerance=1e-30)


def test_newton_leaves_a_start_where_the_derivative_vanishes():
    queries = torch.tensor([[[-1.0], [1.0]]], dtype=torch.float64)  # F'(0) = 1 - Var = 0
    roots = newton(torch.zeros(1, 1).double(), queries, queries, torch.tensor([[0.4]]).double(), 1e-10)
    assert roots.converged.all()
    weights = attend(roots.z, queries)
    assert_close(roots.z - weights @ queries[0], torch.tensor([[0.4]]).double(), rtol=0, atol=1e-9)


# Several preimages


def test_all_three_preimages_of_a_fold_are_found():
    """Two tokens at +-2, a = 1: z - 2 tanh(2 z) = 0 has the roots 0 and +-r."""
    tokens = torch.tensor([-2.0, 2.0], dtype=torch.float64)
    found, number = all_roots_on_a_line(
        tokens.expand(2, 2), tokens.expand(2, 2), torch.tensor([0.0, 5.0], dtype=torch.float64)
    )
    assert number.tolist() == [3, 1]
    from scipy.optimize import brentq

    root = brentq(lambda z: z - 2 * math.tanh(2 * z), 1, 3, xtol=1e-14)
    assert_close(found[0], torch.tensor([-root, 0.0, root], dtype=torch.float64), rtol=0, atol=1e-10)
    assert found[1, 1:].isnan().all()


def test_sampler_says_which_preimage_it_took():
    prior = scalar_prior(1.0)
    past = torch.tensor([[[-2.0], [2.0]]], dtype=torch.float64)
    solution = prior.solve(torch.full((1, 1, 1), 0.3, dtype=torch.float64), past=past)
    assert solution.preimages.tolist() == [[3]]
    assert "nearest to the start" in solution.sentence
    found = prior.preimages(torch.full((1, 1), 0.3, dtype=torch.float64), past[0])
    assert found.complete
    assert found.sign.tolist() == [[1.0, -1.0, 1.0]]
    # The search starts at noise + mu(noise + centroid), and the nearest of the three is the upper one.
    start = 0.3 + 2 * math.tanh(2 * 0.3)
    nearest = min(found.x[0, :, 0].tolist(), key=lambda x: abs(x - start))
    assert solution.x.item() == pytest.approx(nearest, abs=1e-8)
    for x in found.x[0]:
        whole = torch.cat((past[0], x[None]))[None]
        assert prior.residual(whole)[0, 2].item() == pytest.approx(0.3, abs=1e-9)


@pytest.mark.parametrize(("rank", "seed"), [(1, 0), (3, 3)])
def test_signs_of_all_preimages_add_up_to_one(rank, seed):
    prior, past = prior_of(3, rank, strength=2.2, seed=seed), 2 * normal(5, 3, seed=4)
    found = prior.preimages(0.5 * normal(40, 3, seed=5), past)
    assert int(found.number.max()) > 1, "the case must fold, or the test says nothing"
    assert (found.sign.sum(-1) == 1).all()
    rows = [torch.cat((past, x[None])) for row in found.x for x in row if not x.isnan().any()]
    noise = prior.residual(torch.stack(rows))[:, -1]
    assert_close(noise, (0.5 * normal(40, 3, seed=5)).repeat_interleave(found.number, 0), rtol=0, atol=1e-7)


# Gradients


@pytest.mark.parametrize(("width", "rank"), [(2, 1), (2, 2), (1, 1), (2, 3)])
def test_reparameterised_gradients_pass_gradcheck_of_both_orders(width, rank):
    prior = prior_of(width, rank, strength=0.6)
    inputs = [t.detach().clone().requires_grad_() for t in (normal(2, 4, width), prior.w_q, prior.w_k)]
    assert torch.autograd.gradcheck(from_noise, inputs)
    assert torch.autograd.gradgradcheck(from_noise, inputs)


def test_gradient_equals_the_dense_implicit_function_theorem():
    prior, noise = prior_of(3, 2, strength=0.8), normal(1, 5, 3).requires_grad_()
    weight = normal(1, 5, 3, seed=9)
    x = prior.from_noise(noise)
    (x * weight).sum().backward()
    jacobian = torch.autograd.functional.jacobian(prior.residual, x.detach()).reshape(15, 15)
    expected = torch.linalg.solve(jacobian.T, weight.reshape(15))
    assert_close(noise.grad.reshape(15), expected, rtol=0, atol=1e-9)


# Distributions


def test_transform_obeys_the_laws_of_torch_transforms():
    transform, noise = NoiseToEmbeddings(prior_of(3, 2)), normal(2, 3, 5, 3)
    x = transform(noise)
    assert x.shape == noise.shape
    assert_close(transform.inv(x), noise, rtol=0, atol=1e-8)
    assert transform.inv.inv is transform
    assert transform.domain.event_dim == transform.codomain.event_dim == 2
    forward = torch.autograd.functional.jacobian(lambda n: prior_of(3, 2).from_noise(n[None])[0], noise[0, 0])
    expected = torch.linalg.slogdet(forward.reshape(15, 15)).logabsdet
    assert_close(transform.log_abs_det_jacobian(noise, x)[0, 0], expected, rtol=0, atol=1e-8)
    assert_close(transform.inv.log_abs_det_jacobian(x, noise)[0, 0], -expected, rtol=0, atol=1e-8)
    assert transform.with_cache(1)._cache_size == 1


def test_bijective_says_what_is_proven():
    assert NoiseToEmbeddings(scalar_prior(-1.0)).bijective
    assert not NoiseToEmbeddings(scalar_prior(1.0)).bijective


def test_transformed_distribution_has_the_density_of_the_law():
    prior = scalar_prior(-0.8, 0.6)
    base = Independent(Normal(torch.zeros(4, 1).double(), prior.noise_scale.detach()), 2)
    carried = TransformedDistribution(base, [NoiseToEmbeddings(prior, cache_size=1)])
    x = carried.rsample((5,))
    assert_close(carried.log_prob(x), prior.log_prob(x), rtol=0, atol=1e-9)
    assert_close(EmbeddingLaw(prior, 4).log_prob(x), prior.log_prob(x), rtol=0, atol=0)


def test_law_is_a_base_for_further_transforms():
    law = EmbeddingLaw(scalar_prior(-0.8, 0.6), length=4)
    doubled = TransformedDistribution(law, [transforms.IndependentTransform(AffineTransform(1.0, 2.0), 2)])
    x = doubled.rsample((3,))
    assert_close(doubled.log_prob(x), law.log_prob((x - 1) / 2) - 4 * math.log(2), rtol=0, atol=1e-9)


def test_law_has_the_shapes_of_a_distribution():
    law = EmbeddingLaw(prior_of(3, 2, noise_scale=0.1), 5, validate_args=False).expand((2,))
    assert (law.batch_shape, law.event_shape) == ((2,), (5, 3))
    x = law.rsample((4,))
    assert x.shape == (4, 2, 5, 3)
    assert x.requires_grad
    assert law.log_prob(x).shape == (4, 2)
    assert law.log_prob(x[0, 0]).shape == (2,)
    assert not law.sample((4,)).requires_grad
    # What a plate of Pyro does: expand, and then count the batch as part of the event.
    joint = Independent(law, 1)
    assert (joint.batch_shape, joint.event_shape) == ((), (2, 5, 3))
    assert_close(joint.log_prob(x), law.log_prob(x).sum(-1))
    assert repr(law)
    with pytest.raises(ArgumentError, match=r"\(5, 3\).*\(2, 4, 3\)"):
        law.log_prob(torch.zeros(2, 4, 3))
    with pytest.raises(ArgumentError, match="length"):
        EmbeddingLaw(prior_of(), 0)


def test_zuko_flow_carries_the_transform_either_way():
    zuko = pytest.importorskip("zuko", reason="zuko is not installed: pip install zuko")
    prior = scalar_prior(-0.8, 0.6)
    base = Independent(Normal(torch.zeros(4, 1).double(), prior.noise_scale.detach()), 2)
    # zuko's convention: the transform goes from data to noise, which is the inverse of ours.
    flow = zuko.distributions.NormalizingFlow(NoiseToEmbeddings(prior).inv, base)
    x = flow.sample((3,))
    assert x.shape == (3, 4, 1)
    assert_close(flow.log_prob(x), prior.log_prob(x), rtol=0, atol=1e-9)
    composed = zuko.transforms.ComposedTransform(
        transforms.IndependentTransform(AffineTransform(0.5, 2.0), 2), NoiseToEmbeddings(prior).inv
    )
    flow = zuko.distributions.NormalizingFlow(composed, base)
    assert_close(flow.log_prob(x), prior.log_prob(0.5 + 2 * x) + 4 * math.log(2), rtol=0, atol=1e-9)


def test_rsample_trains_the_law_towards_a_target():
    """A reparameterised objective: with the noise fixed, gradient descent lowers E|x_3|^2."""
    prior, noise = prior_of(2, 2, strength=0.5), normal(64, 4, 2)
    optimizer = torch.optim.SGD(prior.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        loss = prior.from_noise(noise * prior.noise_scale)[:, 3].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


# Sampling


def test_sample_repeats_by_its_generator_and_has_the_shape_of_the_contract():
    prior = prior_of(3, 2)
    draw = lambda seed: prior.sample(4, 6, torch.Generator().manual_seed(seed))  # noqa: E731
    assert draw(0).shape == (4, 6, 3)
    assert not draw(0).requires_grad
    assert_close(draw(0), draw(0), rtol=0, atol=0)
    assert not torch.equal(draw(0), draw(1))
    with pytest.raises(ArgumentError, match="batch and length"):
        prior.sample(0, 3)


def test_probability_integral_transform_of_samples_is_uniform():
    """1-D: the conditional distribution function of x_3 by quadrature of log_prob, at draws of the sampler."""
    prior = scalar_prior(0.4, 0.5)
    x = prior.sample(200, 3, torch.Generator().manual_seed(2))
    grid = torch.linspace(-1, 1, 1001, dtype=torch.float64)
    values = []
    for row in x:
        # Along the grid from far left to x_3: the mass below.
        points = (row[2, 0] - 5) + 5 * (grid + 1) / 2
        joint = prior.log_prob(torch.cat([row[:2].T.expand(len(points), 2), points[:, None]], 1)[..., None])
        density = (joint - prior.log_prob(row[None, :2])).exp()
        values.append(torch.trapezoid(density, points).item())
    assert stats.kstest(values, "uniform").pvalue > 0.01


def test_moments_of_samples_agree_with_the_density():
    prior = scalar_prior(-1.5, 0.8)
    count = 20_000
    x = prior.sample(count, 3, torch.Generator().manual_seed(1))[..., 0]
    grid = torch.linspace(-6.5, 6.5, 81, dtype=torch.float64)
    cube = torch.cartesian_prod(grid, grid, grid)
    weight = torch.cat([prior.log_prob(part[..., None]) for part in cube.split(200_000)]).exp().detach()
    weight = weight * (grid[1] - grid[0]) ** 3
    assert weight.sum().item() == pytest.approx(1.0, abs=1e-6)
    for f in (lambda v: v[:, 2], lambda v: v[:, 2] ** 2, lambda v: v[:, 1] * v[:, 2], lambda v: v[:, 2] ** 4):
        expected, drawn = (weight * f(cube)).sum().item(), f(x)
        assert abs(drawn.mean().item() - expected) < 4 * drawn.std().item() / math.sqrt(count)


def test_distribution_that_validates_warns_past_the_boundary():
    # Said explicitly: zuko turns the default of every distribution off when it is imported.
    law = EmbeddingLaw(scalar_prior(1.0), 3, validate_args=True)
    x = torch.tensor([[[-2.0], [2.0], [0.1]]], dtype=torch.float64)
    with pytest.warns(NumericalWarning, match=r"integrates to 2\.434"):
        law.log_prob(x)
    assert_close(EmbeddingLaw(law.prior, 3, validate_args=False).log_prob(x), law.prior.log_prob(x), rtol=0, atol=0)
