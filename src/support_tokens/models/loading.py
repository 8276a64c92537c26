"""A causal language model and its tokenizer, from files: safetensors or GGUF, never pickle."""

__all__ = ["checked_device", "load_model"]

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from support_tokens.errors import ArgumentError, RunFolderError
from support_tokens.models.small_gpt import load_small_gpt, quiet_transformers

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def load_model(
    model: str | Path, *, gguf_file: str | None = None, dtype: str = "float32", device: str = "cpu"
) -> tuple[nn.Module, Any]:
    """Reads a model for analysis, in evaluation mode.

    Args:
        model: A run folder, a folder of a checkpoint, or a name that transformers knows.
        gguf_file: Name of a GGUF file in that folder.
        dtype: `float32`, or `float64` for figures that no batching changes beyond 1e-10.
        device: As torch names it.

    Returns:
        The model and its tokenizer.

    Raises:
        ArgumentError: `dtype` or `device` is unknown, or this machine lacks the device.
        RunFolderError: There is no model, or it cannot be read.
    """
    if dtype not in _DTYPES:
        raise ArgumentError(f"dtype must be one of {', '.join(_DTYPES)}, received {dtype!r}; choose one of them.")
    place = checked_device(device)
    folder = Path(model)
    if gguf_file is None and ((folder / "config.json").is_file() or (folder / "model").is_dir()):
        loaded, tokenizer = load_small_gpt(folder)
        return _placed(loaded, place, _DTYPES[dtype]), tokenizer
    if gguf_file is not None and not (folder / gguf_file).is_file():
        raise RunFolderError(f"there is no file '{folder / gguf_file}'; check --model and --gguf-file.")
    if gguf_file is None and folder.exists():
        raise RunFolderError(
            f"'{folder}' holds no model (config.json is missing); pass a run folder, or --gguf-file for a GGUF file."
        )
    options = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(model, **options)
            weights = {} if gguf_file else {"use_safetensors": True}
            loaded = AutoModelForCausalLM.from_pretrained(model, dtype=_DTYPES[dtype], **weights, **options)
    except Exception as error:  # transformers, hub and gguf each raise their own, with no common root
        reason = " ".join(str(error).split())[:300]
        raise RunFolderError(f"the model '{model}' cannot be read ({reason}); check its name or path.") from error
    return _placed(loaded, place, _DTYPES[dtype]), tokenizer


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


def _placed(model: nn.Module, place: torch.device, dtype: torch.dtype) -> nn.Module:
    return model.to(device=place, dtype=dtype).eval()
