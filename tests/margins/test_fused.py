"""The fused penalty against the plain one, gradients against finite differences, and elimination against LAPACK."""

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention_states import BATCH, LENGTH, drawn, law_state, model_state
from support_tokens.law import EmbeddingPrior
from support_tokens.margins import (
    AttentionState,
    LowRankBlocks,
    assemble,
    block_penalty,
    fused_penalty,
    state_from_weights,
    state_margins,
)
from support_tokens.margins.linalg import elimination, slogdet_and_inverse


def smooth(log_margin: Tensor) -> Tensor:
    """A penalty with a kink-free slope that changes sign."""
    return log_margin.sin() - 0.3 * log_margin


STATES = pytest.mark.parametrize("make", [law_state, model_state], ids=["law", "model"])


def weights(positions: Tensor | None) -> Tensor:
    count = LENGTH if positions is None else positions.shape[1]
    return torch.rand(BATCH, count, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@STATES
@pytest.mark.parametrize("view", ["noise", "block"])
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("positions", [None, torch.tensor([[0, 3, 5], [1, 2, 4], [5, 3, 2]])], ids=["all", "some"])
def test_fused_is_the_plain_sum_and_its_gradient(
    make: Callable, view: str, chunk_size: int | None, positions: Tensor | None
) -> None:
    weight = weights(positions)
    state, leaves = make()
    plain = (weight * smooth(state_margins(state, view=view, positions=positions).log_abs_det)).sum()
    expected = torch.autograd.grad(plain, leaves)
    state, leaves = make()
    fused, margins = fused_penalty(state, weight, smooth, view=view, positions=positions, chunk_size=chunk_size)
    assert_close(fused, plain, rtol=0, atol=1e-12)
    assert not margins.log_abs_det.requires_grad
    for found, wanted in zip(torch.autograd.grad(2 * fused, leaves), expected, strict=True):
        assert_close(found, 2 * wanted, rtol=1e-9, atol=1e-9)


@STATES
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_gradient_passes_gradcheck(make: Callable, fused: bool) -> None:
    _, leaves = make()

    def penalty(x: Tensor) -> Tensor:
        state = state_from_weights(x, *leaves[1:]) if make is law_state else _with_query(make()[0], x)
        if fused:
            return fused_penalty(state, weights(None), smooth)[0]
        return (weights(None) * smooth(state_margins(state).log_abs_det)).sum()

    x = leaves[0] if make is law_state else make()[0].query.detach().requires_grad_()
    assert torch.autograd.gradcheck(penalty, x)


def _with_query(state: AttentionState, query: Tensor) -> AttentionState:
    from dataclasses import replace

    return replace(state, query=query)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_second_order_is_exact(fused: bool) -> None:
    x, w_q, w_k = drawn(1, 3, 4, seed=0), drawn(1, 2, 4, seed=1), drawn(1, 2, 4, seed=2)
    weight = torch.ones(1, 3, dtype=torch.float64)

    def penalty(x: Tensor, w_q: Tensor) -> Tensor:
        state = state_from_weights(x, w_q, w_k)
        if fused:
            return fused_penalty(state, weight, smooth)[0]
        return (weight * smooth(state_margins(state).log_abs_det)).sum()

    assert torch.autograd.gradgradcheck(penalty, (x, w_q))


def test_without_gradients_the_margins_are_those_of_the_plain_path() -> None:
    state, _ = law_state()
    with torch.no_grad():
        value, margins = fused_penalty(state, weights(None), smooth)
    assert_close(value, (weights(None) * smooth(margins.log_abs_det)).sum())
    assert not value.requires_grad


class _NoHost(TorchDispatchMode):
    """Raises where a value of a tensor is asked for, which on an accelerator would wait for it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        assert not name.startswith(("aten._local_scalar_dense", "aten.item", "aten.nonzero", "aten.is_nonzero")), name
        return func(*args, **(kwargs or {}))


@STATES
@pytest.mark.parametrize("positions", [None, torch.tensor([[0, 3], [1, 2], [5, 2]])], ids=["all", "some"])
def test_a_step_asks_the_device_for_nothing(make: Callable, positions: Tensor | None, monkeypatch) -> None:
    # On a processor elimination and the reach of keys look at values; what any other device runs is asked for here.
    monkeypatch.setattr(elimination, "_LEAF", 10**6)
    monkeypatch.setattr(sys.modules["support_tokens.margins.moments"], "_reach", lambda positions, offset: None)
    state, leaves = make()
    with _NoHost():
        value, _ = fused_penalty(state, weights(positions), smooth, positions=positions)
        torch.autograd.grad(value, leaves)


def test_no_large_array_outlives_its_chunk() -> None:
    """Memory is that of chunks: nothing of the size of all positions' matrices, or of T x R^2, is ever made."""
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.untyped_storage().nbytes() for t in tree_leaves(out) if torch.is_tensor(t))
            return out

    law, x = EmbeddingPrior(32, 32), torch.randn(1, 512, 32, requires_grad=True)
    state = law.state(x)
    with Sizes():
        fused_penalty(state, torch.ones(1, 512), smooth, chunk_size=8)
    assert max(sizes) < 512 * 32 * 32 * 4 / 4


