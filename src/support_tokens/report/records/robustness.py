"""The robustness report: a frozen value of plain numbers and text, as JSON and as rows of a table.

Tables, curves and verdicts are made from it without a model.
"""

__all__ = [
    "CALIBRATION_BINS",
    "Area",
    "ArmRecord",
    "BootstrapRecord",
    "Choice",
    "DataRecord",
    "Difference",
    "PerturbationRecord",
    "Result",
    "RobustnessReport",
    "Split",
]

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from support_tokens.errors import ArgumentError
from support_tokens.files import write_text
from support_tokens.report.records.base import Record
from support_tokens.report.records.estimate import Estimate
from support_tokens.report.records.histograms import MarginHistogram
from support_tokens.report.records.robustness_upgrade import upgrade
from support_tokens.report.records.structure import StructureFigures
from support_tokens.report.records.tokens import MarginRecord
from support_tokens.report.schema import AT_LEAST_ONE, FRACTION, NON_NEGATIVE, POSITIVE

if TYPE_CHECKING:
    import pandas as pd

CALIBRATION_BINS = 15
"""Bins of equal width that confidence is sorted into."""


@dataclass(frozen=True)
class ArmRecord:
    """One arm.

    Args:
        name: Its key in the report.
        label: Its name for display.
        description: How it was trained, one sentence.
        seconds: Wall time of training; None if unknown or if it was not trained here.
        embedding_rms: Root mean square of its embeddings, by seed.
        rms_ratio: Their mean over that of the baseline.
    """

    name: str
    label: str
    description: str
    seconds: Annotated[float, NON_NEGATIVE] | None
    embedding_rms: Annotated[tuple[float, ...], AT_LEAST_ONE]
    rms_ratio: float


@dataclass(frozen=True)
class PerturbationRecord:
    """One perturbation: its curve (`family`), its place on it (`strength` on `axis`), and its `parameters`."""

    name: str
    family: str
    strength: Annotated[float, NON_NEGATIVE]
    axis: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class DataRecord:
    """The evaluation data: sequences of at most `length` tokens; predicted tokens and characters; SHA-256."""

    sequences: Annotated[int, AT_LEAST_ONE]
    length: Annotated[int, AT_LEAST_ONE]
    tokens: Annotated[int, AT_LEAST_ONE]
    characters: int | None
    checksum: str


@dataclass(frozen=True)
class BootstrapRecord:
    """How the intervals were made, and over what: sequences, or sequences and seeds."""

    method: str
    confidence: Annotated[float, FRACTION]
    resamples: Annotated[int, NON_NEGATIVE]
    seed: int
    over: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """An arm under a perturbation.

    Args:
        arm: Its name.
        perturbation: Its name.
        bits: Bits a unit, mean over seeds.
        degradation: `bits` over those of the clean perturbation.
        bits_by_seed: The parts of `bits`.
        degradation_by_seed: The parts of `degradation`.
        n_sequences: Sequences that were scored.
        n_tokens: Tokens that were predicted.
        calibration: Expected calibration error of the likeliest token, or None.
        calibration_by_seed: Its parts.
    """

    arm: str
    perturbation: str
    bits: Estimate
    degradation: Estimate
    bits_by_seed: tuple[float, ...]
    degradation_by_seed: tuple[float, ...]
    n_sequences: Annotated[int, AT_LEAST_ONE]
    n_tokens: Annotated[int, AT_LEAST_ONE]
    calibration: Estimate | None = None
    calibration_by_seed: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.bits.value > 0:
            raise ArgumentError(
                f"Bits of arm {self.arm!r} under {self.perturbation!r} must be above 0, received {self.bits.value!r}; "
                "evaluate again."
            )


@dataclass(frozen=True)
class Area:
    """Area under an arm's curves of a family from 0 to `upper`, divided by `upper`: the mean height of the curves."""

    arm: str
    family: str
    upper: Annotated[float, POSITIVE]
    bits: Estimate
    degradation: Estimate


@dataclass(frozen=True)
class Difference:
    """`arm` minus `reference`, paired; `condition` is the name of a perturbation or, for areas, of a family."""

    arm: str
    reference: str
    condition: str
    bits: Estimate
    degradation: Estimate
    calibration: Estimate | None = None

    def reversed(self) -> "Difference":
        """`reference` minus `arm`."""
        calibration = None if self.calibration is None else -self.calibration
        return Difference(self.reference, self.arm, self.condition, -self.bits, -self.degradation, calibration)


@dataclass(frozen=True)
class Choice:
    """Bits of an arm on the sequences that arms are chosen on: clean, or the mean height of the curves of a family."""

    arm: str
    condition: str
    bits: float


