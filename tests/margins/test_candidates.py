"""The screen for support tokens: first order exact for the law, deterministic, and worth more than chance."""

import pytest
import torch
from torch.testing import assert_close

from attention_states import model_state
from barrier_models import attached, batch, language_model
from support_tokens.errors import ArgumentError
from support_tokens.margins import (
    JacobianBlocks,
    attention_margins,
    first_order_margins,
    gradient_share,
    state_from_weights,
    state_margins,
    support_candidates,
)
from support_tokens.margins.linalg import is_near_singular, safe_slogdet, sigma_min


def law_state(batch: int = 4, length: int = 48, strength: float = 1.5, **options):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, length, 8, generator=generator, dtype=torch.float64)
    w = strength * torch.randn(1, 4, 8, generator=generator, dtype=torch.float64) / 8**0.5
    return state_from_weights(x, w, w, **options)


def test_first_order_margin_of_the_law_is_minus_the_trace() -> None:
    state = law_state()
    trace = JacobianBlocks(state).dense(slice(0, state.length)).diagonal(dim1=-2, dim2=-1).sum(-1)
    assert_close(first_order_margins(state), -trace)


def test_it_is_the_derivative_of_the_exact_margin_at_no_coupling() -> None:
    state = law_state(strength=1e-3)
    assert_close(first_order_margins(state), state_margins(state).log_abs_det, rtol=1e-4, atol=1e-12)


def test_candidates_are_valid_sorted_and_the_same_again() -> None:
    padding = torch.zeros(4, 48, dtype=torch.bool)
    padding[:, 30:] = True
    state = law_state(key_padding_mask=padding)
    found = support_candidates(state, 7)
    assert found.shape == (4, 7)
    assert (found < 30).all()
    assert (found.diff(dim=1) > 0).all()
    assert_close(found, support_candidates(state, 7))
    assert support_candidates(state, 100).shape == (4, 48)


def test_candidates_find_support_tokens_and_carry_more_of_the_gradient_than_others() -> None:
    state = law_state(strength=1.0)
    exact = state_margins(state).support_tokens(6)
    found = support_candidates(state, 12)
    hit = (exact.unsqueeze(-1) == found.unsqueeze(1)).any(-1).double().mean()
    assert hit > 0.5  # by chance it would be 12 of 48
    every = torch.arange(48).expand(4, 48)
    assert_close(gradient_share(state, every), torch.ones((), dtype=torch.float64))
    assert gradient_share(state, found) > 12 / 48


def test_screen_of_a_models_own_attention_is_its_own_value_part() -> None:
    state, _ = model_state()
    score = first_order_margins(state, "block")
    assert score.shape == (3, 6)
    assert not score[1, -2:].any()
    assert_close(first_order_margins(state), -score)


def test_candidates_are_what_can_be_ranked_and_only_that_counts() -> None:
    segments = torch.tensor([[0] * 6, [0, 0, 0, 1, 1, 1]])  # rankable: 2 to 5, and the third of each document
    state = law_state(2, 6, segments=segments)
    found = support_candidates(state, 4)
    assert found[0].tolist() == [2, 3, 4, 5]
    assert {2, 5} < set(found[1].tolist())
    assert_close(gradient_share(state, found), torch.ones((), dtype=torch.float64))
    empty = torch.tensor([[0, 1], [0, 1]])
    assert gradient_share(state, empty) == 0


@pytest.mark.parametrize("count", [2, 4])
def test_the_barrier_is_the_mean_over_rankable_candidates(count: int) -> None:
    model, data = language_model(), batch(3, 5)
    handle = attached(model, positions="support", candidates=count, penalty="hinge", target_margin=5.0)
    seen = []
    model.transformer.h[0].register_forward_pre_hook(lambda _m, args: seen.append(args[0].detach()))
    model(**data)
    state = handle.law.state(seen[0])
    exact, positions = state_margins(state).log_abs_det, support_candidates(state, count)
    wanted = [(5.0 - m[p[p >= 2]]).clamp_min(0).mean() for m, p in zip(exact, positions, strict=True)]
    assert handle.last["penalty"] == pytest.approx(torch.stack(wanted).mean().item(), rel=1e-9)


@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)])
def test_empty_batches_have_empty_margins_and_a_graph(shape: tuple[int, int]) -> None:
    x, w = torch.randn(*shape, 4, requires_grad=True), torch.randn(1, 3, 4, requires_grad=True)
    padding = torch.zeros(shape, dtype=torch.bool)
    for options in ({}, {"strict": False, "view": "block"}, {"key_padding_mask": padding}):
        margins = attention_margins(x, w, w, **options)
        assert margins.sign.shape == margins.log_abs_det.shape == margins.sigma_min.shape == shape
        assert margins.support_tokens(2).shape == (shape[0], 2)
        (found,) = torch.autograd.grad(margins.log_abs_det.sum(), w)
        assert not found.any()
    assert support_candidates(state_from_weights(x, w, w), 2).shape == (shape[0], min(2, shape[1]))


def test_empty_matrices_have_determinant_one_and_no_singular_value() -> None:
    empty = torch.zeros(3, 0, 0, requires_grad=True)
    found = safe_slogdet(empty)
    expected = torch.linalg.slogdet(empty)
    assert torch.equal(found.sign, expected.sign) and torch.equal(found.log_abs_det, expected.logabsdet)
    found.log_abs_det.sum().backward()
    for function in (sigma_min, is_near_singular):
        with pytest.raises(ArgumentError, match="at least one row"):
            function(empty)