def test_positions_drawn_uniformly_give_the_full_gradient_on_average() -> None:
    state, leaves = law_state()
    every = torch.full((BATCH, LENGTH), 1 / (BATCH * LENGTH), dtype=torch.float64)
    full, _ = fused_penalty(state, every, torch.neg)
    (expected,) = torch.autograd.grad(full, leaves[0])
    # All pairs of positions, once each: the mean over draws of two without replacement, without any noise.
    pairs = torch.combinations(torch.arange(LENGTH), 2)
    values, gradients = [], []
    for pair in pairs:
        state, leaves = law_state()
        weight = torch.full((BATCH, 2), 1 / (BATCH * 2), dtype=torch.float64)
        value, _ = fused_penalty(state, weight, torch.neg, positions=pair.expand(BATCH, 2))
        values.append(value.detach())
        gradients.append(torch.autograd.grad(value, leaves[0])[0])
    assert_close(torch.stack(values).mean(), full.detach())
    assert_close(torch.stack(gradients).mean(0), expected)


@pytest.mark.parametrize("side", [20, 32, 50])
def test_many_matrices_near_the_identity_need_no_pivoting(monkeypatch, side: int) -> None:
    monkeypatch.setattr(elimination, "_by_pivoting", lambda m: pytest.fail("done again"))
    noise = torch.randn(150, side, side, generator=torch.Generator().manual_seed(side))
    matrix = torch.eye(side) - 0.5 * noise @ noise.mT / side / 4
    matrix[0] *= -1.0
    sign, log_abs_det, inverse = slogdet_and_inverse(matrix)
    expected = torch.linalg.slogdet(matrix.double())
    assert_close(sign.double(), expected.sign)
    assert_close(log_abs_det.double(), expected.logabsdet, rtol=0, atol=1e-4)
    assert_close(inverse, torch.linalg.inv(matrix.double()).float(), rtol=1e-3, atol=1e-3)


def test_batch_of_no_sequences_has_a_penalty_of_zero_and_no_gradient() -> None:
    x = torch.randn(0, 5, 4, requires_grad=True)
    w = torch.randn(1, 3, 4, requires_grad=True)
    value, margins = fused_penalty(state_from_weights(x, w, w), torch.zeros(0, 5), torch.neg)
    value.backward()
    assert value.item() == 0.0 and margins.log_abs_det.shape == (0, 5)
    assert not w.grad.any() and x.grad.shape == x.shape


# Few matrices are eliminated by LAPACK where they are small, many row by row.
@pytest.mark.parametrize(
    ("count", "side"),
    [(7, 3), (7, 16), (7, 17), (7, 32), (7, 50), (7, 130), (150, 16), (150, 17), (150, 32), (150, 50)],
)
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_elimination_is_the_inverse_and_the_determinant(count: int, side: int, spread: float) -> None:
    noise = torch.randn(count, side, side, generator=torch.Generator().manual_seed(side), dtype=torch.float64)
    matrix = torch.eye(side, dtype=torch.float64) + spread * noise / side**0.5
    matrix[0, 0, 0] = matrix[1, : side // 2, : side // 2] = 0.0  # a pivot, and a whole leading block, that are no use
    sign, log_abs_det, inverse = slogdet_and_inverse(matrix)
    expected = torch.linalg.slogdet(matrix)
    assert_close(sign, expected.sign)
    assert_close(log_abs_det, expected.logabsdet, rtol=0, atol=1e-8)
    assert_close(inverse @ matrix, torch.eye(side, dtype=torch.float64).expand_as(matrix), rtol=0, atol=1e-7)


def test_elimination_without_use_is_found_out_and_done_again(monkeypatch) -> None:
    pivoted = []
    original = elimination._by_pivoting
    monkeypatch.setattr(elimination, "_by_pivoting", lambda m: (pivoted.append(m.shape), original(m))[1])
    matrix = torch.eye(32).repeat(4, 1, 1)
    matrix[2] = matrix[2].flip(0)  # its leading block is 0
    sign, log_abs_det, inverse = slogdet_and_inverse(matrix)
    assert torch.Size([1, 32, 32]) in pivoted
    assert_close(inverse, matrix.mT)
    assert_close(log_abs_det, torch.zeros(4))
    assert_close(sign, torch.linalg.slogdet(matrix).sign)


@pytest.mark.parametrize(("count", "side"), [(3, 4), (3, 40), (200, 40)])
def test_singular_matrices_are_silent_in_elimination(count: int, side: int) -> None:
    matrix = torch.eye(side).repeat(count, 1, 1)
    matrix[1, :, -1] = 0.0
    sign, log_abs_det, inverse = slogdet_and_inverse(matrix)
    assert sign.tolist() == [1.0, 0.0] + [1.0] * (count - 2)
    assert torch.isfinite(log_abs_det).all()
    assert not inverse[1].any()


def test_penalty_of_factors_is_that_of_the_assembled_matrix() -> None:
    heads, height, inner, rank = 2, 3, 2, 2
    side = heads * height
    factors = LowRankBlocks.of(
        drawn(2, heads, 4, height, inner, seed=0),
        drawn(heads, inner, side, seed=1),
        drawn(2, heads, 4, seed=2),
        drawn(heads, height, side, seed=3),
        drawn(2, 4, side, rank, seed=4),
        drawn(2, 4, rank, side, seed=5),
    )
    weight = torch.rand(2, 4, dtype=torch.float64)
    found = block_penalty(factors, -1, weight, smooth, chunk_size=3)
    identity = torch.eye(side, dtype=torch.float64)
    expected = (weight * smooth(torch.linalg.slogdet(identity - assemble(factors)).logabsdet)).sum()
    assert_close(found.value, expected.detach())
    for one, other in zip(
        found.gradient, torch.autograd.grad(expected, [t for t in factors if t is not None]), strict=True
    ):
        assert_close(one, other, rtol=1e-9, atol=1e-9)
