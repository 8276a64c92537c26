r"""The robustness report, as a frozen value and as JSON of schema version 1: what evaluations leave and reports read.

Everything in it is plain numbers and text, so that tables, curves and verdicts are made without a model at hand.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from support_tokens.errors import ArgumentError
from support_tokens.intervals import Estimate
from support_tokens.run_folder import read_json, write_json
from support_tokens.schema import decode, encode

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Area",
    "ArmRecord",
    "BootstrapRecord",
    "DataRecord",
    "Difference",
    "MarginCounts",
    "MarginHistogram",
    "MarginTrace",
    "PerturbationRecord",
    "Result",
    "RobustnessReport",
    "SentenceMargins",
]


@dataclass(frozen=True)
class ArmRecord:
    """One arm; `embedding_rms` by seed, their mean over that of the baseline, `rms_ratio`; `seconds` of training."""

    name: str
    label: str
    description: str
    seconds: float | None
    embedding_rms: tuple[float, ...]
    rms_ratio: float


@dataclass(frozen=True)
class PerturbationRecord:
    """One perturbation: the curve (`family`) and place on it (`strength` on `axis`), and all that defines it."""

    name: str
    family: str
    strength: float
    axis: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class DataRecord:
    """The evaluation data: sequences of at most `length` tokens; tokens and characters that are predicted; SHA-256."""

    sequences: int
    length: int
    tokens: int
    characters: int | None
    checksum: str


@dataclass(frozen=True)
class BootstrapRecord:
    """How the intervals were made, and over what: sequences, or sequences and seeds."""

    method: str
    confidence: float
    resamples: int
    seed: int
    over: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """An arm under a perturbation: `bits` a unit (mean over seeds) and its ratio to clean, `degradation`."""

    arm: str
    perturbation: str
    bits: Estimate
    degradation: Estimate
    bits_by_seed: tuple[float, ...]
    degradation_by_seed: tuple[float, ...]
    n_sequences: int
    n_tokens: int


@dataclass(frozen=True)
class Area:
    """Area under an arm's curves of a family from 0 to `upper`, divided by `upper`: the mean height of the curves."""

    arm: str
    family: str
    upper: float
    bits: Estimate
    degradation: Estimate


@dataclass(frozen=True)
class Difference:
    """`arm` minus `against`, paired; `of` is the name of a perturbation or, for areas, of a family."""

    arm: str
    against: str
    of: str
    bits: Estimate
    degradation: Estimate


@dataclass(frozen=True)
class MarginCounts:
    """Histogram of one arm's log margins; `negative_counts` are those of them with a negative determinant.

    `below` and `above` lie outside of the shared edges, `singular` have log margin minus infinity and stand in no bin.
    """

    arm: str
    n: int
    counts: tuple[int, ...]
    negative_counts: tuple[int, ...]
    below: int
    above: int
    singular: int
    mean: float | None
    minimum: float | None
    negative_share: float


@dataclass(frozen=True)
class MarginHistogram:
    """Histograms of several arms over the same edges; `source`, `layer` and `view` say whose margins they are."""

    source: str
    layer: int
    view: str
    edges: tuple[float, ...]
    arms: tuple[MarginCounts, ...]


@dataclass(frozen=True)
class MarginTrace:
    """Log margins along a text for one arm; None at a singular position; `support` are the smallest among the valid."""

    arm: str
    tokens: tuple[str, ...]
    log_abs_det: tuple[float | None, ...]
    sign: tuple[int, ...]
    valid: tuple[bool, ...]
    support: tuple[int, ...]


@dataclass(frozen=True)
class SentenceMargins:
    """A held-out text, read by each arm; `source`, `layer` and `view` say whose margins they are."""

    source: str
    layer: int
    view: str
    arms: tuple[MarginTrace, ...]


