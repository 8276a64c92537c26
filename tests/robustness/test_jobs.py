"""Runs as jobs: shards partition them, a killed process continues, and the bytes are those of one process."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from command import failed
from command import run as command
from support_tokens.errors import ArgumentError, SupportTokensError
from support_tokens.files import write_json
from support_tokens.robustness.lab import Preset, reproduce, reproduction
from support_tokens.robustness.lab.job_table import JobTable
from support_tokens.robustness.lab.jobs import Job, JobLost, Shard, jobs_of, run_jobs

TEXT = "In the beginning was the margin, and the margin was small. Every token stood near another. " * 60
OUTPUTS = ("preset.json", "report.json", "report.html", "report.csv", "reproduction.json", "reproduction.md")
STEPS = 60
PLAN = {
    "layers": 1, "heads": 2, "width": 8, "context": 16, "steps": STEPS, "batch_size": 4, "log_every": 1,
    "evaluate_every": STEPS, "evaluate_windows": 2, "save_every": 5, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def preset(tmp_path_factory) -> Preset:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    return Preset("A test", str(text), PLAN, ("ce", "noise:scale=0.3"), (0,), sequences=4, sigmas=(0.5,))


@pytest.fixture(scope="module")
def whole(preset, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "out"
    reproduce(preset, folder, progress=False)
    return folder


def assert_same_bytes(first: Path, second: Path) -> None:
    for name in OUTPUTS:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def some_jobs(folder: Path, names: str = "abc") -> list[Job]:
    return [Job(name, 0, folder / name) for name in names]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 30])
def test_shards_are_a_partition(preset, tmp_path, count):
    jobs = jobs_of(preset, (0, 1, 2), tmp_path)
    assert len(set(jobs)) == 6
    shards = [jobs_of(preset, (0, 1, 2), tmp_path, Shard(number, count)) for number in range(1, count + 1)]
    assert sorted((job for part in shards for job in part), key=jobs.index) == jobs
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize("text", ["0/2", "3/2", "1/0", "1", "a/b", "-1/2", "1/2/3", ""])
def test_a_shard_that_does_not_exist_is_refused(text):
    with pytest.raises(ArgumentError, match="shard must be I/N with I from 1 to N, received"):
        Shard.parse(text)


def work(job: Job) -> None:
    """Killed when it begins a, raises at b, and finishes whatever else; what it did is in its folder."""
    job.folder.mkdir(exist_ok=True)
    with open(job.folder / "calls", "a") as file:
        file.write("x")
    if job.arm == "a" and len((job.folder / "calls").read_text()) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if job.arm == "b":
        raise SupportTokensError("the loss is nan")
    if job.arm == "k":
        os.kill(os.getpid(), signal.SIGKILL)
    (job.folder / "result.json").write_text("{}")


@pytest.mark.slow
def test_a_killed_job_is_done_again_and_one_that_fails_costs_no_other(tmp_path):
    jobs, seen = some_jobs(tmp_path), []
    with pytest.raises(JobLost, match="b, seed 0: the loss is nan"):
        run_jobs(jobs, work, workers=2, watch=seen.append)
    assert [job.finished for job in jobs] == [True, False, True]
    assert [len((job.folder / "calls").read_text()) for job in jobs] == [2, 1, 1]
    assert max(map(len, seen)) == 2 and seen[-1] == ()


@pytest.mark.slow
def test_a_job_that_is_always_killed_is_given_up(tmp_path):
    with pytest.raises(JobLost, match="k, seed 0: its process ended 4 times, last with code -9"):
        run_jobs(some_jobs(tmp_path, "k"), work, workers=1)


@pytest.mark.slow
def test_two_workers_of_which_one_is_killed_end_in_the_bytes_of_one_process(preset, whole, tmp_path):
    victim = tmp_path / "out" / "runs" / "noise-scale-0.3-seed0"
    killed: list[tuple[int, int]] = []

    def kill_one() -> None:
        deadline = time.monotonic() + 300
        while not killed and time.monotonic() < deadline:
            time.sleep(0.002)
            if list(victim.glob("checkpoints/checkpoint-*")) and not (victim / "result.json").exists():
                process = int((victim / ".lock").read_text())
                assert process != os.getpid()
                killed.append((process, (victim / "versions.json").stat().st_ino))
                os.kill(process, signal.SIGKILL)

    thread = threading.Thread(target=kill_one, daemon=True)
    thread.start()
    reproduce(preset, tmp_path / "out", workers=2, progress=False)
    thread.join()
    assert killed and (victim / "versions.json").stat().st_ino == killed[0][1], "the run went on and was not made anew"
    steps = [json.loads(line)["step"] for line in (victim / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and steps[-1] == STEPS
    assert_same_bytes(whole, tmp_path / "out")
    assert not list(tmp_path.glob("out/**/.lock"))


def test_shards_leave_runs_and_measurements_and_no_tables(preset, whole, tmp_path):
    for number in (2, 1):
        assert reproduce(preset, tmp_path / "out", shard=f"{number}/2", progress=False) is None
        assert len(list(tmp_path.glob("out/runs/*/result.json"))) == 3 - number
    assert not (tmp_path / "out" / "report.json").exists()
    assert len(list((tmp_path / "out" / "measured").iterdir())) == 2
    reproduce(preset, tmp_path / "out", progress=False)
    assert_same_bytes(whole, tmp_path / "out")


def test_a_run_that_another_process_trains_is_waited_for(preset, whole, tmp_path):
    run = tmp_path / "out" / "runs" / "ce-seed0"
    script = (
        "import sys, time; from support_tokens.files import FolderLock; lock = FolderLock.of(sys.argv[1]); "
        "print('held', flush=True); time.sleep(1.5); lock.release(); print(time.time(), flush=True)"
    )
    (tmp_path / "out").mkdir()
    write_json(tmp_path / "out" / "preset.json", {k: v for k, v in preset.record().items() if k != "schema_version"})
    other = subprocess.Popen([sys.executable, "-c", script, run], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline().strip() == "held"
    reproduce(preset, tmp_path / "out", progress=False)
    released = float(other.communicate()[0])
    assert (run / "config.json").stat().st_mtime >= released - 0.5
    assert_same_bytes(whole, tmp_path / "out")


def test_runs_of_another_plan_are_refused_before_anything_is_trained(preset, whole, tmp_path, monkeypatch, capsys):
    other = Preset("A test", preset.corpus, {**PLAN, "steps": 2}, preset.arms, (0,))
    write_json(tmp_path / "p.json", {k: v for k, v in other.record().items() if k != "schema_version"})
    monkeypatch.setattr(reproduction, "train", None)
    words = ["reproduce", "--preset", tmp_path / "p.json", "--output", tmp_path / "out"]
    code = command(monkeypatch, *words, "--runs", whole / "runs")
    failed(code, capsys.readouterr(), "a run of another plan in", "choose another --runs")
    assert not (tmp_path / "out").exists()
    code = command(monkeypatch, *words, "--shard", "3/2")
    failed(code, capsys.readouterr(), "shard must be I/N with I from 1 to N, received '3/2'")
    (tmp_path / "p.json").write_text((tmp_path / "p.json").read_text().replace('"ce"', '"cee"'))
    failed(command(monkeypatch, *words), capsys.readouterr(), "'cee'")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ArgumentError, match="workers must be at least 1, received 0"):
        reproduce(preset, tmp_path / "out", workers=0)


def test_the_table_counts_runs_and_expects_the_end_at_the_rate_of_steps(tmp_path):
    jobs, now, out = some_jobs(tmp_path, "abcd"), [0.0], io.StringIO()
    jobs[0].folder.mkdir()
    (jobs[0].folder / "result.json").write_text("{}")
    table = JobTable(jobs, 10, console=Console(file=out, width=200), clock=lambda: now[0])
    assert table.expected_end() == "unknown"
    jobs[1].folder.mkdir()
    (jobs[1].folder / "metrics.jsonl").write_text('{"step": 4}\n{"step": 5}\n{"st')
    assert table.expected_end() == "unknown", "a torn line is no step"
    (jobs[1].folder / "metrics.jsonl").write_text('{"step": 4}\n{"step": 5}\n')
    now[0] = 3600.0
    # 5 steps an hour, 25 left: in five hours.
    expected = time.strftime("%d %b %H:", time.localtime(time.time() + 5 * 3600))
    assert table.expected_end().startswith(expected[:-4])
    assert table.expected_end()[7:9] in {f"{(time.localtime(time.time() + 5 * 3600 + s)).tm_hour:02d}" for s in (0, -5)}
    for _ in range(2):
        table.show(jobs[1:3])
    lines = out.getvalue().splitlines()
    assert len(lines) == 1, "the same state is one line"
    assert lines[0].startswith("1 of 4 runs finished, 1 left, running: b (seed 0), c (seed 0); expected end ")
    table.show(jobs[:1])
    assert "1 of 4 runs finished, 3 left, running: a (seed 0)" in out.getvalue(), "a run that is measured is finished"
    drawn = Console(file=io.StringIO(), width=100)
    drawn.print(table.table(jobs[1:3]))
    assert "5 of 10" in drawn.file.getvalue() and "1 of 4 runs finished" in drawn.file.getvalue()
