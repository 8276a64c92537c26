"""Laws of the penalties, of the sampler of positions, of schedules and of the controller."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from barrier_models import attached, batch, language_model
from naive import textbook_slogdet
from support_tokens import ArgumentError, MarginController, WarmupSchedule, attention_margins
from support_tokens.regularizers.barrier import PENALTIES, margin_penalty, sample_positions, token_weights

EXACT = {"rtol": 0.0, "atol": 1e-12}


def example(seed: int = 0, batch: int = 2, length: int = 6, width: int = 4):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()  # noqa: E731
    return draw(batch, length, width), draw(1, 3, width), draw(1, 3, width)


@given(st.integers(0, 10_000), st.floats(-2, 2))
def test_penalties_are_their_formulas(seed: int, target: float) -> None:
    x, w_q, w_k = example(seed)
    margins = attention_margins(x, w_q, w_k).log_abs_det
    log_abs_det = torch.stack([textbook_slogdet(row, w_q, w_k)[1] for row in x])
    close = {"rtol": 1e-9, "atol": 1e-9}
    assert_close(margin_penalty("log")(margins), -log_abs_det, **close)
    assert_close(margin_penalty("map")(margins), -log_abs_det, **close)
    hinge = torch.tensor([[max(0.0, target - v) for v in row] for row in log_abs_det.tolist()], dtype=torch.float64)
    assert_close(margin_penalty("hinge", target)(margins), hinge, **close)


def test_the_hinge_pulls_at_support_tokens_only() -> None:
    x, w_q, w_k = example()
    margins = attention_margins(x, w_q, w_k)
    target = margins.log_abs_det.detach().flatten().median().item() + 1e-9
    penalty = margin_penalty("hinge", target)(margins.log_abs_det)
    (pull,) = torch.autograd.grad(penalty.sum(), margins.log_abs_det)
    assert torch.equal(pull != 0, margins.log_abs_det < target)
    assert torch.equal(pull[pull != 0], -torch.ones_like(pull[pull != 0]))


def test_unknown_penalties_are_refused() -> None:
    with pytest.raises(ArgumentError, match="penalty must be one of log, hinge, map, received 'ridge'"):
        margin_penalty("ridge")
    assert PENALTIES == ("log", "hinge", "map")


def test_token_weights_make_the_mean_over_valid_tokens_of_shares_of_tokens() -> None:
    valid = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    share = valid.sum(-1) / valid.sum()
    assert_close(token_weights(valid, share), valid / 4)


def draws(valid: torch.Tensor, count: int):
    """All that the sampler may give, one sequence after the other, each with the same probability."""
    rows = []
    for row in valid.tolist():
        real = [t for t, is_real in enumerate(row) if is_real]
        rest = [t for t, is_real in enumerate(row) if not is_real]
        chosen = [sorted(c) for c in itertools.combinations(real, min(count, len(real)))]
        rows.append([sorted(c + rest[: count - len(c)]) for c in chosen])
    return rows


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("penalty", ["log", "hinge"])
def test_the_mean_over_all_draws_is_the_full_value_and_gradient(count: int, penalty: str) -> None:
    x, w_q, w_k = example(batch=3)
    valid = torch.tensor([[True] * 6, [False, False, True, True, True, True], [True, True, False, False, False, False]])
    share = valid.sum(-1).double() / valid.sum()
    full_margins = attention_margins(x, w_q, w_k, key_padding_mask=~valid)
    everything = margin_penalty(penalty, 0.3)(full_margins.log_abs_det)
    full = (token_weights(valid, share) * everything).sum()
    estimate = torch.zeros((), dtype=torch.float64)
    for row, choices in enumerate(draws(valid, count)):
        for positions in choices:
            index = torch.tensor([positions])
            part = everything[row : row + 1].gather(1, index)
            mask = valid[row : row + 1].gather(1, index)
            estimate = estimate + (token_weights(mask, share[row : row + 1]) * part).sum() / len(choices)
    assert_close(estimate, full, **EXACT)
    by_draws = torch.autograd.grad(estimate, (x, w_q, w_k), retain_graph=True)
    by_all = torch.autograd.grad(full, (x, w_q, w_k))
    for found, expected in zip(by_draws, by_all, strict=True):
        assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_sampler_gives_each_of_its_draws_equally_often() -> None:
    valid = torch.tensor([[True, True, True, False, True]])
    generator, count = torch.Generator().manual_seed(0), 6000
    seen: dict[tuple, int] = {}
    for _ in range(count // 50):
        for row in sample_positions(valid.expand(50, -1), 2, generator).tolist():
            seen[tuple(row)] = seen.get(tuple(row), 0) + 1
    (expected,) = draws(valid, 2)
    assert sorted(seen) == sorted(map(tuple, expected))
    # chi-squared with 5 degrees of freedom: 20.5 is passed once in a thousand seeds, and this one is fixed
    assert sum((n - count / 6) ** 2 / (count / 6) for n in seen.values()) < 20.5


@given(st.integers(0, 1000), st.integers(1, 9))
def test_drawn_positions_are_sorted_distinct_and_real_as_far_as_there_are_any(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    valid = torch.rand(3, 7, generator=generator) < 0.6
    positions = sample_positions(valid, count, generator)
    assert positions.shape == (3, min(count, 7))
    assert (positions.diff(dim=-1) > 0).all()
    taken = valid.gather(1, positions).sum(-1)
    assert torch.equal(taken, valid.sum(-1).clamp_max(min(count, 7)))
    again = sample_positions(valid, count, torch.Generator().manual_seed(seed))
    assert again.shape == positions.shape


def test_sampling_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    sample_positions(torch.ones(2, 5, dtype=torch.bool), 2, torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)


@given(st.floats(0.01, 2), st.integers(0, 20), st.integers(21, 60), st.floats(0, 1))
def test_warmup_rises_then_falls_along_a_cosine(peak: float, warmup: int, total: int, final: float) -> None:
    schedule = WarmupSchedule(peak, warmup, total, final)
    values = [schedule(step) for step in range(total + 10)]
    for step in range(warmup):
        assert values[step] == pytest.approx(peak * step / warmup)
    assert values[warmup] == pytest.approx(peak)
    middle = warmup + (total - warmup) / 2
    assert schedule(middle) == pytest.approx((peak + final) / 2)  # type: ignore[arg-type]
    assert values[total:] == pytest.approx([final] * 10)
    steps = torch.tensor(values[warmup:]).diff()
    assert (steps * (1 if final >= peak else -1) >= -1e-7).all()
    assert WarmupSchedule(peak, warmup)(10_000) == peak


def test_the_controller_raises_its_weight_below_the_target_and_lowers_it_above() -> None:
    controller = MarginController(target=1.0, initial=0.1, rate=0.5, bounds=(0.01, 1.0))
    controller.update(torch.tensor(0.0))
    assert float(controller(0)) == pytest.approx(0.1 * math.exp(0.5))
    controller.update(torch.tensor(2.0))
    assert float(controller(1)) == pytest.approx(0.1)
    for _ in range(20):
        controller.update(torch.tensor(5.0))
    assert float(controller(2)) == pytest.approx(0.01)
    for _ in range(40):
        controller.update(torch.tensor(-5.0))
    assert float(controller(3)) == pytest.approx(1.0)


def test_the_controller_holds_a_margin_that_answers_to_its_weight() -> None:
    """A margin that grows with the weight, m = 3 lambda / (1 + lambda): the target 1 is met at lambda 1/2."""
    controller = MarginController(target=1.0, initial=0.01, rate=0.2)
    for _ in range(200):
        weight = controller(0)
        controller.update(3 * weight / (1 + weight))
    assert float(controller(0)) == pytest.approx(0.5, rel=1e-3)


def test_a_controller_goes_on_from_a_saved_weight() -> None:
    first, second = MarginController(target=1.0), MarginController(target=1.0)
    first.update(torch.tensor(0.2))
    second.load(first(0))
    for controller in (first, second):
        controller.update(torch.tensor(0.4))
    assert torch.equal(first(0), second(0))


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1", None, True])
def test_schedules_and_controllers_of_no_weight_are_refused(value) -> None:
    for make in (
        lambda: WarmupSchedule(peak=value),
        lambda: WarmupSchedule(peak=0.1, warmup=value),
        lambda: MarginController(target=1.0, initial=value),
        lambda: MarginController(target=1.0, rate=value),
        lambda: MarginController(target=1.0, bounds=(value, 1.0)),
    ):
        with pytest.raises(ArgumentError, match="finite number") as refusal:
            make()
        assert "\n" not in str(refusal.value)
    if value != -1.0:
        with pytest.raises(ArgumentError, match="target of a MarginController must be a finite number"):
            MarginController(target=value)


@pytest.mark.parametrize("mean", [math.nan, math.inf, -math.inf])
def test_a_controller_ignores_a_mean_that_is_no_number(mean: float) -> None:
    controller, other = (MarginController(target=1.0, initial=0.1, rate=0.5) for _ in range(2))
    controller.update(torch.tensor(mean))
    assert float(controller(0)) == pytest.approx(0.1)
    for one in (controller, other):
        one.update(torch.tensor(0.0))
    assert torch.equal(controller(1), other(1))


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf, "much", None, torch.tensor(-1.0), torch.ones(2)])
def test_a_schedule_that_gives_no_weight_is_refused_at_that_step(bad) -> None:
    model, data = language_model(), batch()
    attached(model, weight=lambda step: 0.5 if step < 1 else bad)
    model(**data)
    with pytest.raises(ArgumentError, match=r"the schedule of the weight must give .* at step 1") as refusal:
        model(**data)
    assert "\n" not in str(refusal.value)


def test_the_smallest_margin_is_that_of_positions_that_can_be_ranked() -> None:
    model, data = language_model(), batch()
    handle = attached(model)
    with torch.no_grad():
        handle.law.w_q.copy_(-handle.law.w_k)  # tr(Sigma A) < 0: every margin that is not 0 by structure is positive
    model(**data)
    assert handle.last["log_margin_min"] > 0
    model(**{name: ids[:, :2] for name, ids in data.items()})
    assert handle.last["log_margin_min"] == 0
