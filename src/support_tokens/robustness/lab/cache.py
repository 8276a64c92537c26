"""Models measured one after another, each once: what a stopped evaluation had finished is read again."""

__all__ = ["key_of", "measure_arms"]

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from support_tokens.errors import RunFolderError
from support_tokens.files import write_bytes
from support_tokens.robustness.measure import EvaluationData, Measurement, measure
from support_tokens.robustness.perturbations.set import PerturbationSet

_TABLES = ("nats", "units", "tokens", "gaps")


def measure_arms(
    models: Mapping[str, Sequence[nn.Module]],
    data: EvaluationData,
    perturbations: PerturbationSet,
    *,
    cache: Path | None = None,
    batch_size: int = 16,
    progress: bool = True,
) -> dict[str, list[Measurement]]:
    """Measures each model of each arm.

    Args:
        models: Models by arm, one a seed; they may be read lazily.
        data: Held-out sequences.
        perturbations: The set.
        cache: Folder that keeps each measurement as soon as it is made, under a name that follows from the weights of
            the model, the data, the set and the batch size: it is read again for these and for nothing else.
        batch_size: Sequences at a time.
        progress: Draw a bar on stderr.

    Raises:
        ArgumentError: As in `measure`.
        RunFolderError: The cache cannot be read or written.
    """
    total = len(perturbations.items) * -(-data.sequences // batch_size) * sum(map(len, models.values()))
    measured: dict[str, list[Measurement]] = {}
    with _bar(total, enabled=progress) as (bar, task):
        for arm, of_arm in models.items():
            measured[arm] = []
            for number in range(len(of_arm)):
                model = of_arm[number]
                path = (
                    None if cache is None else cache / f"{key_of(model, data, perturbations, batch_size)}.safetensors"
                )
                if path is not None and path.exists():
                    found = _read(path, perturbations)
                    bar.advance(task, total / sum(map(len, models.values())))
                else:

                    def advance(what: str, arm: str = arm) -> None:
                        bar.update(task, advance=1, description=f"{arm}: {what}")

                    whose = f"arm '{arm}'" + (f", seed {number}" if len(of_arm) > 1 else "")
                    found = measure(model, data, perturbations, batch_size=batch_size, progress=advance, whose=whose)
                    if path is not None:
                        path.parent.mkdir(parents=True, exist_ok=True)
                        _write(path, found, perturbations)
                measured[arm].append(found)
    return measured


def key_of(model: nn.Module, data: EvaluationData, perturbations: PerturbationSet, batch_size: int) -> str:
    """What a measurement follows from, as a name for it: weights, data, perturbations and batch size."""
    digest = hashlib.sha256(f"{data.record()} {perturbations.checksum} {batch_size} {torch.__version__}".encode())
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _write(path: Path, measured: Measurement, perturbations: PerturbationSet) -> None:
    tensors = {"embedding_rms": torch.tensor(measured.embedding_rms, dtype=torch.float64)}
    for place, perturbation in enumerate(perturbations.items):
        for table in _TABLES:
            tensors[f"{table}.{place}"] = torch.from_numpy(getattr(measured, table)[perturbation.name])
    write_bytes(path, save_tensors(tensors))


def _read(path: Path, perturbations: PerturbationSet) -> Measurement:
    try:
        tensors = load_tensors(path.read_bytes())
        tables = [
            {p.name: tensors[f"{table}.{place}"].numpy() for place, p in enumerate(perturbations.items)}
            for table in _TABLES
        ]
        rms = float(tensors["embedding_rms"])
    except (OSError, SafetensorError, KeyError) as error:
        raise RunFolderError(f"'{path}' is no measurement ({error}); delete it, and it is made anew.") from error
    return Measurement(tables[0], rms, *tables[1:])


@contextmanager
def _bar(total: float, *, enabled: bool) -> Iterator[tuple[Progress, TaskID]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not enabled) as bar:
        yield bar, bar.add_task("evaluation", total=total)
