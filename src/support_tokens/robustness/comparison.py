r"""The report of what was measured; every figure is a function of the weights of sequences, so that all are paired."""

__all__ = ["ArmDetails", "compare"]

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from support_tokens.errors import ArgumentError
from support_tokens.files import versions
from support_tokens.report.records import (
    Area,
    ArmMargins,
    ArmRecord,
    BootstrapRecord,
    Choice,
    Difference,
    Estimate,
    PerturbationRecord,
    Result,
    RobustnessReport,
    Split,
    StructureFigures,
    histograms,
    sentence,
)
from support_tokens.robustness.bootstrap import Bootstrap, Statistic
from support_tokens.robustness.measure import EvaluationData, Measurement
from support_tokens.robustness.perturbations.set import PerturbationSet

OfArm = Callable[[str], Statistic]
"""Maps the name of an arm to a figure: weights of sequences `(..., N)` to values of seeds `(..., S)`."""


@dataclass(frozen=True)
class ArmDetails:
    r"""What the report shows of an arm besides its measurements.

    Args:
        label: Name for display; the key of the arm if empty.
        description: One sentence: how the arm was trained.
        seconds: Wall time of training.
        margins: Log margins on held-out text and along one sentence.
    """

    label: str = ""
    description: str = ""
    seconds: float | None = None
    margins: ArmMargins | None = None


def compare(
    measured: Mapping[str, Sequence[Measurement]],
    data: EvaluationData,
    perturbations: PerturbationSet,
    *,
    baseline: str | None = None,
    seeds: Sequence[int] | None = None,
    details: Mapping[str, ArmDetails] | None = None,
    bootstrap: Bootstrap | None = None,
    structure: Sequence[StructureFigures] = (),
    split: bool = False,
    config: Mapping[str, Any] | None = None,
) -> RobustnessReport:
    r"""Report of measurements of each arm, one a seed.

    Args:
        measured: Measurements by arm, one a seed.
        data: What they were measured on.
        perturbations: What they were measured under.
        baseline: As in `evaluate_robustness`.
        seeds: As in `evaluate_robustness`.
        details: As in `evaluate_robustness`.
        bootstrap: As in `evaluate_robustness`.
        structure: Structure of the arms, as `measure_structure` returns it.
        split: With two sequences or more, also keep the figures for selecting arms on one half of the sequences and
            judging them on the other.
        config: As in `evaluate_robustness`.

    Raises:
        ArgumentError: As in `evaluate_robustness`, or models were not scored on the same tokens.
    """
    first, n_seeds = _check_arms(measured, baseline, seeds, details)
    order = [first, *(name for name in measured if name != first)]
    chosen = bootstrap or Bootstrap()
    figures = _Comparison(measured, data, perturbations, chosen, n_seeds)
    known = {name: (details or {}).get(name, ArmDetails()) for name in order}
    labels = tuple(seeds) if seeds is not None else tuple(range(n_seeds))
    rms = {name: float(np.mean([m.embedding_rms for m in measured[name]])) for name in order}
    pairs = [(arm, other) for place, arm in enumerate(order) for other in order[:place]]
    return RobustnessReport(
        baseline=first,
        unit=data.unit,
        seeds=labels,
        data=data.record(),
        bootstrap=BootstrapRecord(
            "BCa",
            chosen.confidence,
            chosen.resamples,
            chosen.seed,
            ("sequences",) * (data.sequences > 1) + ("seeds",) * (n_seeds > 1),
        ),
        arms=tuple(
            ArmRecord(
                name,
                known[name].label or name,
                known[name].description,
                known[name].seconds,
                tuple(m.embedding_rms for m in measured[name]),
                rms[name] / rms[first],
            )
            for name in order
        ),
        perturbation_checksum=perturbations.checksum,
        perturbations=tuple(
            PerturbationRecord(p.name, p.family, p.strength, p.axis, p.record()) for p in perturbations.items
        ),
        results=tuple(figures.result(name, p.name) for name in order for p in perturbations.items),
        areas=tuple(figures.area(name, family) for name in order for family in figures.families),
        differences=tuple(
            figures.difference(
                name, first, p.name, figures.bits(p.name), figures.degradation(p.name), figures.calibration(p.name)
            )
            for name in order[1:]
            for p in perturbations.items
        ),
        area_differences=tuple(figures.area_difference(*pair, family) for pair in pairs for family in figures.families),
        margins=histograms({name: known[name].margins for name in order}),
        sentence=sentence({name: known[name].margins for name in order}),
        structure=tuple(structure),
        split=_split(measured, data, perturbations, chosen, pairs) if split and data.sequences > 1 else None,
        config=dict(config or {}),
        versions=versions(),
    )


