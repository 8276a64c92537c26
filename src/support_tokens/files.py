"""Files that are never half written, and JSON of a known version."""

__all__ = [
    "LOCK",
    "SCHEMA_VERSION",
    "FolderLock",
    "read_json",
    "read_object",
    "replace_folder",
    "unwritable",
    "versions",
    "write_bytes",
    "write_json",
    "write_text",
]

import json
import os
import platform
import secrets
import shutil
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import ClassVar

from support_tokens.errors import RunFolderError

SCHEMA_VERSION = 1
"""Version of every JSON file that this package writes; a reader refuses any other."""

PACKAGES = ("support-tokens", "torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy", "datasets")


def write_text(path: str | Path, text: str) -> None:
    """Writes a UTF-8 file that is there whole or not at all.

    Args:
        path: File to write or to replace; its folder exists.
        text: Its content.

    Raises:
        RunFolderError: The folder is missing or unwritable, or the disk is full; the old file is as it was.
    """
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, content: bytes) -> None:
    """Writes a file that is there whole or not at all.

    Args:
        path: File to write or to replace; its folder exists.
        content: Its content.

    Raises:
        RunFolderError: The folder is missing or unwritable, or the disk is full; the old file is as it was.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        # Not mkstemp, whose files their owner alone can read: here the user's umask decides, as for any file.
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | Path, payload: Mapping) -> None:
    """Writes an object as JSON with `schema_version` first, whole or not at all.

    Args:
        path: File to write or to replace.
        payload: What JSON can hold; NaN and infinities are refused, since JSON has none.

    Raises:
        RunFolderError: The file cannot be written, or a number is not finite.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "result.json"
        >>> write_json(path, {"steps": 3})
        >>> read_json(path)
        {'schema_version': 1, 'steps': 3}
    """
    try:
        text = json.dumps({"schema_version": SCHEMA_VERSION, **payload}, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise RunFolderError(f"'{path}' is not written: a value in it is not a finite number ({error}).") from error
    write_text(path, text + "\n")


def read_json(path: str | Path) -> dict:
    """Reads an object that `write_json` wrote.

    Args:
        path: File to read.

    Returns:
        The object, with its `schema_version`.

    Raises:
        RunFolderError: The file is missing, unreadable, no JSON object, or of another schema.
    """
    payload = read_object(path)
    received = payload.get("schema_version")
    if received != SCHEMA_VERSION:
        raise RunFolderError(
            f"'{path}' has schema_version {received!r} where {SCHEMA_VERSION} is required; "
            "it was written by another version of support-tokens or by another program."
        )
    return payload


def read_object(path: str | Path) -> dict:
    """Reads a JSON object of any version.

    Args:
        path: File to read.

    Raises:
        RunFolderError: The file is missing, unreadable, or no JSON object.
    """
    try:
        payload = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RunFolderError(f"'{path}' cannot be read ({error.strerror}); pass the folder of a run.") from error
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"'{path}' is not valid JSON ({error}); restore it or run again.") from error
    if not isinstance(payload, dict):
        raise RunFolderError(f"'{path}' must hold a JSON object, received a {type(payload).__name__}; check the path.")
    return payload


@contextmanager
def replace_folder(path: str | Path) -> Iterator[Path]:
    """Gives an empty folder to fill, which takes the place of `path` when the block ends without an error.

    Args:
        path: Folder to make or to replace.

    Raises:
        RunFolderError: It cannot be written; what was at `path` is as it was.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        temporary.mkdir()
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        yield temporary
        # Some libraries write files that only their owner can read; the new folder's mode holds the user's umask.
        mode = temporary.stat().st_mode & 0o777
        for entry in temporary.rglob("*"):
            entry.chmod(mode if entry.is_dir() else mode & 0o666)
        if path.exists():
            shutil.rmtree(path)
        os.replace(temporary, path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


LOCK = ".lock"
"""File in a folder that a process holds locked while it works there; it goes with the lock."""


def _lock(descriptor: int) -> None:
    """Locks an open file for this process; `BlockingIOError` where another one has it."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        import msvcrt

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError as error:
            raise BlockingIOError from error
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


class FolderLock:
    """A folder that one process works in: held until it is released, garbage collected, or the process ends.

    The operating system releases it when a process is killed. In one process, all holders share one lock.

    Args:
        folder: The folder, which is made if it is missing.
        wait: Wait for another process instead of raising.

    Raises:
        RunFolderError: Another process holds it, or the folder cannot be written.

    Example:
        >>> import tempfile
        >>> with FolderLock.of(tempfile.mkdtemp()) as lock:
        ...     lock.path.name
        '.lock'
    """

    _held: ClassVar["weakref.WeakValueDictionary[Path, FolderLock]"] = weakref.WeakValueDictionary()

    @classmethod
    def of(cls, folder: str | Path, *, wait: bool = False) -> "FolderLock":
        """The lock of a folder, taken now or already held by this process."""
        folder = Path(folder).resolve()
        held = cls._held.get(folder)
        if held is None or held.released:
            held = cls._held[folder] = cls(folder, wait=wait)
        return held

    def __init__(self, folder: Path, *, wait: bool = False) -> None:
        self.path = folder / LOCK
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                raise unwritable(folder, error) from error
            try:
                _lock(descriptor)
                # The last holder deletes the file, so that what was locked may no longer be the one in the folder.
                if os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                    break
                os.close(descriptor)
            except FileNotFoundError:
                os.close(descriptor)
            except BlockingIOError:
                other = os.read(descriptor, 32).decode() or "unknown"
                os.close(descriptor)
                if not wait:
                    raise RunFolderError(
                        f"another process (number {other}) is at work in '{folder}'; wait for it, or choose another "
                        "folder."
                    ) from None
                time.sleep(0.05)
        os.truncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        self.release = weakref.finalize(self, _unlock, self.path, descriptor)

    @property
    def released(self) -> bool:
        """Whether the lock is no longer held."""
        return not self.release.alive

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()


def _unlock(path: Path, descriptor: int) -> None:
    with suppress(OSError):  # its folder may be gone
        path.unlink()
    os.close(descriptor)


def versions() -> dict[str, str]:
    """Versions that the figures of a run depend on: of Python, the system and the packages in use.

    Example:
        >>> sorted(versions())[:2]
        ['accelerate', 'datasets']
    """
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def unwritable(path: Path, error: OSError) -> RunFolderError:
    """The error for a path that could not be written."""
    return RunFolderError(
        f"'{path}' cannot be written ({error.strerror or error}); free space, check permissions, "
        "or choose another folder."
    )
