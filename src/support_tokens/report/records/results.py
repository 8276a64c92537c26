r"""The robustness report, as a frozen value and as JSON of schema version 1: what evaluations leave and reports read.

Everything in it is plain numbers and text, so that tables, curves and verdicts are made without a model at hand.
"""

__all__ = ["RobustnessReport"]

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from support_tokens.errors import ArgumentError
from support_tokens.files import read_json, write_json
from support_tokens.report.records.estimate import Estimate
from support_tokens.report.records.robustness import (
    Area,
    ArmRecord,
    BootstrapRecord,
    DataRecord,
    Difference,
    MarginHistogram,
    PerturbationRecord,
    Result,
    SentenceMargins,
    Split,
    StructureFigures,
)
from support_tokens.report.schema import decode, encode

if TYPE_CHECKING:
    import pandas as pd


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
        structure: Figures of embeddings and attention, where the caller had them.
        split: Areas on one half of the sequences, their differences on the other, where the caller asked for it.
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
        for what, found, required in (
            ("results", {(r.arm, r.perturbation) for r in self.results}, itertools.product(arms, perturbations)),
            ("areas", {(a.arm, a.family) for a in self.areas}, itertools.product(arms, families)),
            (
                "differences",
                {(d.arm, d.against, d.of) for d in self.differences},
                ((arm, self.baseline, p) for arm in arms for p in perturbations if arm != self.baseline),
            ),
            (
                "area_differences",
                {(d.arm, d.against, d.of) for d in self.area_differences},
                ((later, earlier, family) for earlier, later in pairs for family in families),
            ),
            *self._parts_of_split(arms, families),
            ("seeds", {len(r.bits_by_seed) for r in self.results}, {len(self.seeds)}),
        ):
            if found != (wanted := set(required)):
                raise ArgumentError(
                    f"The {what} of a robustness report must be there once for each of its arms and perturbations, but "
                    f"{min(found ^ wanted)!r} is missing or too many; evaluate again."
                )
        shown = [c.arm for h in self.margins for c in h.arms] + [t.arm for s in (self.sentence,) if s for t in s.arms]
        shown += [figures.arm for figures in self.structure]
        if not set(shown) <= set(arms):
            raise ArgumentError(f"Margins in a robustness report must be of its arms, not of {set(shown) - set(arms)}.")

    def _parts_of_split(self, arms: Sequence[str], families: Iterable[str]) -> Iterator[tuple[str, set, Iterator]]:
        """What a split must hold, as `__post_init__` checks it."""
        if self.split is not None:
            curves = [self.perturbations[0].name, *families]
            yield "choice", {(c.arm, c.of) for c in self.split.choice}, itertools.product(arms, curves)
            judged = {(d.arm, d.against, d.of) for d in self.split.judged}
            yield "judged", judged, ((d.arm, d.against, d.of) for d in self.area_differences)

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
                **_columns("calibration", result.calibration),
                **_columns("bits_difference", difference and difference.bits),
                **_columns("degradation_difference", difference and difference.degradation),
                **_columns("calibration_difference", difference and difference.calibration),
            }
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

        from support_tokens.files import write_text

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
