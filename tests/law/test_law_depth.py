"""A stack of laws: what a layer adds to the log-density, against autograd's Jacobian of the whole stack."""

import math

import pytest
import torch
from scipy import integrate
from torch import Tensor
from torch.testing import assert_close

from naive import gaussian_log_density
from support_tokens.errors import ArgumentError
from support_tokens.law import EmbeddingPrior, LawStack, LayerLaw


def stack_of(*queries: str, width=2, noise_scale=0.6) -> LawStack:
    generator = torch.Generator().manual_seed(0)
    prior = EmbeddingPrior(width, noise_scale=noise_scale, generator=generator)
    layers = [LayerLaw(width, noise_scale=0.8, query=q, generator=generator) for q in queries]
    return LawStack(prior, layers).double()


def normal(*shape: int, seed=0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive_layer_mean(layer: LayerLaw, x: Tensor, below: Tensor) -> Tensor:
    """Loops over positions and keys of one sequence (T, D), inclusive mask."""
    rows = []
    for t in range(len(below)):
        asking = layer.w_q @ (x[t] if layer.query == "own" else below[t])
        scores = torch.stack([asking @ (layer.w_k @ below[s]) for s in range(t + 1)]) / math.sqrt(len(layer.w_q))
        rows.append(torch.softmax(scores, 0) @ below[: t + 1])
    return torch.stack(rows)


def all_noise(stack: LawStack, flat: Tensor, length: int) -> Tensor:
    """Noise of all layers as a function of all embeddings of one sequence, both flat."""
    x = flat.reshape(1 + len(stack.layers), length, -1)
    noise = [stack.prior.residual(x[:1])[0]]
    for layer, above, below in zip(stack.layers, x[1:], x[:-1], strict=True):
        noise.append(above - naive_layer_mean(layer, above, below))
    return torch.cat([n.flatten() for n in noise])


@pytest.mark.parametrize("query", ["below", "own"])
def test_mean_equals_the_loop(query):
    layer, x, below = LayerLaw(3, rank=2, query=query).double(), normal(2, 5, 3), normal(2, 5, 3, seed=1)
    expected = torch.stack([naive_layer_mean(layer, a, b) for a, b in zip(x, below, strict=True)])
    assert_close(layer.mean(x, below), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("queries", [("below", "below"), ("below", "own"), ("own", "own")])
def test_log_density_is_the_change_of_variables_of_the_whole_stack(queries):
    """No structure is used: the determinant is that of the Jacobian of all embeddings of all layers at once."""
    stack, length = stack_of(*queries), 4
    x = normal(3, length, 2, seed=3)
    jacobian = torch.autograd.functional.jacobian(lambda f: all_noise(stack, f, length), x.flatten())
    total = torch.linalg.slogdet(jacobian).logabsdet
    noise = all_noise(stack, x.flatten(), length).reshape(3, -1)
    expected = gaussian_log_density(noise[0], 0.6) + sum(gaussian_log_density(n, 0.8) for n in noise[1:]) + total
    found = stack.log_prob([row[None] for row in x])
    assert_close(found[0], expected, rtol=1e-6, atol=1e-6)
    terms = torch.cat(stack.jacobian_terms([row[None] for row in x]))
    assert_close(terms.sum(), total, rtol=1e-9, atol=1e-9)
    for term, query in zip(terms[1:], queries, strict=True):
        assert (term == 0) == (query == "below")


def test_weights_from_below_make_a_shift_and_own_weights_do_not():
    """The block of autograd's Jacobian from a layer to its own noise is exactly the identity, or is not."""
    for query in ("below", "own"):
        stack = stack_of(query)
        jacobian = torch.autograd.functional.jacobian(lambda f, s=stack: all_noise(s, f, 4), normal(2 * 4 * 2))
        block = jacobian[8:, 8:]
        assert torch.equal(block, torch.eye(8, dtype=torch.float64)) == (query == "below")


def test_log_density_is_the_embedding_term_plus_shifts():
    stack = stack_of("below", "below")
    x = stack.sample(3, 5, torch.Generator().manual_seed(1))
    shifts = sum(
        torch.distributions.Normal(layer.mean(above, below), 0.8).log_prob(above).sum((1, 2))
        for layer, above, below in zip(stack.layers, x[1:], x[:-1], strict=True)
    )
    assert_close(stack.log_prob(x), stack.prior.log_prob(x[0]) + shifts, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("query", ["below", "own"])
def test_samples_of_a_layer_have_the_noise_they_were_made_from(query):
    layer, below = LayerLaw(3, rank=2, noise_scale=0.5, query=query).double(), normal(4, 6, 3)
    x = layer.sample(below, torch.Generator().manual_seed(2))
    noise = 0.5 * torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert_close(x - layer.mean(x, below), noise, rtol=0, atol=1e-6)


def test_own_queries_keep_a_density_where_certified():
    """One dimension, repulsive: given the layer below, the density of one position integrates to one."""
    layer = LayerLaw(1, query="own").double()
    with torch.no_grad():
        layer.w_q.fill_(-1.5)
        layer.w_k.fill_(1.0)
    below = torch.tensor([[[-1.0], [1.2]]], dtype=torch.float64)
    first = torch.distributions.Normal(-1.0, 1.0).log_prob(torch.tensor(0.0)).item()

    def density(value: float) -> float:
        x = torch.tensor([[[0.0], [value]]], dtype=torch.float64)
        return math.exp(layer.log_prob(x, below).item() - first)

    assert integrate.quad(density, -15, 15, limit=200)[0] == pytest.approx(1, abs=1e-6)


def test_gradients_reach_every_layer():
    stack = stack_of("below", "own")
    (-stack.log_prob([normal(2, 4, 2, seed=s) for s in range(3)]).sum()).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in stack.parameters())


def test_what_does_not_fit_is_refused():
    with pytest.raises(ArgumentError, match=r"below, own.*'above'"):
        LayerLaw(3, query="above")
    with pytest.raises(ArgumentError, match=r"widths \[3, 4\]"):
        LawStack(EmbeddingPrior(3), [LayerLaw(4)])
    with pytest.raises(ArgumentError, match="2 in all, received 1"):
        LawStack(EmbeddingPrior(3), [LayerLaw(3)]).log_prob([torch.zeros(1, 2, 3)])
    with pytest.raises(ArgumentError, match=r"\(B, T, 3\)"):
        LayerLaw(3).mean(torch.zeros(1, 2, 3), torch.zeros(1, 3, 3))
