"""Which models the explorer offers: those it was started with, or those that lie where this package puts them."""

__all__ = ["ModelChoice", "find_models"]

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MOST = 20


@dataclass(frozen=True)
class ModelChoice:
    """A model by the name that the page shows; the page only ever sees that name.

    Args:
        label: Its name.
        path: A run folder, a folder of a checkpoint, or a name that transformers knows.
        gguf_file: Name of a GGUF file in that folder.
    """

    label: str
    path: str
    gguf_file: str | None = None


def find_models(runs: str | Path = "runs", models: str | Path = "models") -> Sequence[ModelChoice]:
    """Finished runs below `runs`, newest first, and models in GGUF files below `models`.

    Example:
        >>> find_models("no such folder", "nor this")
        []
    """
    configs = [path for depth in range(1, 4) for path in Path(runs).glob("*/" * depth + "model/config.json")]
    newest = sorted(configs, key=lambda path: (-path.stat().st_mtime, str(path)))[:_MOST]
    found = [ModelChoice(str(path.parent.parent.relative_to(runs)), str(path.parent.parent)) for path in newest]
    for path in sorted(Path(models).glob("*/*.gguf")):
        found.append(ModelChoice(path.parent.name, str(path.parent), path.name))
    return found
