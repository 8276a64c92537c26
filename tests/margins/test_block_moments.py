"""Trace and Frobenius norm of Jacobian blocks against the blocks themselves, as autograd finds them, in float64."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from attention_states import law_state, model_state
from support_tokens.errors import ArgumentError
from support_tokens.margins import (
    AttentionState,
    BlockMoments,
    JacobianBlocks,
    block_moments,
    spread_of_block,
    state_from_weights,
)
from support_tokens.models import capture_attention
from textbook_law import block_spread
from tiny_models import attention_jacobians, everything_in_float64, left_and_right_padding, tiny_model

EXACT = {"rtol": 1e-11, "atol": 1e-10}
LAYERS = (0, 1)
# LayerNorm and an inclusive mask; rotary and grouped heads; QK norm too; softcap and a norm after attention; a QK norm
# over all heads at once.
FAMILIES = ("gpt2", "llama", "qwen3", "gemma2", "olmo2")
VIEWS = {"noise": -1, "block": 1}
every_view = pytest.mark.parametrize("view", VIEWS)


def figures(matrices: Tensor, view: str) -> BlockMoments:
    """Of J = I + D or I - D for matrices D `(..., D, D)`."""
    jacobian = torch.eye(matrices.shape[-1], dtype=matrices.dtype) + VIEWS[view] * matrices
    return BlockMoments(torch.einsum("...ii->...", jacobian), jacobian.square().sum((-2, -1)))


def dense(state: AttentionState, view: str, positions: slice | Tensor | None = None) -> BlockMoments:
    return figures(JacobianBlocks(state).dense(slice(0, state.length) if positions is None else positions), view)


def agree(found: BlockMoments, expected: BlockMoments, where: Tensor | None = None) -> None:
    where = torch.ones_like(expected.trace, dtype=torch.bool) if where is None else where
    for one, other in zip(found, expected, strict=True):
        assert one.shape == where.shape
        assert_close(one[where], other[where], **EXACT)


@every_view
@pytest.mark.parametrize("name", FAMILIES)
def test_moments_are_those_of_autograds_jacobians(name: str, view: str) -> None:
    model = tiny_model(name)
    ids, mask = left_and_right_padding()
    real = mask.bool()
    with everything_in_float64():
        jacobians = attention_jacobians(model, name, LAYERS, input_ids=ids, attention_mask=mask)
        with torch.no_grad(), capture_attention(model, LAYERS) as capture:
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    positions = torch.tensor([[6, 2, 3], [0, 4, 1], [5, 5, 0]])
    for layer, state in capture.states(mask).items():
        found = block_moments(state, view=view)
        agree(found, figures(jacobians[layer], view), real)
        for padding in (value[~real] for value in found):
            assert_close(padding, torch.full_like(padding, state.width), rtol=0, atol=0)
        index = positions[..., None, None].expand(-1, -1, state.width, state.width)
        agree(block_moments(state, view=view, positions=positions), figures(jacobians[layer].gather(1, index), view))
        agree(block_moments(state, view=view, positions=positions, chunk_size=2), dense(state, view, positions))


@every_view
@pytest.mark.parametrize("make", [law_state, model_state])
def test_gradients_are_those_of_the_dense_blocks(make, view: str) -> None:
    """By all that a state is made of, with and without chunks that are recomputed."""
    state, leaves = make()
    weight = torch.linspace(-1, 1, 2 * state.batch * state.length, dtype=torch.float64).view(2, state.batch, -1)

    def gradients(moments: BlockMoments) -> tuple[Tensor, ...]:
        return torch.autograd.grad((weight * torch.stack(moments)).sum(), leaves, retain_graph=True)

    expected = gradients(dense(state, view))
    for chunk_size in (None, 2):
        found = gradients(block_moments(state, view=view, chunk_size=chunk_size))
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_gradients_are_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 3, 4), (2, 2, 4), (2, 2, 4), (2, 3, 4), (2, 4, 3)
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]

    def measured(*tensors: Tensor) -> tuple[Tensor, ...]:
        moments = block_moments(state_from_weights(*tensors, strict=False))
        return *moments, spread_of_block(moments, 4)

    assert torch.autograd.gradcheck(measured, inputs)


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_gradients_reach_the_parameters_of_a_model(name: str) -> None:
    model = tiny_model(name).train()
    ids, mask = left_and_right_padding()
    with everything_in_float64(), capture_attention(model, LAYERS) as capture:
        model(input_ids=ids, attention_mask=mask, use_cache=False)
        state = capture.states(mask)[1]
        parameters = list(model.parameters())
        wanted = [
            spread_of_block(moments, state.width).sum() for moments in (block_moments(state), dense(state, "block"))
        ]
        found, expected = (torch.autograd.grad(w, parameters, retain_graph=True, allow_unused=True) for w in wanted)
    assert any(grad is not None and grad.abs().max() > 1e-3 for grad in found)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_float32_is_float64_rounded() -> None:
    exact = tiny_model("qwen3")
    ids, mask = left_and_right_padding()
    found = []
    for model in (exact, tiny_model("qwen3", dtype=torch.float32)):
        with torch.no_grad(), everything_in_float64(model is exact), capture_attention(model, LAYERS) as capture:
            model(input_ids=ids, attention_mask=mask, use_cache=False)
        found.append(block_moments(capture.states(mask)[0]))
    for wide, narrow in zip(*found, strict=True):
        assert narrow.dtype == torch.float32
        assert_close(narrow.double(), wide, rtol=1e-5, atol=1e-4)


def test_one_dimension_by_hand() -> None:
    # Keys at -1 and 1 seen from 0 have weights 1/2 each: variance 1, so that D = a at the last position, 0 before.
    x = torch.tensor([[[-1.0], [1.0], [0.0]]], dtype=torch.float64)
    state = state_from_weights(x, x.new_full((1, 1, 1), 3.0), x.new_ones(1, 1, 1), scale=1.0)
    assert block_moments(state, view="noise").trace[0, 2].item() == pytest.approx(1 - 3)
    assert block_moments(state, view="block").trace[0, 2].item() == pytest.approx(1 + 3)
    assert block_moments(state, view="block").square[0, 2].item() == pytest.approx(16)
    assert block_moments(state).trace[0, 0].item() == 1


def test_an_empty_batch_has_a_graph() -> None:
    x, w = torch.zeros(0, 5, 4, requires_grad=True), torch.zeros(1, 3, 4)
    moments = block_moments(state_from_weights(x, w, w))
    assert moments.trace.shape == moments.square.shape == (0, 5)
    moments.square.sum().backward()
    assert x.grad is not None


def test_an_unknown_view_is_refused() -> None:
    with pytest.raises(ArgumentError, match="view must be 'noise' or 'block', received 'both'"):
        block_moments(law_state()[0], view="both")


def spread(jacobian: Tensor) -> Tensor:
    return spread_of_block(figures(jacobian - torch.eye(len(jacobian), dtype=jacobian.dtype), "block"), len(jacobian))


def test_spread_is_the_textbooks() -> None:
    # diag(3, 1): 2 * 10 / 16; a quarter turn around one of three axes: 3 * 3 / 1.
    turn = torch.tensor([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]], dtype=torch.float64)
    assert spread(torch.diag(torch.tensor([3.0, 1.0]))).item() == pytest.approx(math.log(20 / 16))
    assert spread(turn).item() == pytest.approx(math.log(9))
    matrices = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 4
    assert_close(spread_of_block(figures(matrices, "block"), 5), block_spread(matrices), **EXACT)


@pytest.mark.parametrize("factor", [-4.0, 1e-3, 0.0, 0.1, 7.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_spread_is_zero_at_multiples_of_the_identity_and_scale_free(factor: float, dtype: torch.dtype) -> None:
    identity = torch.eye(7, dtype=dtype)
    assert 0 <= spread(factor * identity).item() <= 8 * torch.finfo(dtype).eps
    stretched = torch.diag(torch.linspace(1, 2, 7, dtype=dtype))
    if factor:
        assert_close(spread(factor * stretched), spread(stretched), rtol=1e-5, atol=0)


def test_spread_has_a_bounded_gradient_where_the_trace_vanishes() -> None:
    base = torch.tensor([[0.0, 2.0], [-2.0, 0.0]], dtype=torch.float64)  # norm sqrt(8), trace 0
    values, norms = [], []
    for trace in torch.cat((torch.zeros(1), torch.logspace(-8, 0, 60))).tolist():
        jacobian = (base + trace / 2 * torch.eye(2, dtype=torch.float64)).requires_grad_()
        value = spread_of_block(BlockMoments(jacobian.trace(), jacobian.square().sum()), 2)
        (gradient,) = torch.autograd.grad(value, jacobian)
        values.append(value.item())
        norms.append((gradient.norm() * jacobian.norm()).item())
    assert values[0] == pytest.approx(1 + math.log(1e4))
    assert values == sorted(values, reverse=True)
    assert 100 < max(norms) <= 200
    # Next to the floor, at (tr J)^2 = 1e-4 * 2 * 8, the logarithm and its tangent meet.
    at_floor = [spread_of_block(BlockMoments(*torch.tensor([t, 8.0]).double()), 2).item() for t in (0.03999, 0.04001)]
    assert at_floor == pytest.approx([-math.log(t**2 / 16) for t in (0.03999, 0.04001)], abs=1e-6)
