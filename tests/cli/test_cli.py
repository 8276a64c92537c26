"""The command line as its user meets it: exit codes, one sentence on stderr, nothing lost."""

import json
import os
from pathlib import Path

import pytest

from command import failed, run

PLAN = {
    "layers": 1,
    "heads": 2,
    "width": 8,
    "context": 16,
    "batch-size": 4,
    "steps": 4,
    "warmup": 0.25,
    "log-every": 2,
    "evaluate-every": 4,
    "evaluate-windows": 2,
    "save-every": 2,
}
TINY = [word for name, value in PLAN.items() for word in (f"--{name}", str(value))]
TEXT = "In the beginning was the margin, and the margin was small. Every token stood near another. " * 60


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_train_evaluate_and_report(monkeypatch, capsys, tmp_path, text) -> None:
    folders = []
    for arm in ("ce", "barrier:weight=0.05"):
        folders.append(tmp_path / arm.partition(":")[0])
        assert run(monkeypatch, "train", "--data", text, "--arm", arm, "--output", folders[-1], *TINY) == 0
    out = tmp_path / "comparison"
    assert run(monkeypatch, "evaluate", *folders, "--output", out, "--sequences", 4, "--sigma", 0.5) == 0
    printed = capsys.readouterr().out
    assert "barrier, weight 0.05" in printed
    assert str(out / "report.html") in printed
    made = json.loads((out / "report.json").read_text())
    assert made["schema_version"] == 2
    page = (out / "report.html").read_text()
    (out / "report.html").unlink()
    assert run(monkeypatch, "report", out) == 0
    assert (out / "report.html").read_text() == page


def test_demo_trains_three_arms_and_resumes_what_is_missing(monkeypatch, capsys, tmp_path, text) -> None:
    out = tmp_path / "demo"
    assert run(monkeypatch, "demo", "--data", text, "--output", out, *TINY) == 0
    assert {"ce", "barrier", "noise", "report.json", "report.html"} <= {path.name for path in out.iterdir()}
    weights = (out / "ce" / "model" / "model.safetensors").read_bytes()
    capsys.readouterr()
    failed(
        run(monkeypatch, "demo", "--data", text, "--output", out, *TINY), capsys.readouterr(), "--force", "report.html"
    )
    assert (out / "ce" / "model" / "model.safetensors").read_bytes() == weights
    (out / "report.json").unlink()
    assert run(monkeypatch, "demo", "--data", text, "--output", out, "--resume", *TINY) == 0
    assert (out / "report.json").exists()


def bad_file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no corpus, file or folder"),
        (b"", "is empty"),
        (b"abc\0def", "is binary"),
        ("Grüße".encode("latin-1"), "is not UTF-8"),
        (b"short", "part"),
        (TEXT.encode()[:300], "is required"),
    ],
    ids=["missing", "empty", "binary", "latin-1", "short", "split too small"],
)
def test_bad_text(monkeypatch, capsys, tmp_path, content, said) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        bad_file(path, content)
    code = run(monkeypatch, "train", "--data", path, "--output", tmp_path / "run", *TINY)
    captured = capsys.readouterr()
    assert code == 1
    assert len(captured.err.strip().splitlines()) == 1
    assert said in captured.err or "required" in captured.err
    assert str(path) in captured.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--arm", "barrier:weight=-1"], "weight must be a finite number of at least 0, received -1.0"),
        (["--arm", "barrier:weight=nan"], "weight must be a finite number of at least 0, received nan"),
        (["--arm", "barrier:weight=heavy"], "must be written NAME=NUMBER"),
        (["--arm", "barier"], "a regularizer must be one of ce"),
        (["--learning-rate", "nan"], "learning_rate must be"),
        (["--steps", "0"], "steps must be"),
        (["--heads", "3"], "heads must divide width"),
        (["--data", "hub:"], "NAME is missing"),
    ],
)
def test_bad_value(monkeypatch, capsys, tmp_path, text, words, said) -> None:
    given = ["train", "--data", text, "--output", tmp_path / "run", *TINY, *words]
    failed(run(monkeypatch, *given), capsys.readouterr(), said)
    assert not (tmp_path / "run").exists()


def test_wrong_usage_exits_with_two(monkeypatch, capsys) -> None:
    assert run(monkeypatch, "train", "--no-such-option") == 2
    assert run(monkeypatch, "evaluate") == 2
    assert "Traceback" not in capsys.readouterr().err


def test_folder_that_exists_is_kept(monkeypatch, capsys, tmp_path, text) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "letters.txt").write_text("dear")
    for more in ([], ["--force"]):
        code = run(monkeypatch, "train", "--data", text, "--output", folder, *TINY, *more)
        failed(code, capsys.readouterr(), str(folder))
        assert (folder / "letters.txt").read_text() == "dear"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere; run as another user to see this test")
