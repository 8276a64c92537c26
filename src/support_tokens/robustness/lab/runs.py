"""Finished runs grouped into arms of several seeds that share one plan and one corpus."""

__all__ = ["TrainedRun", "by_label", "corpus_of", "open_run"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from support_tokens.errors import ArgumentError, DataError, RunFolderError
from support_tokens.regularizers import Regularizer, regularizer_from_config, regularizer_label
from support_tokens.training import Corpus, RunFolder, load_corpus, read_result


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its folder, its arm, and the seed and configuration it was trained with."""

    folder: Path
    arm: Regularizer
    seed: int
    config: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The arm with its options, the same for all seeds of it."""
        return regularizer_label(self.arm)


def open_run(folder: str | Path) -> TrainedRun:
    """Opens the folder of a finished run.

    Raises:
        RunFolderError: There is no finished run, or its configuration cannot be used.
    """
    run = RunFolder.open(folder)
    read_result(run.path)
    config = run.config()
    try:
        return TrainedRun(run.path, regularizer_from_config(config["arm"]), int(config["plan"]["seed"]), config)
    except (KeyError, TypeError, ArgumentError) as error:
        raise RunFolderError(f"'{run.path / 'config.json'}' is not that of a run ({error}); train again.") from error


def by_label(runs: Sequence[TrainedRun]) -> dict[str, list[TrainedRun]]:
    """Runs by arm, in order of seed.

    Raises:
        ArgumentError: Two runs of one arm and seed, or runs of another plan or corpus, or arms of other seeds, than the
            first.
    """
    found: dict[str, list[TrainedRun]] = {}
    for run in runs:
        found.setdefault(run.label, []).append(run)
    first = runs[0]
    for run in runs:
        for part in ("plan", "corpus"):
            ours, theirs = dict(run.config[part]), dict(first.config[part])
            if part == "plan":
                del ours["seed"], theirs["seed"]
            if ours != theirs:
                raise ArgumentError(
                    f"runs that are compared must share their {part} (but for the seed), and those of '{run.folder}' "
                    f"and '{first.folder}' differ; evaluate them apart, or train them alike."
                )
    for of_arm in found.values():
        of_arm.sort(key=lambda run: run.seed)
        for one, other in pairwise(of_arm):
            if one.seed == other.seed:
                raise ArgumentError(
                    f"runs of one arm must differ in seed, and '{one.folder}' and '{other.folder}' are both "
                    f"{one.label} of seed {one.seed}; leave one out."
                )
    seeds = {label: [run.seed for run in of_arm] for label, of_arm in found.items()}
    if any(s != seeds[first.label] for s in seeds.values()):
        raise ArgumentError(f"arms that are compared must have the same seeds, received {seeds}; add the missing runs.")
    return found


def corpus_of(run: TrainedRun, data: str | None) -> Corpus:
    """The corpus `data`, or the one that the run was trained on.

    Raises:
        DataError: It cannot be read, or the one of training has changed since.
    """
    trained_on = run.config["corpus"]
    corpus = load_corpus(trained_on["name"] if data is None else data)
    if data is None and corpus.sha256 != trained_on["sha256"]:
        raise DataError(
            f"corpus '{corpus.name}' has changed since '{run.folder}' was trained on it (another checksum); "
            "restore it, or pass --data."
        )
    return corpus
