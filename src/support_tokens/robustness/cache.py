"""Measurements kept in a folder, each under a name that follows from everything it depends on."""

__all__ = ["measurement_path", "read_measurement", "write_measurement"]

import hashlib
from functools import cache as cached
from importlib import resources
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from support_tokens.errors import RunFolderError
from support_tokens.files import unwritable, write_bytes
from support_tokens.robustness.measure import EvaluationData, Measurement
from support_tokens.robustness.perturbations.set import PerturbationSet

_TABLES = ("nats", "units", "tokens", "gaps")


def read_measurement(
    folder: Path, model: nn.Module, data: EvaluationData, perturbations: PerturbationSet, batch_size: int
) -> Measurement | None:
    """The measurement that `folder` holds, or None.

    Raises:
        RunFolderError: The file cannot be read.
    """
    path = measurement_path(folder, model, data, perturbations, batch_size)
    if not path.exists():
        return None
    try:
        tensors = load_tensors(path.read_bytes())
        tables = [
            {p.name: tensors[f"{table}.{place}"].numpy() for place, p in enumerate(perturbations.items)}
            for table in _TABLES
        ]
        rms = float(tensors["embedding_rms"])
    except (OSError, SafetensorError, KeyError) as error:
        raise RunFolderError(f"'{path}' is no measurement ({error}); delete it, and it is measured again.") from error
    return Measurement(tables[0], rms, *tables[1:])


def write_measurement(
    folder: Path,
    measurement: Measurement,
    model: nn.Module,
    data: EvaluationData,
    perturbations: PerturbationSet,
    batch_size: int,
) -> None:
    """Keeps a measurement in `folder`, which is made if it is missing.

    Raises:
        RunFolderError: It cannot be written.
    """
    tensors = {"embedding_rms": torch.tensor(measurement.embedding_rms, dtype=torch.float64)}
    for place, perturbation in enumerate(perturbations.items):
        for table in _TABLES:
            tensors[f"{table}.{place}"] = torch.from_numpy(getattr(measurement, table)[perturbation.name])
    path = measurement_path(folder, model, data, perturbations, batch_size)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    write_bytes(path, save_tensors(tensors))


def measurement_path(
    folder: Path, model: nn.Module, data: EvaluationData, perturbations: PerturbationSet, batch_size: int
) -> Path:
    """The file of a measurement: its name is a hash of weights, data, perturbations, batch size, torch and code."""
    described = f"{data.record()} {perturbations.checksum} {batch_size} {torch.__version__} {_code()}"
    digest = hashlib.sha256(described.encode())
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return folder / f"{digest.hexdigest()[:32]}.safetensors"


@cached
def _code() -> str:
    """Hash of the sources that a measurement is computed by, so that no change of them can be forgotten.

    The statistics of a report are not among them: they are computed from measurements each time.
    """
    room = resources.files("support_tokens.robustness")
    sources = [room.joinpath("measure.py"), *room.joinpath("perturbations").iterdir()]
    digest = hashlib.sha256()
    for source in sorted((s for s in sources if s.name.endswith(".py")), key=lambda s: s.name):
        digest.update(source.read_bytes())
    return digest.hexdigest()
