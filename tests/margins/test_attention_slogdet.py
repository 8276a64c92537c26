"""Sign and log-determinant of every position's Jacobian block, against autograd through the definition of attention."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import laws
from strategies import Problem, every_configuration, law, paddings, problem, problems
from support_tokens import attention_margins, attention_slogdet
from support_tokens.errors import ArgumentError

NAMES = ("x", "w_q", "w_k", "w_v", "w_o")


def measured(case: Problem, **more) -> laws.Slogdet:
    return attention_slogdet(case.x, *case.weights, **case.options, **more)


def measure_of(case: Problem, **more) -> laws.Measure:
    """The weights and options of a case as a function of embeddings and padding; weights follow the dtype of x."""

    def measure(x: Tensor, padding: Tensor | None) -> laws.Slogdet:
        weights = [w.to(x.dtype) for w in case.weights]
        return attention_slogdet(x, *weights, key_padding_mask=padding, **case.options, **more)

    return measure


# Values


@every_configuration
@law
@given(data=st.data())
def test_equals_the_autograd_oracle(configuration, data):
    case = data.draw(problems(**configuration))
    sign, log_abs_det, sigma_min = case.oracle()
    laws.equals(measured(case), sign, log_abs_det, where=sigma_min > laws.BOUNDARY)


@every_configuration
@law
@given(data=st.data())
def test_margins_are_the_same_with_the_distance_to_degeneracy(configuration, data):
    case = data.draw(problems(**configuration))
    sign, log_abs_det, sigma_min = case.oracle()
    margins = attention_margins(case.x, *case.weights, **case.options)
    laws.equals(margins, sign, log_abs_det, where=sigma_min > laws.BOUNDARY)
    assert_close(margins.sigma_min, sigma_min, **laws.EXACT)
    assert margins.valid.dtype == torch.bool
    assert margins.valid.all()


@every_configuration
def test_scale_defaults_to_the_root_of_the_head_width(configuration):
    shape = {"heads": configuration["heads"], "value_width": 2 if configuration["values"] else None}
    case = problem(rank=3, strict=configuration["strict"], **shape)
    by_default, by_hand = measured(case), measured(replace(case, scale=3**-0.5))
    laws.equals(by_default, by_hand.sign, by_hand.log_abs_det)
    assert (measured(replace(case, scale=1.0)).log_abs_det - by_default.log_abs_det).abs().max() > 1e-3


@pytest.mark.parametrize("view", ["noise", "block"])
@pytest.mark.parametrize("value_width", [None, 3])
def test_first_two_positions_are_exactly_zero_under_the_strict_mask(view, value_width):
    case = problem(batch=3, length=6, value_width=value_width, view=view, strength=5.0)
    found = measured(case)
    assert (found.log_abs_det[:, :2] == 0).all()
    assert (found.sign[:, :2] == 1).all()
    assert found.log_abs_det[:, 2:].all()


# Equal descriptions of one map


@law
@given(strict=st.booleans(), view=st.sampled_from(["noise", "block"]), seed=st.integers(0, 10_000))
def test_low_rank_equals_full_width(strict, view, seed):
    """Sylvester: rows of zeros in w_q, w_k change the size of the determinant's matrix and nothing else."""
    case = replace(problem(width=5, rank=2, value_width=2, strict=strict, view=view, seed=seed), scale=0.6)
    assume(case.clearance() > laws.BOUNDARY)
    low = measured(case)
    zeros = torch.zeros(1, 6, 5, dtype=torch.float64)
    w_q, w_k, w_v, w_o = case.weights
    full = replace(case, weights=(torch.cat([w_q, zeros], 1), torch.cat([w_k, zeros], 1), w_v, w_o))
    laws.equals(measured(full), low.sign, low.log_abs_det)


@law
@given(strict=st.booleans(), view=st.sampled_from(["noise", "block"]), seed=st.integers(0, 10_000))
def test_identity_values_equal_identity_matrices(strict, view, seed):
    case = problem(strict=strict, view=view, seed=seed)
    where = case.oracle()[2] > laws.BOUNDARY
    implicit = measured(case)
    identity = torch.eye(case.x.shape[-1], dtype=torch.float64)[None]
    explicit = measured(replace(case, weights=(*case.weights, identity, identity)))
    laws.equals(explicit, implicit.sign, implicit.log_abs_det, where=where)


