"""The law of embeddings: its mean, margins and exact density, against loops and the whole trajectory's Jacobian."""

import math
import re

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import laws
from naive import attention_mean, gaussian_log_density, oracle, trajectory_jacobian
from strategies import law, paddings
from support_tokens import EmbeddingPrior
from support_tokens.errors import ArgumentError


def prior_of(width=3, rank=None, noise_scale=1.0, strength=1.0, seed=0) -> EmbeddingPrior:
    """A prior in float64 with weights out of a seed rather than its own initialisation."""
    generator = torch.Generator().manual_seed(seed)
    prior = EmbeddingPrior(width, rank=rank, noise_scale=noise_scale).double()
    with torch.no_grad():
        for weight in (prior.w_q, prior.w_k):
            weight.copy_(strength * torch.randn(weight.shape, generator=generator, dtype=torch.float64) / width**0.5)
    return prior


def embeddings(batch=2, length=5, width=3, seed=0) -> Tensor:
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights_of(prior: EmbeddingPrior) -> tuple[Tensor, Tensor]:
    """Weights in the shape of the oracles: one head."""
    return prior.w_q.detach()[None], prior.w_k.detach()[None]


def measure_of(prior: EmbeddingPrior) -> laws.Measure:
    """Margins as a function of x and of padding, which `attention_mask` of transformers marks the other way round."""

    def measure(x: Tensor, padding: Tensor | None) -> laws.Slogdet:
        return prior.to(x.dtype).margins(x, None if padding is None else (~padding).long())

    return measure


def trajectory_log_density(prior: EmbeddingPrior, x: Tensor) -> Tensor:
    """Log p(x) (B,) without any structure: Gaussian density of x - mu(x), log|det| of the T*D x T*D derivative."""
    sigma = prior.log_noise_scale.exp().item()
    totals = []
    for row in x:
        residual = row - attention_mean(row, *weights_of(prior))
        jacobian = trajectory_jacobian(row, *weights_of(prior)).reshape(row.numel(), row.numel())
        totals.append(gaussian_log_density(residual, sigma) + torch.linalg.slogdet(jacobian).logabsdet)
    return torch.stack(totals)


drawn = {
    "width": st.sampled_from([3, 2, 1]),
    "rank": st.sampled_from([None, 1, 2, 5]),
    "strength": st.sampled_from([1.0, 3.0, 0.3]),
    "seed": st.integers(0, 10_000),
}


@law
@given(**drawn)
def test_mean_equals_the_loop_over_the_past(width, rank, strength, seed):
    prior, x = prior_of(width, rank, strength=strength, seed=seed), embeddings(width=width, seed=seed)
    expected = torch.stack([attention_mean(row, *weights_of(prior)) for row in x])
    assert_close(prior.mean(x), expected, **laws.EXACT)


@law
@given(paddings(3, 5), st.integers(0, 10_000))
def test_mean_of_real_tokens_is_that_of_the_sequence_without_padding(padding, seed):
    prior, x = prior_of(seed=seed), embeddings(3, seed=seed)
    found = prior.mean(torch.where(padding[..., None], torch.nan, x), (~padding).long())
    assert torch.isfinite(found).all()
    for b, real in enumerate(~padding):
        if real.any():
            assert_close(found[b, real], attention_mean(x[b, real], *weights_of(prior)), **laws.EXACT)


@law
@given(**drawn)
def test_margins_equal_the_autograd_oracle(width, rank, strength, seed):
    prior, x = prior_of(width, rank, strength=strength, seed=seed), embeddings(width=width, seed=seed)
    rows = [oracle(row, *weights_of(prior)) for row in x]
    sign, log_abs_det, sigma_min = (torch.stack(parts) for parts in zip(*rows, strict=True))
    margins = prior.margins(x)
    laws.equals(margins, sign, log_abs_det, where=sigma_min > laws.BOUNDARY)
    assert_close(margins.sigma_min, sigma_min, **laws.EXACT)
    assert margins.valid.all()