def test_unwritable_folder(monkeypatch, capsys, tmp_path, text) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    code = run(monkeypatch, "train", "--data", text, "--output", locked / "run", *TINY)
    failed(code, capsys.readouterr(), "cannot be written")


def test_folder_below_a_file(monkeypatch, capsys, tmp_path, text) -> None:
    code = run(monkeypatch, "train", "--data", text, "--output", text / "run", *TINY)
    failed(code, capsys.readouterr(), "cannot be written")


@pytest.mark.parametrize("content", ["{", "[]", '{"schema_version": 99}', '{"schema_version": 1}'])
def test_report_json_that_cannot_be_used(monkeypatch, capsys, tmp_path, content) -> None:
    path = tmp_path / "report.json"
    path.write_text(content)
    failed(run(monkeypatch, "report", path), capsys.readouterr(), str(path))
    assert path.read_text() == content
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("name", ["config.json", "result.json"])
def test_run_folder_that_is_corrupt(monkeypatch, capsys, tmp_path, text, name) -> None:
    folder = tmp_path / "run"
    assert run(monkeypatch, "train", "--data", text, "--arm", "ce", "--output", folder, *TINY) == 0
    (folder / name).write_text("{")
    capsys.readouterr()
    failed(run(monkeypatch, "evaluate", folder), capsys.readouterr(), name)


def test_text_that_changed_since_training(monkeypatch, capsys, tmp_path, text) -> None:
    folder = tmp_path / "run"
    assert run(monkeypatch, "train", "--data", text, "--arm", "ce", "--output", folder, *TINY) == 0
    text.write_text(TEXT[::-1], encoding="utf-8")
    capsys.readouterr()
    failed(run(monkeypatch, "evaluate", folder), capsys.readouterr(), "has changed since")


def test_runs_that_cannot_be_compared(monkeypatch, capsys, tmp_path, text) -> None:
    for name, width in (("narrow", "8"), ("wide", "16")):
        words = ["train", "--data", text, "--arm", "ce", "--output", tmp_path / name, *TINY, "--width", width]
        assert run(monkeypatch, *words) == 0
    capsys.readouterr()
    words = ["evaluate", tmp_path / "narrow", tmp_path / "wide", "--output", tmp_path / "out"]
    failed(run(monkeypatch, *words), capsys.readouterr(), "must share their plan")
    words = ["evaluate", tmp_path / "narrow", tmp_path / "wide"]
    failed(run(monkeypatch, *words), capsys.readouterr(), "--output is required")


@pytest.mark.parametrize("words", ["stopped at step 2 of 4; --resume goes on from there.", ""])
def test_interrupt_ends_with_a_sentence_and_130(monkeypatch, capsys, tmp_path, text, words) -> None:
    def interrupted(*_args, **_options) -> None:
        raise KeyboardInterrupt(*filter(None, [words]))

    monkeypatch.setattr("support_tokens.training.train", interrupted)
    assert run(monkeypatch, "train", "--data", text, "--output", tmp_path / "run", *TINY) == 130
    said = capsys.readouterr().err.strip()
    assert said.startswith("support-tokens: ")
    assert words in said
    assert "--resume" in said


@pytest.mark.parametrize("more", [[], ["--force"]])
def test_demo_goes_into_no_folder_that_is_not_its_own(monkeypatch, capsys, tmp_path, text, more) -> None:
    page, trained = tmp_path / "page", tmp_path / "run"
    page.mkdir()
    (page / "report.html").write_text("mine")
    assert run(monkeypatch, "train", "--data", text, "--arm", "ce", "--output", trained, *TINY) == 0
    before = sorted(trained.rglob("*"))
    capsys.readouterr()
    for folder, strange in ((page, "report.html"), (trained, "")):
        words = ["demo", "--data", text, "--output", folder, *TINY, *more]
        failed(run(monkeypatch, *words), capsys.readouterr(), str(folder), strange, "no part of an experiment")
    assert [path.read_text() for path in page.iterdir()] == ["mine"]
    assert sorted(trained.rglob("*")) == before


def test_a_mistake_in_an_arm_leaves_no_folder_and_costs_no_run(monkeypatch, capsys, tmp_path, text) -> None:
    words = ["train", "--data", text, "--output", tmp_path / "run", *TINY, "--arm"]
    wrong = "barrier:source=model,layers=7"
    assert run(monkeypatch, *words, wrong) == 1
    assert not (tmp_path / "run").exists()
    assert run(monkeypatch, *words, "ce") == 0
    capsys.readouterr()
    failed(run(monkeypatch, *words, wrong, "--force"), capsys.readouterr(), "layer")
    assert (tmp_path / "run" / "model").is_dir()