@law
@given(strict=st.booleans(), view=st.sampled_from(["noise", "block"]), seed=st.integers(0, 10_000))
def test_order_of_heads_is_irrelevant_and_their_logs_do_not_add(strict, view, seed):
    case = problem(heads=3, value_width=2, strict=strict, view=view, seed=seed)
    assume(case.clearance() > laws.BOUNDARY)
    found = measured(case)
    shuffled = measured(replace(case, weights=tuple(w[[2, 0, 1]] for w in case.weights)))
    laws.equals(shuffled, found.sign, found.log_abs_det)
    alone = [measured(replace(case, weights=tuple(w[h : h + 1] for w in case.weights))) for h in range(3)]
    assert (sum(head.log_abs_det for head in alone) - found.log_abs_det).abs().max() > 1e-6


# What a margin does not depend on


@every_configuration
@law
@given(data=st.data())
def test_rows_do_not_see_each_other(configuration, data):
    case = data.draw(problems(**configuration, batch=3))
    padding = data.draw(paddings(3, case.x.shape[1]))
    assume(case.clearance(padding) > laws.BOUNDARY)
    laws.rows_do_not_see_each_other(measure_of(case), case.x, padding)


@every_configuration
@law
@given(data=st.data())
def test_permuting_rows_permutes_results(configuration, data):
    case = data.draw(problems(**configuration, batch=3))
    laws.permuting_rows_permutes_results(measure_of(case), case.x, data.draw(st.permutations(range(3))))


@every_configuration
@law
@given(data=st.data())
def test_padding_changes_nothing(configuration, data):
    case = data.draw(problems(**configuration))
    padding = data.draw(paddings(*case.x.shape[:2]))
    assume(case.clearance(padding) > laws.BOUNDARY)
    laws.padding_changes_nothing(measure_of(case), case.x, padding)


@every_configuration
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_at_either_end_changes_nothing(configuration, side):
    shape = {"heads": configuration["heads"], "value_width": 2 if configuration["values"] else None}
    case = problem(batch=3, length=6, strict=configuration["strict"], view="block", **shape)
    steps = torch.arange(6)
    padding = torch.stack([steps < n if side == "left" else steps >= 6 - n for n in (0, 2, 5)])
    laws.padding_changes_nothing(measure_of(case), case.x, padding)


@every_configuration
@pytest.mark.parametrize("chunk_size", [1, 2, 5, 100, None])
def test_chunk_size_changes_nothing(configuration, chunk_size):
    shape = {"heads": configuration["heads"], "value_width": 2 if configuration["values"] else None}
    case = problem(length=7, strict=configuration["strict"], view="block", strength=2.0, **shape)
    padding = torch.tensor([[True, True] + 5 * [False], 4 * [False] + 3 * [True]])
    leaves = [tensor.requires_grad_() for tensor in (case.x, *case.weights)]
    expected = measured(case, key_padding_mask=padding, chunk_size=7)
    found = measured(case, key_padding_mask=padding, chunk_size=chunk_size)
    laws.equals(found, expected.sign, expected.log_abs_det)
    laws.gradients_equal(found.log_abs_det.sum(), expected.log_abs_det.sum(), leaves, NAMES[: len(leaves)])
    by_margins = attention_margins(
        case.x, *case.weights, key_padding_mask=padding, chunk_size=chunk_size, **case.options
    )
    laws.equals(by_margins, expected.sign, expected.log_abs_det)


# Gradients


@every_configuration
@law
@given(data=st.data())
def test_gradients_equal_autograd_through_the_textbook_form(configuration, data):
    case = data.draw(problems(**configuration))
    # An order above BOUNDARY: the gradient's error grows with the square of the condition.
    where = case.oracle()[2] > 0.03
    assume(where.any())
    leaves = [tensor.clone().requires_grad_() for tensor in (case.x, *case.weights)]
    case = replace(case, x=leaves[0], weights=tuple(leaves[1:]))
    importance = torch.linspace(0.5, 2.0, int(where.sum()), dtype=torch.float64)
    found = (importance * measured(case).log_abs_det[where]).sum()
    expected = (importance * torch.linalg.slogdet(case.textbook()[where]).logabsdet).sum()
    laws.gradients_equal(found, expected, leaves, NAMES[: len(leaves)])


@every_configuration
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_gradients_pass_gradcheck(configuration, chunk_size):
    shape = {"heads": configuration["heads"], "value_width": 1 if configuration["values"] else None}
    case = problem(batch=1, length=4, width=2, rank=1, strict=configuration["strict"], view="block", **shape)
    leaves = [tensor.clone().requires_grad_() for tensor in (case.x, *case.weights)]

    def log_abs_det(x: Tensor, *weights: Tensor) -> Tensor:
        return attention_slogdet(x, *weights, chunk_size=chunk_size, **case.options).log_abs_det

    assert torch.autograd.gradcheck(log_abs_det, leaves)