@law
@given(paddings(3, 5), st.permutations(range(3)), st.integers(0, 10_000))
def test_margins_obey_the_shared_laws(padding, order, seed):
    prior, x = prior_of(seed=seed), embeddings(3, seed=seed)
    laws.rows_do_not_see_each_other(measure_of(prior), x, padding)
    laws.permuting_rows_permutes_results(measure_of(prior), x, order)
    laws.padding_changes_nothing(measure_of(prior), x, padding)
    assert_close(prior.margins(x, (~padding).long()).valid, ~padding)


def test_margins_at_some_positions_are_those_of_all():
    prior, x = prior_of(4), embeddings(3, 6, 4)
    mask = torch.tensor([[1] * 6, [0] * 2 + [1] * 4, [1] * 4 + [0] * 2])
    positions = torch.tensor([[5, 2], [0, 3], [3, 5]])
    every, some = prior.margins(x, mask), prior.margins(x, mask, positions=positions)
    laws.equals(some, every.sign.gather(1, positions), every.log_abs_det.gather(1, positions))
    assert_close(some.sigma_min, every.sigma_min.gather(1, positions), **laws.EXACT)
    assert_close(some.valid, every.valid.gather(1, positions))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_prior_is_computed_in_float32(dtype):
    prior, x = prior_of(6).to(dtype), embeddings(width=6)
    laws.sixteen_bit_input_is_computed_in_float32(measure_of(prior), x, dtype)


def test_float32_weights_take_sixteen_bit_embeddings():
    """What happens inside of a model that trains in mixed precision: the law stays float32, x arrives rounded."""
    prior, x = prior_of(6).float(), embeddings(width=6).bfloat16()
    expected = prior.log_prob(x.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = prior.log_prob(x)
    assert found.dtype == torch.float32
    assert_close(found, expected, rtol=1e-6, atol=1e-5)


# The density


@law
@given(noise_scale=st.sampled_from([1.0, 0.3, 2.5]), **drawn)
def test_log_prob_equals_the_change_of_variables_of_the_whole_trajectory(width, rank, strength, seed, noise_scale):
    prior = prior_of(width, rank, noise_scale, strength, seed)
    x = embeddings(width=width, seed=seed)
    assume(min(float(oracle(row, *weights_of(prior))[2].min()) for row in x) > laws.BOUNDARY)
    found = prior.log_prob(x)
    assert found.shape == (2,)
    assert_close(found, trajectory_log_density(prior, x), rtol=1e-10, atol=1e-10)


@law
@given(paddings(3, 5), st.integers(0, 10_000))
def test_log_prob_is_that_of_the_sequence_without_padding(padding, seed):
    prior, x = prior_of(noise_scale=0.5, seed=seed), embeddings(3, seed=seed)
    found = prior.log_prob(torch.where(padding[..., None], torch.nan, x), (~padding).long())
    for b, real in enumerate(~padding):
        alone = prior.log_prob(x[b : b + 1, real])[0] if real.any() else torch.zeros((), dtype=torch.float64)
        assert_close(found[b], alone, **laws.EXACT)


@pytest.mark.parametrize("side", ["left", "right"])
def test_attention_mask_of_transformers_marks_real_tokens_with_one(side):
    prior, x = prior_of(seed=3), embeddings(1, 6, seed=3)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]] if side == "left" else [[1, 1, 1, 1, 0, 0]])
    real = x[:, 2:] if side == "left" else x[:, :4]
    expected = prior.log_prob(real)
    for form in (mask, mask.bool(), mask.float()):
        assert_close(prior.log_prob(x, form), expected, **laws.EXACT)
    assert_close(prior.log_prob(x, torch.ones_like(mask)), prior.log_prob(x), **laws.EXACT)


@pytest.mark.parametrize("coupling", [-2.0, 0.5])
def test_density_of_the_next_embedding_integrates_to_one(coupling):
    """One dimension, before the boundary (a Var < 1): x_3 -> e_3 is a bijection, so p(x_3 | past) is a density."""
    prior = EmbeddingPrior(1).double()
    with torch.no_grad():
        prior.w_q.fill_(coupling)
        prior.w_k.fill_(1.0)
    grid = torch.linspace(-15, 15, 6001, dtype=torch.float64)
    past = torch.tensor([-1.2, 0.9], dtype=torch.float64).expand(len(grid), 2)
    joint = prior.log_prob(torch.cat([past, grid[:, None]], 1)[..., None])
    marginal = prior.log_prob(past[:1, :, None])
    assert_close(torch.trapezoid((joint - marginal).exp(), grid).item(), 1.0, rtol=0, atol=1e-8)


