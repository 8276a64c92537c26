"""Benchmarks: counts against what torch counts, plans against what was measured and committed, records and the verb."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import support_tokens.cli.bench  # noqa: F401  # adds the verb
from support_tokens.benchmark import (
    Roofline,
    Shape,
    Timing,
    barrier_counts,
    in_turn,
    law_penalty,
    mean_reach,
    peak_memory,
    peers,
    plain_counts,
    plan_step,
    ratio,
    shape_of,
    small_gpt_task,
)
from support_tokens.cli.verbs import app
from support_tokens.errors import ArgumentError, DataError, RunFolderError
from support_tokens.law import EmbeddingPrior
from support_tokens.margins import AttentionState, Projection, fused_penalty, state_margins
from support_tokens.report.records import BenchmarkArm, BenchRecord, Check, Prediction, record_table, write_plot


def counted() -> FlopCounterMode:
    """Torch's counter, which leaves out products that are added to what is there."""
    aten = torch.ops.aten

    def three(_self, a, b, *args, out_shape=None, **kwargs) -> int:
        return 2 * math.prod(a) * b[-1]

    def matrix_vector(_self, a, b, *args, out_shape=None, **kwargs) -> int:
        return 2 * math.prod(a)

    added = {aten.baddbmm_: three, aten.addmm_: three, aten.addmv_: matrix_vector}
    return FlopCounterMode(display=False, custom_mapping=added)


RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))


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


def test_arms_run_in_turn() -> None:
    calls = []
    found = in_turn({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3)
    assert calls == ["a", "b"] * 4
    assert [len(t.seconds) for t in found.values()] == [3, 3]


def test_interval_of_a_ratio_is_paired() -> None:
    slow, fast = Timing((2.0, 4.0, 6.0, 8.0)), Timing((1.0, 2.0, 3.0, 4.0))
    assert ratio(slow, fast) == (2.0, 2.0, 2.0)


def test_peak_memory_sees_what_a_step_holds() -> None:
    held = peak_memory(lambda: torch.ones(2**20).mul(2).sum())
    assert 8 * 2**20 <= held < 9 * 2**20


def test_peers_compute_what_they_say() -> None:
    law, x = EmbeddingPrior(6, 3), torch.randn(2, 5, 6)
    expected = -state_margins(law.state(x)).log_abs_det.mean()
    torch.testing.assert_close(peers.dense_covariance_penalty(law, x), expected)
    torch.testing.assert_close(peers.naive_jacobian_penalty(law, x), expected)
    task = small_gpt_task(2, 8)
    plain = peers.plain(task.model, task.ids)
    torch.testing.assert_close(peers.r_drop(task.model, task.ids), plain)  # without dropout both passes are one
    for loss in (peers.smart, peers.jacobian_regularised):
        value = loss(task.model, task.ids)
        value.backward()
        assert value > plain - 1e-6
    with peers.neftune(task.model):
        assert peers.plain(task.model, task.ids) != plain
    torch.testing.assert_close(peers.plain(task.model, task.ids), plain)


def record() -> BenchRecord:
    arms = (
        BenchmarkArm("task", "plain", (1.0, 2.0, 3.0), 1.0, 1.0, 1.0, 100, 1.0),
        BenchmarkArm("task", "ours", (1.1, 2.2, 3.3), 1.1, 1.0, 1.2, 110, 1.1),
    )
    return BenchRecord(
        "suite", {"torch": "2", "threads": 2}, arms, (Check("time", 1.1, "at most 1.15", True),),
        (Prediction("step", 1.0, 2.0),), ("A note.",),
    )  # fmt: skip


def test_a_record_goes_to_json_and_back(tmp_path: Path) -> None:
    record().to_json(tmp_path / "r.json")
    assert BenchRecord.from_json(tmp_path / "r.json") == record()
    (tmp_path / "r.json").write_text(json.dumps({"schema_version": 1, "kind": "other"}))
    with pytest.raises(RunFolderError, match="benchmark"):
        BenchRecord.from_json(tmp_path / "r.json")


def test_table_and_plot_are_made_from_the_record(tmp_path: Path) -> None:
    text = record_table(record())
    assert "| task | ours | 2.20 s | 1.100 [1.000, 1.200] |" in text
    assert "met" in text
    assert "-50 %" in text
    write_plot(record(), tmp_path / "p.svg")
    assert "<svg" in (tmp_path / "p.svg").read_text()


def test_the_verb_makes_a_table_again_without_measuring(tmp_path: Path) -> None:
    record().to_json(tmp_path / "r.json")
    out = CliRunner().invoke(app, ["bench", "--record", str(tmp_path / "r.json"), "--table", str(tmp_path / "t.md")])
    assert out.exit_code == 0, out.output
    assert (tmp_path / "t.md").read_text() == record_table(record())


def test_the_verb_plans_with_given_rates() -> None:
    rates = ["--product", "400", "--elimination", "10", "--memory", "3000"]
    out = CliRunner().invoke(
        app,
        ["bench", "--plan", "70b", "--length", "131072", "--positions", "16", "--devices", "8", "--batch", "8", *rates],
    )
    assert out.exit_code == 0, out.output
    assert "not measured" in out.output
    assert isinstance(CliRunner().invoke(app, ["bench", "--plan", "8b", "--product", "1"]).exception, ArgumentError)


def test_a_plan_that_is_asked_for_a_file_is_refused(tmp_path: Path) -> None:
    out = CliRunner().invoke(app, ["bench", "--plan", "8b", "--out", str(tmp_path / "deep" / "r.json")])
    assert isinstance(out.exception, ArgumentError) and "--out" in str(out.exception)
    assert not list(tmp_path.iterdir())


def test_law_penalty_runs_at_some_positions() -> None:
    law_penalty(2, 16, width=8, rank=4, positions=3)()


def test_committed_results_hold_their_predictions() -> None:
    wrong = {
        f"{path.name}: {p.name}": round(p.error, 2)
        for path in RESULTS
        for p in BenchRecord.from_json(path).predictions
        if abs(p.error) > 0.3
    }
    assert wrong == {}
