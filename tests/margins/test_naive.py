"""The oracles measure the package, so they are measured first: against each other and against limits known by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from naive import attention_mean, diagonal_blocks, oracle, textbook_blocks, textbook_slogdet, trajectory_jacobian
from strategies import every_configuration, law, paddings, problem, problems

EXACT = {"rtol": 1e-10, "atol": 1e-10}


@every_configuration
@law
@given(data=st.data())
def test_textbook_formula_equals_autograd(configuration, data):
    case = data.draw(problems(**configuration))
    for row in case.x:
        blocks = diagonal_blocks(trajectory_jacobian(row, *case.weights, **case.options))
        assert_close(textbook_blocks(row, *case.weights, **case.options), blocks, **EXACT)


@every_configuration
@law
@given(data=st.data())
def test_textbook_formula_equals_autograd_under_padding(configuration, data):
    case = data.draw(problems(**configuration, batch=1))
    row, padding = case.x[0], data.draw(paddings(1, case.x.shape[1]))[0]
    blocks = diagonal_blocks(trajectory_jacobian(row, *case.weights, padding=padding, **case.options))
    assert_close(textbook_blocks(row, *case.weights, padding=padding, **case.options), blocks, **EXACT)


@every_configuration
@law
@given(data=st.data())
def test_trajectory_map_is_causal(configuration, data):
    case = data.draw(problems(**configuration))
    jacobian = trajectory_jacobian(case.x[0], *case.weights, **case.options)
    for t in range(len(jacobian)):
        assert not jacobian[t, :, t + 1 :, :].any(), f"position {t} moves with its future"


@pytest.mark.parametrize("strict", [True, False])
def test_grouped_heads_equal_repeated_heads(strict):
    case = problem(heads=4, value_width=2, strict=strict)
    w_q, w_k, w_v, w_o = case.weights
    grouped = textbook_blocks(case.x[0], w_q, w_k[:2], w_v[:2], w_o, strict=strict)
    repeated = textbook_blocks(case.x[0], w_q, w_k[[0, 0, 1, 1]], w_v[[0, 0, 1, 1]], w_o, strict=strict)
    assert_close(grouped, repeated, **EXACT)
    by_autograd = diagonal_blocks(trajectory_jacobian(case.x[0], w_q, w_k[:2], w_v[:2], w_o, strict=strict))
    assert_close(grouped, by_autograd, **EXACT)


def test_one_dimension_by_hand():
    # Keys at -1 and 1 seen from 0 have weights 1/2 each, so Var = 1 and the margin is 1 - a.
    x = torch.tensor([[-1.0], [1.0], [0.0]], dtype=torch.float64)
    for a in (-2.0, 0.25, 1.0, 3.0):
        w_q, w_k = torch.full((1, 1, 1), a, dtype=torch.float64), torch.ones(1, 1, 1, dtype=torch.float64)
        sign, _, sigma_min = oracle(x, w_q, w_k, scale=1.0)
        assert sigma_min[-1] == abs(1 - a)
        assert sign[-1] == float(torch.sign(torch.tensor(1 - a)))
        assert_close(textbook_blocks(x, w_q, w_k, scale=1.0)[-1, 0, 0].item(), 1 - a)


def test_mean_without_keys_is_zero_and_without_queries_is_the_average():
    case = problem(length=4)
    x, w_k = case.x[0], case.weights[1]
    mean = attention_mean(x, torch.zeros_like(w_k), w_k)
    averages = torch.stack([x[:t].mean(0) if t else torch.zeros_like(x[0]) for t in range(4)])
    assert_close(mean, averages, **EXACT)
    assert not textbook_slogdet(x, torch.zeros_like(w_k), w_k)[1].any()