def _split(
    measured: Mapping[str, Sequence[Measurement]],
    data: EvaluationData,
    perturbations: PerturbationSet,
    bootstrap: Bootstrap,
    pairs: Sequence[tuple[str, str]],
) -> Split:
    chosen_on, judged_on = (
        _Comparison(
            {arm: [m.part(rows) for m in of_arm] for arm, of_arm in measured.items()},
            data.part(rows),
            perturbations,
            bootstrap,
            len(next(iter(measured.values()))),
        )
        for rows in (slice(0, None, 2), slice(1, None, 2))
    )
    return Split(
        tuple(Choice(arm, condition, bits) for arm in measured for condition, bits in chosen_on.heights(arm).items()),
        tuple(judged_on.area_difference(*pair, family) for pair in pairs for family in judged_on.families),
    )


def _check_arms(
    measured: Mapping[str, Sequence[object]],
    baseline: str | None,
    seeds: Sequence[int] | None,
    details: Mapping[str, ArmDetails] | None,
) -> tuple[str, int]:
    """Name of the baseline, and number of seeds."""
    if not measured:
        raise ArgumentError("At least one arm is required for an evaluation, received none; pass {'name': model}.")
    counts = {name: len(of_arm) for name, of_arm in measured.items()}
    n_seeds = next(iter(counts.values()))
    if n_seeds < 1 or set(counts.values()) != {n_seeds}:
        raise ArgumentError(
            f"Arms that are compared must have the same number of seeds, at least one, received {counts}; pass one "
            "model a seed."
        )
    if seeds is not None and (len(seeds) != n_seeds or len(set(seeds)) != n_seeds):
        raise ArgumentError(
            f"seeds must be {n_seeds} different numbers, one a model of each arm, received {list(seeds)}; leave out "
            "or add seeds."
        )
    first = next(iter(measured)) if baseline is None else baseline
    for name in (first, *(details or {})):
        if name not in measured:
            raise ArgumentError(f"An arm must be one of {', '.join(map(repr, measured))}, received {name!r}; name one.")
    return first, n_seeds