def singular_problems() -> dict[str, Problem]:
    """Problems with a position whose J_t is singular to the last bit, beside positions that are regular."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    seen = torch.tensor([[-1.0], [1.0], [0.0], [0.3]], dtype=torch.float64)[None]  # weights 1/2, Var 1, a = 1 at t = 3
    identity = torch.eye(2, dtype=torch.float64)[None]
    plane = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.3, 0.2]], dtype=torch.float64)[None]
    two = torch.stack([0.5 * identity[0], 0.5 * identity[0]])  # two equal heads that carry half of the output each
    alone = torch.tensor([[0.4, -0.8], [0.5, 0.1]], dtype=torch.float64)[None]  # t = 1 attends to itself: J = I - I
    return {
        "one dimension": Problem(seen, (one, one), scale=1.0),
        "two dimensions": Problem(plane, (identity, identity), scale=1.0),
        "values": Problem(plane, (identity, identity, identity, identity), scale=1.0),
        "heads": Problem(plane, (2 * two, 2 * two, 2 * two, two), scale=1.0),
        "repulsive block": Problem(plane, (-identity, identity), scale=1.0, view="block"),
        "inclusive": Problem(alone, (identity, identity), scale=1.0, strict=False),
        "inclusive block": Problem(alone, (identity, identity, -identity, identity), strict=False, view="block"),
    }


@pytest.mark.parametrize("case", [pytest.param(c, id=name) for name, c in singular_problems().items()])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_stay_finite_where_the_block_is_exactly_singular(case, dtype):
    sigma_min = case.oracle()[2]
    assert (sigma_min == 0).sum() == 1
    regular = sigma_min > laws.BOUNDARY
    assert regular.sum() == sigma_min.numel() - 1
    case = case.to(dtype)
    leaves = [tensor.clone().requires_grad_() for tensor in (case.x, *case.weights)]
    found = attention_slogdet(leaves[0], *leaves[1:], **case.options).log_abs_det
    laws.gradients_stay_finite(-found, leaves)
    # The singular position must not silence the others: their gradient is what it is without it.
    found = attention_slogdet(leaves[0], *leaves[1:], **case.options).log_abs_det[regular].sum()
    tracked = replace(case, x=leaves[0], weights=tuple(leaves[1:]))
    expected = torch.linalg.slogdet(tracked.textbook()[regular]).logabsdet.sum()
    for by_code, by_oracle in zip(
        torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        assert_close(by_code, by_oracle, rtol=1e-4, atol=1e-5)


# Precision


@every_configuration
@law
@given(data=st.data())
def test_float32_is_close_to_float64_away_from_the_boundary(configuration, data):
    case = data.draw(problems(**configuration))
    where = case.oracle()[2] > 0.05
    expected = measured(case)
    found = measured(case.to(torch.float32))
    assert found.log_abs_det.dtype == torch.float32
    assert_close(found.sign[where].double(), expected.sign[where], rtol=0, atol=0)
    assert_close(found.log_abs_det[where].double(), expected.log_abs_det[where], rtol=0, atol=1e-4)


@every_configuration
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_input_is_computed_in_float32(configuration, dtype):
    shape = {"heads": configuration["heads"], "value_width": 3 if configuration["values"] else None}
    rounded = problem(width=6, strict=configuration["strict"], view="block", **shape).to(dtype)
    laws.sixteen_bit_input_is_computed_in_float32(measure_of(rounded), rounded.x, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_under_autocast_are_those_of_float32(dtype):
    case = problem(width=6, value_width=3, heads=2, strict=False, view="block").to(torch.float32)
    leaves = [tensor.clone().requires_grad_() for tensor in (case.x, *case.weights)]
    expected = torch.autograd.grad(attention_slogdet(*leaves, **case.options).log_abs_det.sum(), leaves)
    with torch.autocast("cpu", dtype=dtype):
        value = attention_slogdet(*leaves, **case.options).log_abs_det.sum()
    for found, wanted in zip(torch.autograd.grad(value, leaves), expected, strict=True):
        assert_close(found, wanted, rtol=1e-5, atol=1e-6)


# Support tokens


def test_support_tokens_are_the_smallest_margins_of_real_positions_that_can_have_one():
    case = problem(batch=3, length=8, strength=3.0)
    padding = torch.zeros(3, 8, dtype=torch.bool)
    padding[1, :3], padding[2, 6:] = True, True
    margins = attention_margins(case.x, *case.weights, key_padding_mask=padding, **case.options)
    assert_close(margins.valid, ~padding)
    found = margins.support_tokens(2)
    assert found.shape == (3, 2)
    for b, (log_margin, real) in enumerate(zip(margins.log_abs_det.tolist(), (~padding).tolist(), strict=True)):
        can_have_one = [t for t in range(8) if real[t]][2:]  # the first two real positions are zero by structure
        assert found[b].tolist() == sorted(can_have_one, key=lambda t: log_margin[t])[:2]


def test_support_tokens_keep_the_first_positions_under_the_inclusive_mask():
    case = problem(batch=4, length=5, value_width=3, strict=False, strength=2.0)
    margins = attention_margins(case.x, *case.weights, **case.options)
    found = margins.support_tokens(1)[:, 0]
    assert_close(found, margins.log_abs_det.argmin(-1))
    assert (found < 2).any()


def test_support_tokens_beyond_the_length_of_a_sequence_are_marked():
    case = problem(batch=2, length=4, strength=2.0)
    padding = torch.tensor([[False] * 4, [True] * 4])
    margins = attention_margins(case.x, *case.weights, key_padding_mask=padding)
    found = margins.support_tokens(3)
    assert sorted(found[0].tolist()) == [-1, 2, 3]
    assert found[0, -1] == -1
    assert found[1].tolist() == [-1, -1, -1]
    with pytest.raises(ArgumentError, match=r"\bk\b.*0"):
        margins.support_tokens(0)


# Bad arguments


def arguments(**changes) -> tuple[list, dict]:
    """A call that works (B 2, T 5, D 4, H 2, R 3, Rv 2), with some arguments replaced."""
    case = problem(heads=2, value_width=2)
    given_ = {**dict(zip(NAMES, (case.x, *case.weights), strict=True)), **changes}
    return [given_.pop(name) for name in NAMES], given_


BAD = {
    "x without batch": ("x", {"x": torch.ones(5, 4)}, ["(B, T, D)"], [5, 4]),
    "w_q without heads": ("w_q", {"w_q": torch.ones(3, 4)}, ["(H, R, D)"], [3, 4]),
    "w_q of another width": ("w_q", {"w_q": torch.ones(2, 3, 7)}, ["4"], [2, 3, 7]),
    "w_k of another width": ("w_k", {"w_k": torch.ones(2, 3, 7)}, ["4"], [2, 3, 7]),
    "w_k of another head width": ("w_k", {"w_k": torch.ones(2, 5, 4)}, ["3"], [2, 5, 4]),
    "w_v of another width": ("w_v", {"w_v": torch.ones(2, 2, 7)}, ["4"], [2, 2, 7]),
    "w_o transposed": ("w_o", {"w_o": torch.ones(2, 2, 4)}, ["4", "2"], [2, 2, 4]),
    "padding of another shape": (
        "key_padding_mask",
        {"key_padding_mask": torch.zeros(5, 2).bool()},
        ["2", "5"],
        [5, 2],
    ),
}


@pytest.mark.parametrize(("name", "changes", "required", "received"), BAD.values(), ids=BAD.keys())
def test_wrong_shapes_are_named_with_what_is_required_and_received(name, changes, required, received):
    changes = {k: v.double() if v.is_floating_point() else v for k, v in changes.items()}
    positional, options = arguments(**changes)
    with pytest.raises(ArgumentError) as caught:
        attention_slogdet(*positional, **options)
    message = str(caught.value)
    assert re.search(rf"\b{name}\b", message)
    assert re.search(r"\D*".join(str(n) for n in received), message), f"shape {received} is not in: {message}"
    for part in required:
        assert part in message


@pytest.mark.parametrize(("name", "value"), [("scale", float("nan")), ("scale", float("inf")), ("view", "nosie")])
def test_wrong_options_are_named_with_what_is_received(name, value):
    positional, options = arguments()
    with pytest.raises(ArgumentError) as caught:
        attention_slogdet(*positional, **{**options, name: value})
    assert re.search(rf"\b{name}\b", str(caught.value))
    assert str(value) in str(caught.value)
    if name == "view":
        assert "noise" in str(caught.value)
        assert "block" in str(caught.value)


@pytest.mark.parametrize("missing", ["w_v", "w_o"])
def test_values_without_their_counterpart_are_refused(missing):
    positional, _ = arguments(**{missing: None})
    with pytest.raises(ArgumentError, match=missing):
        attention_slogdet(*positional)


def test_identity_values_with_many_heads_are_refused():
    positional, _ = arguments(w_v=None, w_o=None)
    with pytest.raises(ArgumentError, match="w_v"):
        attention_slogdet(*positional)
