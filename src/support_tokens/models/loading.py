"""Loads causal language models and tokenizers from safetensors or GGUF files, never from pickles."""

__all__ = ["checked_device", "find_model", "load_config", "load_model", "load_tokenizer"]

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from support_tokens._lazy import install_hint
from support_tokens.errors import ArgumentError, RunFolderError
from support_tokens.models.small_gpt import load_small_gpt, quiet_transformers

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model.

    Args:
        source: Folder of a checkpoint, or a name on the Hugging Face hub.
        gguf_file: Name of a GGUF file in that folder.
        adapter: Folder of an adapter of PEFT on that model.
    """

    source: str
    gguf_file: str | None = None
    adapter: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of `from_pretrained`."""
        local = {"local_files_only": True} if Path(self.source).is_dir() else {}
        return local if self.gguf_file is None else {**local, "gguf_file": self.gguf_file}


def find_model(model: str | Path, gguf_file: str | None = None) -> ModelFiles:
    """The files of a model given as a run folder, the folder of a checkpoint or of an adapter of PEFT, a GGUF file or a
    folder with one, or a name on the Hugging Face hub.

    Raises:
        RunFolderError: A folder holds no model, or an adapter has no weights in safetensors.
    """
    folder = Path(model)
    if gguf_file is None and folder.suffix == ".gguf":
        folder, gguf_file = folder.parent, folder.name
    if gguf_file is not None:
        if not (folder / gguf_file).is_file():
            raise RunFolderError(f"there is no file '{folder / gguf_file}'; check the path.")
        return ModelFiles(str(folder), gguf_file)
    folder = folder / "model" if (folder / "model").is_dir() else folder
    if (folder / "adapter_config.json").is_file():
        return replace(_base_model(folder), adapter=str(folder))
    if (folder / "config.json").is_file():
        return ModelFiles(str(folder))
    if folder.exists():
        files = sorted(path.name for path in folder.glob("*.gguf")) if folder.is_dir() else []
        if len(files) == 1:
            return ModelFiles(str(folder), files[0])
        raise RunFolderError(
            f"'{folder}' holds no model (config.json is missing); pass the folder of a run, of a checkpoint or of an "
            f"adapter, or one GGUF file{f' of {len(files)}' if files else ''}."
        )
    return ModelFiles(str(model))


def load_model(
    model: str | Path, *, gguf_file: str | None = None, dtype: str = "float32", device: str = "cpu"
) -> tuple[nn.Module, Any]:
    """Loads a model in evaluation mode, and its tokenizer.

    Args:
        model: A run folder, the folder of a checkpoint or of an adapter of PEFT, a GGUF file or a folder with one, or
            a name on the Hugging Face hub. The weights of an adapter are merged into those of its base model.
        gguf_file: Name of a GGUF file in that folder.
        dtype: `float32`, or `float64` for figures that batching changes by less than 1e-10.
        device: Device as torch names it.

    Returns:
        The model and its tokenizer.

    Raises:
        ArgumentError: `dtype` or `device` is unknown, or this machine lacks the device.
        ModuleNotFoundError: The file needs a package that is not installed.
        RunFolderError: There is no model, or it cannot be read.
    """
    if dtype not in _DTYPES:
        raise ArgumentError(f"dtype must be one of {', '.join(_DTYPES)}, received {dtype!r}; choose one of them.")
    place = checked_device(device)
    files = find_model(model, gguf_file)
    if files.gguf_file is None and Path(files.source).is_dir():
        loaded, tokenizer = load_small_gpt(files.source)
    else:
        with _reading(files):
            tokenizer = AutoTokenizer.from_pretrained(files.source, **files.options)
            weights = {} if files.gguf_file else {"use_safetensors": True}
            loaded = AutoModelForCausalLM.from_pretrained(
                files.source, dtype=_DTYPES[dtype], **weights, **files.options
            )
    loaded = nn.Module.to(loaded, device=place, dtype=_DTYPES[dtype]).eval()
    if files.adapter is None:
        return loaded, tokenizer
    with _reading(files):
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(loaded, files.adapter)
        merge = getattr(adapted.base_model, "merge_and_unload", None)
        if merge is None:
            kind: Any = next(iter(adapted.peft_config.values())).peft_type
            raise RunFolderError(
                f"the adapter in '{files.adapter}' must change weights, as LoRA does, received "
                f"{getattr(kind, 'value', kind)}; pass its base model."
            )
        return merge().eval(), load_tokenizer(model, gguf_file)


def load_tokenizer(model: str | Path, gguf_file: str | None = None) -> Any:
    """Loads the tokenizer of a model given as to `load_model`; that of an adapter is used if it has one.

    Raises:
        RunFolderError: There is no model, or its tokenizer cannot be read.
    """
    files = find_model(model, gguf_file)
    with _reading(files, "tokenizer"):
        if files.adapter is not None and (Path(files.adapter) / "tokenizer_config.json").is_file():
            return AutoTokenizer.from_pretrained(files.adapter, local_files_only=True)
        return AutoTokenizer.from_pretrained(files.source, **files.options)


def load_config(model: str | Path, gguf_file: str | None = None) -> Any:
    """Loads the configuration of a model given as to `load_model`.

    Raises:
        RunFolderError: There is no model, or its configuration cannot be read.
    """
    files = find_model(model, gguf_file)
    with _reading(files, "configuration"):
        return AutoConfig.from_pretrained(files.source, **files.options)


def _base_model(adapter: Path) -> ModelFiles:
    try:
        base = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"the adapter in '{adapter}' does not name its base model; save it again.") from error
    if not (adapter / "adapter_model.safetensors").is_file():
        raise RunFolderError(
            f"the adapter in '{adapter}' must have its weights in adapter_model.safetensors; save it with "
            "safe_serialization=True."
        )
    return find_model(base)


@contextmanager
def _reading(files: ModelFiles, part: str = "model") -> Iterator[None]:
    """Quiet, and one sentence for whatever goes wrong."""
    for package in (["gguf"] if files.gguf_file else []) + (["peft"] if files.adapter else []):
        if find_spec(package) is None:
            raise ModuleNotFoundError(
                f"this model needs the package {package}, which is not installed; run `{install_hint(package)}`.",
                name=package,
            )
    try:
        with quiet_transformers():
            yield
    except RunFolderError:
        raise
    except Exception as error:  # transformers, peft, the hub and gguf have no common base class of errors
        reason = " ".join(str(error).split())[:300]
        name = files.adapter or (Path(files.source) / files.gguf_file if files.gguf_file else files.source)
        raise RunFolderError(f"the {part} '{name}' cannot be read ({reason}); check its name or path.") from error


def checked_device(device: str) -> torch.device:
    """The device of this name, after a tensor was created there.

    Args:
        device: As torch names it.

    Raises:
        ArgumentError: Torch does not know the name, or this machine has no such device.

    Example:
        >>> checked_device("cpu")
        device(type='cpu')
    """
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"device must be one that torch knows, received {device!r}; try cpu or cuda.") from error
    try:
        torch.empty(1, device=place)
    except (AssertionError, NotImplementedError, RuntimeError) as error:  # each backend has an error of its own
        reason = str(error).strip().partition("\n")[0].rstrip(".")[:200]
        raise ArgumentError(
            f"device must be one of this machine, and {device!r} cannot be used here ({reason}); pass cpu, or install "
            "the torch of that device."
        ) from error
    return place