@dataclass(frozen=True)
class Split:
    """Every other sequence, from the first, to choose arms on (`choice`), and the rest to judge them on (`judged`).

    An arm chosen on the text it is judged on would look better than it is. The trained models are the same in both, so
    the luck of their seeds is not divided.
    """

    choice: tuple[Choice, ...]
    judged: tuple[Difference, ...]


@dataclass(frozen=True)
class RobustnessReport(Record, kind="support-tokens/robustness", version=2, upgrade=upgrade):
    r"""Arms under perturbations, with paired intervals, as `evaluate_robustness` returns them.

    Args:
        baseline: Name of the arm that is the reference of `differences`.
        unit: `character` (figures are bits per character) or `token` (bits per token).
        seeds: Training seeds, the same for every arm.
        data: What was evaluated on.
        bootstrap: How the intervals were made.
        arms: In the order of display, baseline first.
        perturbation_checksum: Of the whole perturbation set.
        perturbations: In the order of display, clean first.
        results: One for each arm and perturbation.
        areas: One for each arm and family of perturbations.
        differences: Each arm against the baseline, for each perturbation.
        area_differences: Each arm against each arm that stands before it, for each family.
        margins: Histograms, where the caller had margins.
        sentence: Margins along one held-out text, a record an arm (`model` is the arm), where the caller had them.
        structure: Structure of embeddings and attention, where the caller had it.
        split: Areas on one half of the sequences, their differences on the other, where the caller asked for it.
        config: The caller's plan.
        versions: Of the packages that made the figures.

    Raises:
        ArgumentError: Parts that contradict each other.
    """

    baseline: str
    unit: str
    seeds: Annotated[tuple[int, ...], AT_LEAST_ONE]
    data: DataRecord
    bootstrap: BootstrapRecord
    arms: Annotated[tuple[ArmRecord, ...], AT_LEAST_ONE]
    perturbation_checksum: str
    perturbations: Annotated[tuple[PerturbationRecord, ...], AT_LEAST_ONE]
    results: tuple[Result, ...]
    areas: tuple[Area, ...]
    differences: tuple[Difference, ...]
    area_differences: tuple[Difference, ...]
    margins: tuple[MarginHistogram, ...] = ()
    sentence: tuple[MarginRecord, ...] = ()
    structure: tuple[StructureFigures, ...] = ()
    split: Split | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arms, perturbations = [arm.name for arm in self.arms], [p.name for p in self.perturbations]
        families = dict.fromkeys(p.family for p in self.perturbations if p.family != "clean")
        if self.baseline not in arms:
            raise ArgumentError(f"The baseline of a robustness report must be one of its arms, not {self.baseline!r}.")
        if not self.perturbations or self.perturbations[0].family != "clean":
            raise ArgumentError("The first perturbation of a robustness report must be the clean one, but is not.")
        pairs = itertools.combinations(arms, 2)
        checked: tuple[tuple[str, list[Any], Iterable[Any]], ...] = (
            ("arms", arms, dict.fromkeys(arms)),
            ("perturbations", perturbations, dict.fromkeys(perturbations)),
            ("results", [(r.arm, r.perturbation) for r in self.results], itertools.product(arms, perturbations)),
            ("areas", [(a.arm, a.family) for a in self.areas], itertools.product(arms, families)),
            (
                "differences",
                [(d.arm, d.reference, d.condition) for d in self.differences],
                ((arm, self.baseline, p) for arm in arms for p in perturbations if arm != self.baseline),
            ),
            (
                "area_differences",
                [(d.arm, d.reference, d.condition) for d in self.area_differences],
                ((later, earlier, family) for earlier, later in pairs for family in families),
            ),
            *self._parts_of_split(arms, families),
        )
        for what, present, required in checked:
            if sorted(present) != (wanted := sorted(required)):
                wrong = set(present) ^ set(wanted) or {key for key, n in Counter(present).items() if n > 1}
                raise ArgumentError(
                    f"The {what} of a robustness report must be there once for each of its arms and perturbations, but "
                    f"{min(wrong)!r} is missing or too many; evaluate again."
                )
        counts = {len(by_seed) for r in self.results for by_seed in (r.bits_by_seed, r.degradation_by_seed)}
        counts |= {len(r.calibration_by_seed) for r in self.results if r.calibration_by_seed}
        if counts != {len(self.seeds)}:
            raise ArgumentError(
                f"The results of a robustness report must have one figure for each of its {len(self.seeds)} seeds, but "
                f"have {sorted(counts)}; evaluate again."
            )
        shown = {counts.arm for histogram in self.margins for counts in histogram.arms}
        shown |= {record.model for record in self.sentence} | {structure.arm for structure in self.structure}
        if not shown <= set(arms):
            raise ArgumentError(f"Margins in a robustness report must be of its arms, not of {shown - set(arms)}.")

    def _parts_of_split(self, arms: Sequence[str], families: Iterable[str]) -> Iterator[tuple[str, list, Iterable]]:
        """What a split must hold, as `__post_init__` checks it."""
        if self.split is not None:
            curves = [self.perturbations[0].name, *families]
            yield "choice", [(c.arm, c.condition) for c in self.split.choice], itertools.product(arms, curves)
            judged = [(d.arm, d.reference, d.condition) for d in self.split.judged]
            yield "judged", judged, ((d.arm, d.reference, d.condition) for d in self.area_differences)

    @property
    def status(self) -> str:
        """One sentence: what was compared, on how much, and what the intervals cover."""
        arms = f"{len(self.arms)} {self.noun}{'s' if len(self.arms) > 1 else ''}"
        seeds = f", {len(self.seeds)} seeds"
        if len(self.seeds) == 1:
            seeds = ", one seed, so no claim about training" if self.trained else ""
        return (
            f"{arms} under {len(self.perturbations)} perturbations on {self.data.sequences} sequences "
            f"({self.data.tokens} predicted tokens){seeds}; {self.bootstrap.confidence:.0%} intervals over "
            f"{' and '.join(self.bootstrap.over) or 'nothing'}."
        )

    @property
    def trained(self) -> bool:
        """Whether the models were trained in this experiment, so that seeds of training are part of the question."""
        return "plan" in self.config

    @property
    def noun(self) -> str:
        """What is compared: an `arm` is one way of training, with a model for each seed; else it is a `model`."""
        return "arm" if self.trained or len(self.seeds) > 1 else "model"

    @property
    def measure(self) -> str:
        """`BPC` or `bits per token`."""
        return "BPC" if self.unit == "character" else "bits per token"

    @property
    def families(self) -> list[str]:
        """Families of perturbations that have a curve, in order."""
        return list(dict.fromkeys(area.family for area in self.areas))

    def arm(self, name: str) -> ArmRecord:
        """The record of the arm `name`."""
        return next(arm for arm in self.arms if arm.name == name)

    def result(self, arm: str, perturbation: str) -> Result:
        """The result of `arm` under `perturbation`."""
        return next(r for r in self.results if (r.arm, r.perturbation) == (arm, perturbation))

    def area(self, arm: str, family: str) -> Area:
        """The mean heights of the curves of `arm` under `family`."""
        return next(a for a in self.areas if (a.arm, a.family) == (arm, family))

    def difference(self, arm: str, perturbation: str) -> Difference | None:
        """`arm` minus the baseline under `perturbation`; None for the baseline itself."""
        return next((d for d in self.differences if (d.arm, d.condition) == (arm, perturbation)), None)

    def area_difference(self, arm: str, reference: str, family: str) -> Difference:
        """`arm` minus `reference` over the curve of `family`, whichever way round the report holds it."""
        for difference in self.area_differences:
            pair = difference.arm, difference.reference
            if difference.condition == family and set(pair) == {arm, reference}:
                return difference if pair == (arm, reference) else difference.reversed()
        raise KeyError((arm, reference, family))

    def __repr__(self) -> str:
        return f"RobustnessReport({self.status!r})"

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for each arm, perturbation and seed, and one over all seeds with intervals (`seed` is `all`)."""
        perturbations = {p.name: p for p in self.perturbations}
        for result in self.results:
            perturbation = perturbations[result.perturbation]
            place = {
                "arm": result.arm,
                "perturbation": result.perturbation,
                "family": perturbation.family,
                "strength": perturbation.strength,
                "unit": self.unit,
                "n_sequences": result.n_sequences,
                "n_tokens": result.n_tokens,
            }
            difference = self.difference(result.arm, result.perturbation)
            figures = ("bits", "degradation", "calibration")
            row = {**place, "seed": "all", "n_seeds": len(self.seeds)}
            for figure in figures:
                row |= _columns(figure, getattr(result, figure))
            for figure in figures:
                row |= _columns(f"{figure}_difference", difference and getattr(difference, figure))
            yield row
            for i, seed in enumerate(self.seeds):
                row = {"bits": result.bits_by_seed[i], "degradation": result.degradation_by_seed[i]}
                if result.calibration_by_seed:
                    row["calibration"] = result.calibration_by_seed[i]
                yield {**place, "seed": seed, "n_seeds": 1, **row}

    def to_dataframe(self) -> "pd.DataFrame":
        """`rows` as a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame(list(self.rows()))

    def to_csv(self, path: str | Path) -> None:
        """Writes `rows` to `path` as CSV, atomically.

        Raises:
            RunFolderError: The file cannot be written.
        """
        import csv
        import io

        rows = list(self.rows())
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(path, text.getvalue())


def _columns(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    return {
        name: estimate and estimate.value,
        f"{name}_low": estimate and estimate.low,
        f"{name}_high": estimate and estimate.high,
    }
