"""The cost predictor: counts against what torch counts, plans against what was measured and committed."""

import doctest
import math
from pathlib import Path

import counts
import plan
import pytest
import torch
from counts import Shape, barrier_counts, mean_reach, plain_counts, shape_of
from plan import Roofline, plan_step, predictions
from torch.utils.flop_counter import FlopCounterMode

from support_tokens.benchmark import peers, small_gpt_task
from support_tokens.errors import ArgumentError, DataError
from support_tokens.law import EmbeddingPrior
from support_tokens.margins import AttentionState, Projection, fused_penalty
from support_tokens.report.records import BenchmarkArm, BenchRecord

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))


def counted() -> FlopCounterMode:
    """Torch's counter, which leaves out products that are added to what is there."""
    aten = torch.ops.aten

    def three(_self, a, b, *args, out_shape=None, **kwargs) -> int:
        return 2 * math.prod(a) * b[-1]

    def matrix_vector(_self, a, b, *args, out_shape=None, **kwargs) -> int:
        return 2 * math.prod(a)

    added = {aten.baddbmm_: three, aten.addmm_: three, aten.addmv_: matrix_vector}
    return FlopCounterMode(display=False, custom_mapping=added)


def test_operations_of_the_plain_step_are_those_that_torch_counts() -> None:
    task = small_gpt_task(2, 32)
    with counted() as counter:
        peers.plain(task.model, task.ids).backward()
    shape = shape_of("small-gpt")
    expected = plain_counts(shape, 2, 32).product
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.06)


def test_operations_of_the_law_are_those_that_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, length, width, rank = 2, 128, 64, 32
    law, x = EmbeddingPrior(width, rank), torch.randn(batch, length, width, requires_grad=True)
    # Elimination by itself is counted by hand below; LAPACK's calls are not seen by torch's counter.
    monkeypatch.setattr("support_tokens.margins.linalg.elimination._LEAF", 10**6)
    with counted() as counter:
        value, _ = fused_penalty(law.state(x), torch.ones(batch, length), torch.neg)
        torch.autograd.grad(value, [x, law.w_q, law.w_k])
    shape = Shape(width, 1, 1, 1, rank, 4, 4)
    expected = barrier_counts(shape, batch, length, source="prior", rank=rank).product
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.15)


def test_operations_of_a_models_attention_are_those_that_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, length, heads, kv_heads, head_width = 1, 64, 4, 2, 16
    width = heads * head_width
    leaf = lambda *shape: torch.randn(*shape).mul(0.1).requires_grad_()  # noqa: E731
    state = AttentionState(
        leaf(batch, heads, length, head_width), leaf(batch, kv_heads, length, head_width),
        leaf(batch, kv_heads, length, head_width), 0.25,
        Projection(leaf(heads, head_width, width)), Projection(leaf(kv_heads, head_width, width)),
        Projection(leaf(kv_heads, head_width, width)), leaf(heads, width, head_width),
    )  # fmt: skip
    monkeypatch.setattr("support_tokens.margins.linalg.elimination._LEAF", 10**6)
    with counted() as counter:
        fused_penalty(state, torch.ones(batch, length), torch.neg)
    expected = barrier_counts(Shape(width, 1, heads, kv_heads, head_width, 4, 4), batch, length).product
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.15)


def test_elimination_does_two_n_cubed() -> None:
    from support_tokens.margins.linalg import slogdet_and_inverse

    side, count = 256, 3
    with counted() as counter:
        slogdet_and_inverse(torch.eye(side).repeat(count, 1, 1))
    assert counter.get_total_flops() == pytest.approx(
        2 * count * side**3 * 1.25, rel=0.12
    )  # and a quarter for the rows of blocks


@pytest.mark.parametrize("length", [1, 64, 65, 100, 256])
def test_mean_reach_by_hand(length: int) -> None:
    rows = [sum(min(64, length - b) for b in range(0, length, 64) if t >= b) for t in range(length)]
    assert mean_reach(length) == pytest.approx(sum(rows) / length)


