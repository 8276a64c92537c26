"""The folder of one run: made safely, written atomically, read with a check of its schema."""

__all__ = ["RunFolder"]

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from support_tokens.errors import RunFolderError
from support_tokens.files import LOCK, FolderLock, read_json, unwritable, versions, write_json, write_text

ENTRIES = frozenset(
    {"arm.json", "barrier.safetensors", "checkpoints", "config.json", "metrics.jsonl", "model",
     "regularizer.safetensors", "report.html", "report.json", "result.json", "tensorboard",
     "variational.safetensors", "versions.json"}
)  # fmt: skip
"""Everything a run may hold; what else lies in a folder is the user's, and `force` never deletes it."""


@dataclass(frozen=True)
class RunFolder:
    """One run on disk.

    `model/` (stock checkpoint), `metrics.jsonl` (one object a logged step), `config.json` (plan, corpus, arm),
    `versions.json`, `result.json`, and while the run is not finished `checkpoints/`.

    Args:
        path: The folder, which exists.
    """

    path: Path

    @classmethod
    def create(cls, path: str | Path, *, force: bool = False) -> "RunFolder":
        """Makes the folder, or empties the one of an earlier run.

        Of several processes that ask for one folder, one gets it; the others are refused for as long as the result
        lives.

        Args:
            path: Folder to make, with its parents; an empty one is taken as it is.
            force: Delete an earlier run that is there.

        Raises:
            RunFolderError: The folder is not empty and `force` is off; it holds something that is no part of a run,
                which is never deleted; another process is at work in it; or it cannot be written.
        """
        path = Path(path)
        _check_free(path, force=force)
        lock = FolderLock.of(path)
        present = _check_free(path, force=force)  # now that no other process can change it
        try:
            _delete(path / name for name in present)
        except OSError as error:
            raise unwritable(path, error) from error
        folder = cls(path)
        object.__setattr__(folder, "_lock", lock)  # held until the folder is garbage collected
        write_json(path / "versions.json", {"versions": versions()})
        return folder

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """Opens the folder of a run that was begun.

        Args:
            path: The folder.

        Raises:
            RunFolderError: It is no folder of a run, or its `config.json` cannot be read.
        """
        folder = cls(Path(path))
        if folder.path.is_file():
            raise RunFolderError(f"'{path}' is a file, where the folder of a run is required; pass that folder.")
        if not folder.path.is_dir():
            raise RunFolderError(f"there is no run folder '{path}'; train one first, or check the path.")
        folder.config()
        return folder

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Where the block ends in an error, the folder that `create` made is gone again: there is no run to go on
        with."""
        try:
            yield
        except BaseException:
            with suppress(OSError):
                _delete(list(self.path.iterdir()))
                self.path.rmdir()
            raise

    @property
    def model(self) -> Path:
        """Folder of the finished model, a checkpoint that stock transformers loads."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints that a stopped run goes on from."""
        return self.path / "checkpoints"

    def config(self) -> dict:
        """Plan, corpus identity and arm of the run, as `config.json` holds them."""
        return read_json(self.path / "config.json")

    def append_metrics(self, row: Mapping) -> None:
        """Adds one object to `metrics.jsonl`, as one line.

        Raises:
            RunFolderError: The file cannot be written.
        """
        try:
            with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(dict(row)) + "\n")
        except OSError as error:
            raise unwritable(self.path / "metrics.jsonl", error) from error

    def metrics(self) -> list[dict]:
        """The objects of `metrics.jsonl`, in order of step.

        Raises:
            RunFolderError: The file is missing, or a line of it is not JSON.
        """
        path = self.path / "metrics.jsonl"
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise RunFolderError(f"'{path}' cannot be read ({error.strerror}); pass the folder of a run.") from error
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise RunFolderError(
                    f"'{path}' is corrupt at line {number} ({error}); restore it or run again."
                ) from error
        return rows

    def keep_metrics(self, step: int) -> None:
        """Drops the rows after a step, which a run that goes on from there will write again.

        A last line that a killed run left half written is dropped with them.

        Args:
            step: Last step whose rows are kept.
        """
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        text = path.read_text(encoding="utf-8")
        if not text.endswith("\n"):
            write_text(path, text[: text.rfind("\n") + 1])
        kept = [row for row in self.metrics() if row["step"] <= step]
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))


def _check_free(path: Path, *, force: bool) -> list[str]:
    """Names in a folder that a run may be made in."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        present = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)
    except OSError as error:
        raise unwritable(path, error) from error
    if present and not force:
        raise RunFolderError(
            f"folder '{path}' exists and is not empty; choose another folder, or pass --force to replace the run in it."
        )
    strange = [name for name in present if not _is_ours(name)]
    if strange:
        raise RunFolderError(
            f"folder '{path}' holds '{strange[0]}', which is no part of a run, so it is not replaced; "
            "choose another folder."
        )
    return present


def _delete(entries: Iterable[Path]) -> None:
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _is_ours(name: str) -> bool:
    """Whether a run made the entry, or was killed while it wrote it under a temporary name."""
    return name in ENTRIES or any(name.startswith(f".{entry}.") for entry in ENTRIES)