@dataclass(frozen=True)
class RobustnessReport:
    r"""Arms under perturbations, with paired intervals, as `evaluate_robustness` leaves them.

    Args:
        baseline: Name of the arm that `differences` are taken against.
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
        sentence: Margins along a held-out text, where the caller had them.
        config: The caller's plan.
        versions: Of the packages that made the figures.

    Example:
        >>> RobustnessReport.schema_version, RobustnessReport.kind
        (1, 'support-tokens/robustness')
    """

    schema_version: ClassVar[int] = 1
    kind: ClassVar[str] = "support-tokens/robustness"

    baseline: str
    unit: str
    seeds: tuple[int, ...]
    data: DataRecord
    bootstrap: BootstrapRecord
    arms: tuple[ArmRecord, ...]
    perturbation_checksum: str
    perturbations: tuple[PerturbationRecord, ...]
    results: tuple[Result, ...]
    areas: tuple[Area, ...]
    differences: tuple[Difference, ...]
    area_differences: tuple[Difference, ...]
    margins: tuple[MarginHistogram, ...] = ()
    sentence: SentenceMargins | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {(result.arm, result.perturbation) for result in self.results}
        wanted = [(arm.name, p.name) for arm in self.arms for p in self.perturbations]
        missing = [pair for pair in wanted if pair not in known]
        if missing:
            raise ArgumentError(
                f"A robustness report needs a result for each arm under each perturbation, but arm {missing[0][0]!r} "
                f"under {missing[0][1]!r} has none; evaluate it again."
            )
        if self.baseline not in {arm.name for arm in self.arms}:
            raise ArgumentError(f"The baseline of a robustness report must be one of its arms, not {self.baseline!r}.")

    @property
    def status(self) -> str:
        """One sentence: what was compared, on how much, and what the intervals cover.

        It is also the line that the command line prints when it is done.
        """
        arms = "1 arm" if len(self.arms) == 1 else f"{len(self.arms)} arms"
        seeds = f"{len(self.seeds)} seeds" if len(self.seeds) > 1 else "one seed, so no claim about training"
        return (
            f"{arms} under {len(self.perturbations)} perturbations on {self.data.sequences} sequences "
            f"({self.data.tokens} predicted tokens), {seeds}; {self.bootstrap.confidence:.0%} intervals over "
            f"{' and '.join(self.bootstrap.over) or 'nothing'}."
        )

    @property
    def measure(self) -> str:
        """`BPC` or `bits per token`."""
        return "BPC" if self.unit == "character" else "bits per token"

    def arm(self, name: str) -> ArmRecord:
        """The record of the arm `name`."""
        return next(arm for arm in self.arms if arm.name == name)

    def result(self, arm: str, perturbation: str) -> Result:
        """The result of `arm` under `perturbation`."""
        return next(r for r in self.results if (r.arm, r.perturbation) == (arm, perturbation))

    def difference(self, arm: str, perturbation: str) -> Difference | None:
        """`arm` minus the baseline under `perturbation`; None for the baseline itself."""
        return next((d for d in self.differences if (d.arm, d.of) == (arm, perturbation)), None)

    def record(self) -> dict[str, Any]:
        """The report as plain JSON values, schema version and kind first."""
        return {"schema_version": self.schema_version, "kind": self.kind, "status": self.status, **encode(self)}

    @classmethod
    def from_record(cls, record: Any, *, whose: str = "robustness report") -> "RobustnessReport":
        """The report that plain JSON values describe.

        Args:
            record: What `record` gave, after JSON.
            whose: Named in errors, usually the path of the file.

        Raises:
            RunFolderError: Another kind or schema version, or a value that is missing or of a wrong type.
        """
        return decode(cls, record, whose=whose, kind=cls.kind, schema_version=cls.schema_version)

    def to_json(self, path: str | Path) -> None:
        """Writes the report to `path`, atomically.

        Raises:
            RunFolderError: The file cannot be written.
        """
        write_json(path, self.record())

    @classmethod
    def from_json(cls, path: str | Path) -> "RobustnessReport":
        """Reads a report.

        Raises:
            RunFolderError: The file is missing, is not JSON, or is no robustness report of this schema version.
        """
        return cls.from_record(read_json(path), whose=str(path))

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
            yield {
                **place,
                "seed": "all",
                "n_seeds": len(self.seeds),
                **_columns("bits", result.bits),
                **_columns("degradation", result.degradation),
                **_columns("bits_difference", difference and difference.bits),
                **_columns("degradation_difference", difference and difference.degradation),
            }
            for seed, bits, ratio in zip(self.seeds, result.bits_by_seed, result.degradation_by_seed, strict=True):
                yield {**place, "seed": seed, "n_seeds": 1, "bits": bits, "degradation": ratio}

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

        from support_tokens.run_folder import write_text

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