def test_cost_is_linear_in_positions_and_batch_and_at_most_quadratic_in_length() -> None:
    shape = shape_of("smollm2-135m")
    one = barrier_counts(shape, 1, 512, positions=64).elimination
    assert barrier_counts(shape, 2, 512, positions=64).elimination == 2 * one
    assert barrier_counts(shape, 1, 512, positions=128).elimination == 2 * one
    work = [barrier_counts(shape, 1, length).product for length in (4096, 8192)]
    assert 2 < work[1] / work[0] < 2**2.1


def test_a_plan_says_what_devices_share() -> None:
    rates = Roofline(1e14, {32: 1e11, 4096: 2e13}, 2e12)
    one = plan_step(shape_of("8b"), rates, batch=8, length=8192, positions=16)
    eight = plan_step(shape_of("8b"), rates, batch=8, length=8192, positions=16, devices=8)
    assert eight.plain_seconds == pytest.approx(one.plain_seconds / 8)
    assert eight.time_ratio == pytest.approx(one.time_ratio)
    assert one.time_ratio > 1
    with pytest.raises(ArgumentError, match="at least 1"):
        plan_step(shape_of("8b"), rates, batch=0, length=8)


def test_shapes_are_read_from_configurations(tmp_path: Path) -> None:
    from transformers import GPT2Config, LlamaConfig

    LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3).save_pretrained(
        tmp_path
    )
    shape = shape_of(tmp_path)
    assert (shape.width, shape.heads, shape.kv_heads, shape.head_width, shape.layers) == (64, 4, 2, 16, 3)
    GPT2Config(n_embd=32, n_head=2, n_layer=1).save_pretrained(tmp_path)
    assert (shape_of(tmp_path).mlp_width, shape_of(tmp_path).gated) == (128, False)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="hidden_size"):
        shape_of(tmp_path)
    with pytest.raises(DataError, match="must be one of"):
        shape_of("9b")


def test_parameters_are_those_of_the_model() -> None:
    task = small_gpt_task(1, 16)
    matrices = sum(p.numel() for p in task.model.parameters() if p.dim() == 2)
    assert shape_of("small-gpt").parameters + 16 * 128 == matrices  # learned positions are no matrix of a product


def test_committed_results_hold_their_predictions() -> None:
    wrong = {
        f"{path.name}: {p.name}": round(p.error, 2)
        for path in RESULTS
        for p in BenchRecord.from_json(path).predictions
        if abs(p.error) > 0.3
    }
    assert wrong == {}


def test_the_command_plans_with_given_rates(capsys: pytest.CaptureFixture[str]) -> None:
    rates = ["--product", "400", "--elimination", "10", "--memory", "3000"]
    plan.main(["70b", "--length", "131072", "--positions", "16", "--devices", "8", "--batch", "8", *rates])
    assert "from given rates, not measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"), [(["8b", "--product", "1"], "required together"), (["9b"], "must be one of")]
)
def test_a_wrong_request_is_one_sentence(words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        plan.main(words)


def test_predictions_are_counts_over_rates_beside_the_measured_median() -> None:
    groups = [
        ("SmallGPT step", "plain"), ("SmallGPT step", "prior, all positions"), ("SmolLM2-135M step", "plain"),
        ("SmolLM2-135M step", "model, 64 positions"), ("SmolLM2-135M penalty by itself", "ours"),
        ("growth in batch", "B = 8"),
    ]  # fmt: skip
    arms = tuple(BenchmarkArm(group, name, (5.0, 7.0, 6.0), 1.0, 1.0, 1.0) for group, name in groups)
    record = BenchRecord("targets", {}, arms)
    # Eliminations and memory take no time at these rates; products run at one operation a second.
    found = predictions(record, Roofline(1.0, {32: 1e30, 576: 1e30}, 1e30))
    assert [p.measured for p in found] == [6.0] * 6
    # 6 operations a weight and token, 12 a layer, head, channel and pair of tokens: 4 blocks of width 128.
    weights = 4 * (4 * 128**2 + 2 * 128 * 512) + 100 * 128
    assert found[0].predicted == pytest.approx(6 * weights * 4096 + 12 * 4 * 128 * 256 * 4096)
    with pytest.raises(ArgumentError, match="suite 'targets'"):
        predictions(BenchRecord("peers", {}, arms), Roofline(1.0, {32: 1.0}, 1.0))


@pytest.mark.parametrize("module", [counts, plan])
def test_examples_hold(module) -> None:
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0
