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
        path: A model as `load_model` takes it.
        gguf_file: Name of a GGUF file in that folder.
    """

    label: str
    path: str
    gguf_file: str | None = None


def find_models(runs: str | Path = "runs", models: str | Path = "models") -> Sequence[ModelChoice]:
    """Finished runs below `runs`, newest first; then checkpoints, adapters of PEFT and GGUF files below `models`.

    Example:
        >>> find_models("no such folder", "nor this")
        []
    """
    configs = [path for depth in range(1, 4) for path in Path(runs).glob("*/" * depth + "model/config.json")]
    newest = sorted(configs, key=lambda path: (-path.stat().st_mtime, str(path)))[:_MOST]
    found = [ModelChoice(str(path.parent.parent.relative_to(runs)), str(path.parent.parent)) for path in newest]
    for folder in sorted(path for path in Path(models).glob("*") if path.is_dir()):
        files = sorted(folder.glob("*.gguf"))
        if not files and any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            found.append(ModelChoice(folder.name, str(folder)))
        for file in files:
            label = folder.name if len(files) == 1 else f"{folder.name}/{file.stem}"
            found.append(ModelChoice(label, str(folder), file.name))
    return found