class _Comparison:
    """Statistics of measurements, and their estimates.

    Args:
        measured: Measurements by arm, one a seed.
        data: What they were measured on.
        perturbations: What they were measured under, clean first.
        bootstrap: Makes the intervals.
        n_seeds: Number of seeds of each arm.

    Raises:
        ArgumentError: Models were not scored on the same tokens.
    """

    def __init__(
        self,
        measured: Mapping[str, Sequence[Measurement]],
        data: EvaluationData,
        perturbations: PerturbationSet,
        bootstrap: Bootstrap,
        n_seeds: int,
    ) -> None:
        self._bootstrap, self._n_seeds, self._sequences = bootstrap, n_seeds, data.sequences
        self._nats: dict[tuple[str, str], NDArray[np.float64]] = {}
        self._gaps: dict[tuple[str, str], NDArray[np.float64]] = {}
        self._units: dict[str, NDArray[np.float64]] = {}
        self._tokens: dict[str, NDArray[np.float64]] = {}
        for p in perturbations.items:
            # Data and perturbation determine what is scored, never the arm, so all models share it.
            counts = [m for of_arm in measured.values() for m in of_arm]
            self._units[p.name] = _shared(counts, "units", p.name, data.units)
            self._tokens[p.name] = _shared(counts, "tokens", p.name, data.predicted)
            for arm, of_arm in measured.items():
                self._nats[arm, p.name] = np.stack([m.nats[p.name] for m in of_arm])
                if all(p.name in m.gaps for m in of_arm):
                    self._gaps[arm, p.name] = np.stack([m.gaps[p.name] for m in of_arm])
        self._clean = perturbations.items[0].name
        self._curves = {p.family: [(0.0, self._clean)] for p in perturbations.items[1:]}
        for p in perturbations.items[1:]:
            self._curves[p.family].append((p.strength, p.name))

    def bits(self, perturbation: str) -> OfArm:
        """Nats / ln 2 / scored units, `(..., N)` weights to `(..., S)`."""
        units = self._units[perturbation]

        def of_arm(arm: str) -> Statistic:
            nats = self._nats[arm, perturbation]
            return lambda weights: weights @ nats.T / (math.log(2) * weights @ units)[..., None]

        return of_arm

    def calibration(self, perturbation: str) -> OfArm | None:
        """Expected calibration error, `(..., N)` weights to `(..., S)`; None where some arm was not calibrated."""
        if any((arm, perturbation) not in self._gaps for arm, name in self._nats if name == perturbation):
            return None
        tokens = self._tokens[perturbation]

        def of_arm(arm: str) -> Statistic:
            gaps = self._gaps[arm, perturbation]
            flat = gaps.transpose(1, 0, 2).reshape(gaps.shape[1], -1)  # (N, S bins)

            def error(weights: NDArray[np.float64]) -> NDArray[np.float64]:
                sums = (weights @ flat).reshape(*weights.shape[:-1], gaps.shape[0], gaps.shape[2])
                return np.abs(sums).sum(-1) / (weights @ tokens)[..., None]

            return error

        return of_arm

    def degradation(self, perturbation: str) -> OfArm:
        """Bits under the perturbation over clean bits."""

        def of_arm(arm: str) -> Statistic:
            perturbed, clean = self.bits(perturbation)(arm), self.bits(self._clean)(arm)
            return lambda weights: perturbed(weights) / clean(weights)

        return of_arm

    def mean_height(self, family: str, what: str) -> OfArm:
        """Trapezoidal area under the curve of a family, from clean at strength 0, over its width."""
        points = sorted(self._curves[family])
        strengths = np.array([strength for strength, _ in points])
        of_point = self.bits if what == "bits" else self.degradation

        def of_arm(arm: str) -> Statistic:
            curve = [of_point(name)(arm) for _, name in points]

            def height(weights: NDArray[np.float64]) -> NDArray[np.float64]:
                heights = np.stack([statistic(weights) for statistic in curve], axis=-1)
                return np.trapezoid(heights, strengths, axis=-1) / strengths[-1]

            return height

        return of_arm

    def estimate(self, statistic: Statistic) -> Estimate:
        """A statistic with its interval."""
        return self._bootstrap.interval(statistic, seeds=self._n_seeds, sequences=self._sequences)

    def result(self, arm: str, perturbation: str) -> Result:
        """Figures of an arm under a perturbation."""
        bits, ratio = self.bits(perturbation)(arm), self.degradation(perturbation)(arm)
        error = self.calibration(perturbation)
        every = np.ones(self._sequences)
        return Result(
            arm,
            perturbation,
            self.estimate(bits),
            self.estimate(ratio),
            tuple(bits(every).tolist()),
            tuple(ratio(every).tolist()),
            self._sequences,
            int(self._tokens[perturbation].sum()),
            None if error is None else self.estimate(error(arm)),
            () if error is None else tuple(error(arm)(every).tolist()),
        )

    def area(self, arm: str, family: str) -> Area:
        """Mean heights of an arm's curves of a family."""
        bits, ratio = self.mean_height(family, "bits")(arm), self.mean_height(family, "ratio")(arm)
        return Area(arm, family, max(self._curves[family])[0], self.estimate(bits), self.estimate(ratio))

    @property
    def families(self) -> list[str]:
        """Families of the perturbations, in order, without the clean one."""
        return [family for family in self._curves if family != "clean"]

    def heights(self, arm: str) -> dict[str, float]:
        """Mean bits over seeds, clean and over the curve of each family."""
        curves = {family: self.mean_height(family, "bits") for family in self.families}
        every = np.ones(self._sequences)
        return {
            of: float(bits(arm)(every).mean()) for of, bits in {self._clean: self.bits(self._clean), **curves}.items()
        }

    def area_difference(self, arm: str, reference: str, family: str) -> Difference:
        """Paired differences of the mean heights of the curves of two arms."""
        return self.difference(
            arm, reference, family, self.mean_height(family, "bits"), self.mean_height(family, "ratio")
        )

    def difference(
        self, arm: str, reference: str, condition: str, bits: OfArm, ratio: OfArm, error: OfArm | None = None
    ) -> Difference:
        """Paired differences of the figures of two arms."""
        paired = [None if figure is None else self._paired(figure, arm, reference) for figure in (bits, ratio, error)]
        return Difference(arm, reference, condition, *paired)  # type: ignore[arg-type]

    def _paired(self, figure: OfArm, arm: str, reference: str) -> Estimate:
        one, other = figure(arm), figure(reference)
        return self.estimate(lambda weights: one(weights) - other(weights))


def _shared(measured: Sequence[Measurement], what: str, perturbation: str, clean: Tensor) -> NDArray[np.float64]:
    """Counts `(N,)` that all models were scored on under a perturbation; those of the clean data if none has them."""
    counts = [table[perturbation] for m in measured if perturbation in (table := getattr(m, what))]
    if any(not np.array_equal(counts[0], other) for other in counts[1:]):
        raise ArgumentError(
            f"All models must be scored on the same {what} under '{perturbation}', received different ones; measure "
            "them on one data set with one set of perturbations."
        )
    return counts[0] if counts else clean.numpy().astype(np.float64)
