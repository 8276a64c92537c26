"""An experiment as a JSON file: corpus, plan, arms, seeds and perturbations."""

__all__ = ["PRESETS", "Preset", "load_preset"]

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from support_tokens.errors import ArgumentError, RunFolderError
from support_tokens.regularizers import parse_regularizer, regularizer_label
from support_tokens.report.records import Record
from support_tokens.robustness.perturbations.set import FAMILIES
from support_tokens.training import plan_from_config

PRESETS = ("quick", "paper")
"""Presets that come with the package."""


@dataclass(frozen=True)
class Preset(Record, kind="support-tokens/preset"):
    """An experiment.

    Args:
        title: One line for people.
        corpus: As for `load_corpus`.
        plan: Fields of the training plan that are not the default; the seed is none of them.
        arms: Arms as on the command line; the first is the baseline.
        seeds: Seeds of training.
        sequences: Windows of the test part.
        sigmas: Standard deviations of the noise.
        families: Families of perturbations.
        others: Other corpora whose test part is read.
        barrier: The arm that stands for the paper's, one of `arms`; empty: nothing is set beside the paper.
        path: Arms of the paper's path over the weight of the barrier, from 0 on.

    Raises:
        ArgumentError: An unknown arm, family or plan, arms or seeds that are there twice, or too few.

    Example:
        >>> load_preset("quick").arms[0]
        'ce'
    """

    title: str
    corpus: str
    plan: Mapping[str, Any]
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    sequences: int = 64
    sigmas: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0)
    families: tuple[str, ...] = ("noise",)
    others: tuple[str, ...] = ()
    barrier: str = ""
    path: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        labels = [regularizer_label(parse_regularizer(arm)) for arm in self.arms]
        if not labels or not self.seeds or len(set(labels)) < len(labels) or len(set(self.seeds)) < len(self.seeds):
            raise ArgumentError(
                "A preset must have arms and seeds, each once, but has the arms "
                f"{', '.join(self.arms) or 'none'} and the seeds {', '.join(map(str, self.seeds)) or 'none'}."
            )
        if "seed" in self.plan:
            raise ArgumentError("The plan of a preset has no seed, since the preset has its own; leave it out.")
        try:
            plan_from_config(dict(self.plan))
        except RunFolderError as error:
            raise ArgumentError(f"The plan of a preset cannot be used: {error}") from error
        unknown = [family for family in self.families if family not in FAMILIES]
        if unknown:
            raise ArgumentError(f"Families of perturbations are {', '.join(FAMILIES)}, not {unknown[0]!r}.")
        for arm in (*self.path, *filter(None, (self.barrier,))):
            if arm not in self.arms:
                raise ArgumentError(f"The arm {arm!r} of the paper's comparison is none of the arms; add it to them.")


def load_preset(name: str | Path) -> Preset:
    """A preset by its name, or from a JSON file.

    Args:
        name: One of `PRESETS`, or a path that ends in `.json`.

    Raises:
        ArgumentError: There is none of that name.
        RunFolderError: The file cannot be read or is no preset.
    """
    if name in PRESETS:
        path = Path(str(resources.files("support_tokens.robustness.lab").joinpath(f"{name}.json")))
    elif str(name).endswith(".json"):
        path = Path(name)
    else:
        raise ArgumentError(
            f"there is no preset '{name}'; presets are {', '.join(PRESETS)}, or the path of a JSON file."
        )
    return Preset.from_json(path)