def test_prior_without_coupling_is_a_gaussian_around_the_average_of_the_past():
    prior, x = prior_of(strength=0.0, noise_scale=0.7), embeddings()
    average = torch.cumsum(x, 1) / torch.arange(1, 6, dtype=torch.float64)[None, :, None]
    mean = torch.cat([torch.zeros_like(x[:, :1]), average[:, :-1]], 1)
    expected = torch.distributions.Normal(mean, 0.7).log_prob(x).sum((1, 2))
    assert_close(prior.log_prob(x), expected, rtol=1e-6, atol=1e-6)


# Parameters and gradients


@pytest.mark.parametrize(("rank", "rows"), [(None, 4), (2, 2), (6, 6)])
def test_parameters_have_the_shapes_of_the_contract(rank, rows):
    prior = EmbeddingPrior(4, rank=rank, noise_scale=0.25)
    assert prior.w_q.shape == prior.w_k.shape == (rows, 4)
    parameters = dict(prior.named_parameters())
    assert set(parameters) == {"w_q", "w_k", "log_noise_scale"}
    assert_close(prior.log_noise_scale.detach(), torch.tensor(math.log(0.25)))
    again = EmbeddingPrior(4, rank=rank)
    again.load_state_dict(prior.state_dict())
    x = embeddings(width=4).float()
    assert_close(again.log_prob(x), prior.log_prob(x), rtol=0, atol=0)


def test_gradients_of_the_density_pass_gradcheck():
    prior, x = prior_of(2, noise_scale=0.8), embeddings(1, 4, 2).requires_grad_()
    names, leaves = zip(*[(n, p.detach().clone().requires_grad_()) for n, p in prior.named_parameters()], strict=True)

    def log_prob(x: Tensor, *parameters: Tensor) -> Tensor:
        class Density(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.prior = prior

            def forward(self, x: Tensor) -> Tensor:
                return self.prior.log_prob(x)

        named = {f"prior.{name}": p for name, p in zip(names, parameters, strict=True)}
        return torch.func.functional_call(Density(), named, (x,))

    assert torch.autograd.gradcheck(log_prob, (x, *leaves))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_stay_finite_where_the_block_is_exactly_singular(dtype):
    prior = EmbeddingPrior(1).to(dtype)
    with torch.no_grad():
        prior.w_q.fill_(1.0)
        prior.w_k.fill_(1.0)
    x = torch.tensor([[[-1.0], [1.0], [0.0], [0.3]]], dtype=dtype, requires_grad=True)
    assert prior.margins(x).sigma_min[0, 2] == 0
    laws.gradients_stay_finite(-prior.margins(x).log_abs_det, [x, prior.w_q, prior.w_k])
    laws.gradients_stay_finite(prior.log_prob(x), [x, *prior.parameters()])


# Bad arguments


@pytest.mark.parametrize(
    ("arguments", "name", "received"),
    [
        ({"width": 0}, "width", "0"),
        ({"width": 4, "rank": 0}, "rank", "0"),
        ({"width": 4, "noise_scale": 0.0}, "noise_scale", "0.0"),
        ({"width": 4, "noise_scale": float("nan")}, "noise_scale", "nan"),
    ],
)
def test_wrong_sizes_are_refused(arguments, name, received):
    with pytest.raises(ArgumentError, match=rf"\b{name}\b") as caught:
        EmbeddingPrior(**arguments)
    assert received in str(caught.value)


@pytest.mark.parametrize("method", ["mean", "margins", "log_prob"])
def test_wrong_shapes_are_named_with_what_is_required_and_received(method):
    call = getattr(EmbeddingPrior(3), method)
    with pytest.raises(ArgumentError, match=r"\bx\b") as caught:
        call(torch.ones(2, 5, 4))
    assert re.search(r"2\D+5\D+4", str(caught.value))
    assert "3" in str(caught.value)
    with pytest.raises(ArgumentError, match=r"\battention_mask\b") as caught:
        call(torch.ones(2, 5, 3), torch.ones(5, 2))
    assert re.search(r"5\D+2", str(caught.value))
