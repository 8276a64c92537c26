"""Benchmarks: counts against what torch counts, plans against what was measured and committed, records and the verb."""

import json
from pathlib import Path

import pytest
import torch

from command import run
from support_tokens.benchmark import (
    Timing,
    in_turn,
    law_penalty,
    peak_memory,
    peers,
    ratio,
    small_gpt_task,
)
from support_tokens.errors import RunFolderError
from support_tokens.law import EmbeddingPrior
from support_tokens.margins import state_margins
from support_tokens.report.records import BenchmarkArm, BenchRecord, Check, Prediction, record_table, write_plot


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


def test_the_verb_makes_a_table_again_without_measuring(monkeypatch, tmp_path: Path) -> None:
    record().to_json(tmp_path / "r.json")
    assert run(monkeypatch, "bench", "--record", tmp_path / "r.json", "--markdown", tmp_path / "t.md") == 0
    assert (tmp_path / "t.md").read_text() == record_table(record())


def test_law_penalty_runs_at_some_positions() -> None:
    law_penalty(2, 16, width=8, rank=4, positions=3)()
