"""Options that several verbs share, and the functions that read their values."""

__all__ = [
    "Data",
    "Device",
    "Dtype",
    "File",
    "Force",
    "GgufFile",
    "Resume",
    "interruptible",
    "parse_layers",
    "read_text",
    "split_words",
    "writable",
]

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from support_tokens.errors import ArgumentError, DataError, RunFolderError

MODEL = "A run folder, the folder of a checkpoint or of a PEFT adapter, a GGUF file, or a name on the Hugging Face hub."

Data = Annotated[str, typer.Option(help="kjv, python-docs, python-source, a path, or hub:NAME[:CONFIG].")]
Device = Annotated[str, typer.Option(help="Device as torch names it: cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, typer.Option(help="float32 or float64.")]
File = Annotated[Path | None, typer.Option(help="File to write.", rich_help_panel="Output")]
Force = Annotated[bool, typer.Option("--force", help="Replace an earlier result.")]
GgufFile = Annotated[str | None, typer.Option(help="Name of a GGUF file in the folder of the model.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue a run that was stopped.")]

_MAX_BYTES = 64 * 2**20


def split_words(text: str) -> tuple[str, ...]:
    """The words of a list separated by commas.

    Example:
        >>> split_words("noise, block,")
        ('noise', 'block')
    """
    return tuple(word.strip() for word in text.split(",") if word.strip())


def parse_layers(text: str, depth: int) -> tuple[int, ...]:
    """Indices of blocks from a list of indices and ranges, or `all`.

    Args:
        text: As given to `--layers`.
        depth: Number of blocks of the model.

    Raises:
        ArgumentError: A word is neither an index nor a range.

    Example:
        >>> parse_layers("0,2-4,-1", 6)
        (0, 2, 3, 4, -1)
    """
    if text.strip() == "all":
        return tuple(range(depth))
    layers: list[int] = []
    for word in split_words(text):
        first, dash, last = word[1:].partition("-")  # a minus in front belongs to the number
        try:
            layers += range(int(word[0] + first), int(last) + 1) if dash else [int(word)]
        except ValueError as error:
            raise ArgumentError(
                f"--layers must be like 0,1 or 0-5 or all, received {text!r}; pass indices of blocks."
            ) from error
    return tuple(layers)


def read_text(path: Path) -> str:
    """The content of a UTF-8 file, without a byte-order mark.

    Raises:
        DataError: There is no such file, it is too large, or it is not UTF-8.
    """
    if not path.is_file():
        raise DataError(f"there is no file '{path}'; check the path.")
    if path.stat().st_size > _MAX_BYTES:
        raise DataError(f"'{path}' must be at most {_MAX_BYTES // 2**20} MiB, received a larger file; split it.")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"'{path}' is not UTF-8 (byte {error.start}); save it as UTF-8.") from error


@contextmanager
def writable(*files: tuple[str, Path | None], keep: bool = False) -> Iterator[None]:
    """Checks that files can be written before the work begins; folders made for them are removed if the block fails.

    Args:
        files: Each with the option that names it; None is no file.
        keep: Refuse files that exist.

    Raises:
        ArgumentError: A path is a folder, or is given twice.
        RunFolderError: A file exists, or its folder cannot be written to.
    """
    given = [(option, path) for option, path in files if path is not None]
    for option, path in given:
        if path.is_dir():
            raise ArgumentError(f"{option} must be a file to write, received the folder '{path}'; name a file in it.")
        if keep and path.exists():
            raise RunFolderError(f"'{path}' exists; choose another {option}, or pass --force to replace it.")
    if len({path.resolve() for _, path in given}) < len(given):
        options = " and ".join(option for option, _ in given)
        raise ArgumentError(f"{options} must name different files, received one file twice; rename one.")
    created: list[Path] = []
    try:
        for _, path in given:
            created += [folder for folder in path.parents if not folder.exists()]
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RunFolderError(f"'{path}' cannot be written ({error.strerror}); choose another path.") from error
            if not os.access(path.parent, os.W_OK):
                raise RunFolderError(f"'{path}' cannot be written (Permission denied); choose another path.")
        yield
    except BaseException:
        for folder in sorted(created, key=lambda folder: -len(folder.parts)):
            with suppress(OSError):  # not empty
                folder.rmdir()
        raise


@contextmanager
def interruptible(sentence: str, *, always: bool = False) -> Iterator[None]:
    """Says how to go on after Ctrl-C.

    Args:
        sentence: Message of an interrupt that has none.
        always: Replace the message of an interrupt that has one.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(sentence if always else str(interrupt) or sentence) from interrupt
