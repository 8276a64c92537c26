"""Run folders: nothing of the user's is lost, nothing is half written, a strange file is refused in a sentence."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support_tokens import files
from support_tokens.errors import RunFolderError
from support_tokens.files import FolderLock, read_json, replace_folder, write_json, write_text
from support_tokens.training import RunFolder


def begun(path: Path) -> RunFolder:
    run = RunFolder.create(path)
    write_json(path / "config.json", {"plan": {}})
    return run


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_create_makes_parents_and_records_versions(tmp_path: Path):
    run = RunFolder.create(tmp_path / "a" / "b")
    found = read_json(run.path / "versions.json")["versions"]
    assert found["torch"].startswith("2.")
    assert found["python"].startswith("3.")


def test_an_empty_folder_is_taken(tmp_path: Path):
    assert RunFolder.create(tmp_path).path == tmp_path


def test_a_folder_in_use_is_kept_without_force(tmp_path: Path):
    begun(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(RunFolderError, match=r"exists and is not empty; .* --force"):
        RunFolder.create(tmp_path)
    assert (tmp_path / "config.json").read_bytes() == before


def test_force_replaces_a_run(tmp_path: Path):
    run = begun(tmp_path)
    run.model.mkdir()
    (run.model / "model.safetensors").write_text("weights")
    (tmp_path / ".report.json.x1y2").write_text("half of what a killed run wrote")
    del run
    RunFolder.create(tmp_path, force=True)
    assert names(tmp_path) == ["versions.json"]


def test_force_never_deletes_what_is_no_part_of_a_run(tmp_path: Path):
    begun(tmp_path)
    (tmp_path / "thesis.tex").write_text("mine")
    before = names(tmp_path)
    with pytest.raises(RunFolderError, match=r"holds 'thesis\.tex', which is no part of a run"):
        RunFolder.create(tmp_path, force=True)
    assert names(tmp_path) == before


def test_force_does_not_follow_a_link_out_of_the_folder(tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    run = begun(tmp_path / "run")
    run.model.symlink_to(outside)
    RunFolder.create(tmp_path / "run", force=True)
    assert (outside / "kept").read_text() == "kept"
    assert not run.model.exists()


def test_a_file_in_the_way_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="file' cannot be written"):
        RunFolder.create(tmp_path / "file")


def full(*_args, **_kwargs):
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "report.json"
    write_json(path, {"value": 1})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        RunFolderError, match=r"report\.json' cannot be written \(No space left on device\); free space"
    ):
        write_json(path, {"value": 2})
    assert read_json(path)["value"] == 1
    assert names(tmp_path) == ["report.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_metrics_on_a_full_disk_are_one_sentence(tmp_path: Path):
    run = begun(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunFolderError, match="No space left on device"):
        run.append_metrics({"step": 1})


def test_a_missing_folder_cannot_be_written(tmp_path: Path):
    with pytest.raises(RunFolderError, match="No such file or directory"):
        write_text(tmp_path / "missing" / "file", "text")


def test_a_written_file_is_as_readable_as_any(tmp_path: Path):
    (tmp_path / "plain").write_text("x")
    write_text(tmp_path / "ours", "x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_numbers_that_json_lacks_are_refused(tmp_path: Path):
    with pytest.raises(RunFolderError, match="not a finite number"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not valid JSON"),
        ("", "is not valid JSON"),
        ("[1]", "must hold a JSON object, received a list"),
        ('{"a": 1}', "schema_version None where 1 is required"),
        ('{"schema_version": 99}', "schema_version 99 where 1 is required"),
    ],
)
def test_a_strange_json_is_refused(tmp_path: Path, text: str, says: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RunFolderError, match=says):
        RunFolder.open(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(RunFolderError, match="is not valid JSON"):
        RunFolder.open(tmp_path)


def test_open_names_what_is_missing(tmp_path: Path):
    with pytest.raises(RunFolderError, match="there is no run folder"):
        RunFolder.open(tmp_path / "none")
    with pytest.raises(RunFolderError, match=r"config\.json' cannot be read"):
        RunFolder.open(tmp_path)


def test_metrics_are_read_as_written(tmp_path: Path):
    run = begun(tmp_path)
    rows = [{"step": step, "loss": 1 / step} for step in (1, 2, 3)]
    for row in rows:
        run.append_metrics(row)
    assert run.metrics() == rows
    run.keep_metrics(2)
    assert run.metrics() == rows[:2]


def test_a_torn_last_line_is_dropped_at_resume_and_named_otherwise(tmp_path: Path):
    run = begun(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}) + '\n{"step": 2, "lo')
    with pytest.raises(RunFolderError, match="corrupt at line 2"):
        run.metrics()
    run.keep_metrics(5)
    assert run.metrics() == [{"step": 1}]


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path):
    target = tmp_path / "model"
    with replace_folder(target) as folder:
        (folder / "old").write_text("old")
    with pytest.raises(RunFolderError, match="No space left"), replace_folder(target):
        full()
    assert names(target) == ["old"]
    with replace_folder(target) as folder:
        (folder / "new").write_text("new")
    assert names(target) == ["new"]
    assert names(tmp_path) == ["model"]


def test_versions_name_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "PACKAGES", ("a-package-that-nobody-has",))
    assert files.versions()["a-package-that-nobody-has"] == "not installed"


CREATE = """
import sys, time
from pathlib import Path
from support_tokens.errors import RunFolderError
from support_tokens.training import RunFolder
for number in range(20):
    folder, start = Path(sys.argv[1]) / str(number), float(sys.argv[2]) + 0.1 * number
    time.sleep(max(0.0, start - time.time()))
    try:
        kept = RunFolder.create(folder, force=sys.argv[3] == "force")
        said = "made"
    except RunFolderError as error:
        said = str(error)
    print(said)
    time.sleep(0.05)
    kept = None
"""


@pytest.mark.slow
@pytest.mark.parametrize("force", ["force", "no"])
def test_of_two_processes_at_one_moment_one_gets_the_folder(tmp_path: Path, force: str):
    start = str(time.time() + 30)  # importing torch twice takes a while
    children = [
        subprocess.Popen([sys.executable, "-c", CREATE, tmp_path, start, force], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = [child.communicate()[0].splitlines() for child in children]
    assert [len(lines) for lines in printed] == [20, 20]
    for number, lines in enumerate(zip(*printed, strict=True)):
        assert sorted(line == "made" for line in lines) == [False, True], (number, lines)
        refusal = next(line for line in lines if line != "made")
        assert "is at work in" in refusal or "is not empty" in refusal


def test_a_folder_is_free_again_when_its_run_is_gone_or_killed(tmp_path: Path):
    run = RunFolder.create(tmp_path / "run")
    assert FolderLock.of(tmp_path / "run") is FolderLock.of(tmp_path / "run")
    script = f"from support_tokens.files import FolderLock; FolderLock.of({str(tmp_path / 'run')!r})"
    refused = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert f"another process (number {os.getpid()}) is at work in" in refused.stderr
    del run
    assert names(tmp_path / "run") == ["versions.json"]
    killed = f"{script.replace('; ', '; kept = ')}; import os; os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", killed], check=False)
    assert names(tmp_path / "run") == [".lock", "versions.json"]
    assert RunFolder.create(tmp_path / "run", force=True).path == tmp_path / "run"
