r"""Arms x perturbations x seeds: what a model loses under perturbation, with paired intervals.

`measure` reads one model, and is all that needs one; `compare` makes the report of what was measured, so arms may be
measured one after another, on other days or machines. `evaluate_robustness` does both.
"""

__all__ = ["ArmDetails", "compare", "evaluate_robustness"]

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.intervals import Bootstrap, Estimate, Statistic
from support_tokens.margin_records import ArmMargins, histograms, sentence
from support_tokens.measurement import EvaluationData, Measurement, measure
from support_tokens.perturb import Perturbation
from support_tokens.perturbation_set import PerturbationSet, standard_perturbations
from support_tokens.records import (
    Area,
    ArmRecord,
    BootstrapRecord,
    Difference,
    PerturbationRecord,
    Result,
    StructureFigures,
)
from support_tokens.results import RobustnessReport
from support_tokens.run_folder import versions

Progress = Callable[[int, int, str], None]
"""Called with batches done, batches in all, and what is being read."""


@dataclass(frozen=True)
class ArmDetails:
    r"""What a caller knows of an arm beyond its model; the report shows it.

    Args:
        label: Name for display; the arm's key where empty.
        description: One sentence: how the arm was trained.
        seconds: Wall time of training.
        margins: Log margins on held-out text and along one sentence.
    """

    label: str = ""
    description: str = ""
    seconds: float | None = None
    margins: ArmMargins | None = None


def evaluate_robustness(
    arms: Mapping[str, nn.Module | Sequence[nn.Module]],
    data: EvaluationData | Tensor,
    perturbations: PerturbationSet | Sequence[Perturbation] | None = None,
    *,
    baseline: str | None = None,
    seeds: Sequence[int] | None = None,
    details: Mapping[str, ArmDetails] | None = None,
    bootstrap: Bootstrap | None = None,
    batch_size: int = 16,
    config: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> RobustnessReport:
    r"""Compares arms under the same perturbations on the same sequences.

    With $\ell_n$ the nats of sequence $n$ and $c_n$ its predicted characters (or tokens),

    $$ \mathrm{bits} = \frac{\sum_n \ell_n}{\ln 2\, \sum_n c_n}, \qquad
       \mathrm{degradation} = \frac{\mathrm{bits(perturbed)}}{\mathrm{bits(clean)}}, $$

    averaged over seeds. Only valid tokens count, padding never does. Differences are paired over sequences and seeds.

    Args:
        arms: Causal language models by name; several seeds of an arm as a sequence, which may load them lazily.
        data: Held-out sequences, or `(N, T)` token ids without padding (bits per token then).
        perturbations: `standard_perturbations()` where None.
        baseline: The arm that others are compared with; the first where None.
        seeds: Training seed of each model of an arm, the same for all arms; 0, 1, ... where None.
        details: What else is known of the arms, margins included.
        bootstrap: How intervals are made; BCa, 95 %, 5000 resamples where None.
        batch_size: Sequences at a time; changes nothing but speed and memory.
        config: The plan of the experiment, kept in the report as it is.
        progress: Called with batches done, batches in all and what is being read.

    Returns:
        The report; with one seed its intervals cover the choice of sequences only, and it says so.

    Raises:
        ArgumentError: No arms, arms with different numbers of seeds, an unknown baseline, a loss that is not finite.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8))
        >>> ids = torch.arange(48).reshape(6, 8) % 11
        >>> report = evaluate_robustness({"a": model}, EvaluationData(ids, characters=1))
        >>> report.status.split(", ")[0]
        '1 arm under 9 perturbations on 6 sequences (42 predicted tokens)'
    """
    held_out = data if isinstance(data, EvaluationData) else EvaluationData(data)
    chosen = _perturbation_set(perturbations)
    models = {name: (arm,) if isinstance(arm, nn.Module) else arm for name, arm in arms.items()}
    per_model = len(chosen.items) * math.ceil(held_out.sequences / max(batch_size, 1))
    total = per_model * sum(len(arm) for arm in models.values())
    done = itertools.count(1)
    measured: dict[str, list[Measurement]] = {}
    for name, arm in models.items():
        measured[name] = []
        for number in range(len(arm)):

            def report_batch(what: str, name: str = name) -> None:
                if progress is not None:
                    progress(next(done), total, f"{name}: {what}")

            whose = f"arm '{name}'" + (f", seed {number}" if len(arm) > 1 else "")
            measured[name].append(
                measure(arm[number], held_out, chosen, batch_size=batch_size, progress=report_batch, whose=whose)
            )
    return compare(
        measured,
        held_out,
        chosen,
        baseline=baseline,
        seeds=seeds,
        details=details,
        bootstrap=bootstrap,
        config=config,
    )


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
    config: Mapping[str, Any] | None = None,
) -> RobustnessReport:
    r"""The report of what `measure` gave for each arm and seed; arguments as in `evaluate_robustness`.

    `structure` is what is known of the structure of the arms.
    """
    first, n_seeds = _check_arms(measured, baseline, seeds, details)
    order = [first, *(name for name in measured if name != first)]
    chosen = bootstrap or Bootstrap()
    figures = _Figures(measured, data, perturbations, chosen, n_seeds)
    known = {name: (details or {}).get(name, ArmDetails()) for name in order}
    labels = tuple(seeds) if seeds is not None else tuple(range(n_seeds))
    rms = {name: float(np.mean([m.embedding_rms for m in measured[name]])) for name in order}
    families = list(dict.fromkeys(p.family for p in perturbations.items if p.family != "clean"))
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
        areas=tuple(figures.area(name, family) for name in order for family in families),
        differences=tuple(
            figures.difference(
                name, first, p.name, figures.bits(p.name), figures.degradation(p.name), figures.calibration(p.name)
            )
            for name in order[1:]
            for p in perturbations.items
        ),
        area_differences=tuple(
            figures.difference(*pair, family, figures.mean_height(family, "bits"), figures.mean_height(family, "ratio"))
            for pair in pairs
            for family in families
        ),
        margins=histograms({name: known[name].margins for name in order}),
        sentence=sentence({name: known[name].margins for name in order}),
        structure=tuple(structure),
        config=dict(config or {}),
        versions=versions(),
    )


class _Figures:
    """Statistics of what was measured, each a function of the weights of the sequences, so that all are paired."""

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
            # What is scored follows from data and perturbation, never from the arm, so that it is one for all.
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

    def bits(self, perturbation: str) -> "_OfArm":
        """Nats / ln 2 / scored units, `(..., N)` weights to `(..., S)`."""
        units = self._units[perturbation]

        def of_arm(arm: str) -> Statistic:
            nats = self._nats[arm, perturbation]
            return lambda weights: weights @ nats.T / (math.log(2) * weights @ units)[..., None]

        return of_arm

    def calibration(self, perturbation: str) -> "_OfArm | None":
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

    def degradation(self, perturbation: str) -> "_OfArm":
        """Bits under the perturbation over clean bits."""

        def of_arm(arm: str) -> Statistic:
            perturbed, clean = self.bits(perturbation)(arm), self.bits(self._clean)(arm)
            return lambda weights: perturbed(weights) / clean(weights)

        return of_arm

    def mean_height(self, family: str, what: str) -> "_OfArm":
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
        return self._bootstrap.interval(statistic, seeds=self._n_seeds, sequences=self._sequences)

    def result(self, arm: str, perturbation: str) -> Result:
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
        bits, ratio = self.mean_height(family, "bits")(arm), self.mean_height(family, "ratio")(arm)
        return Area(arm, family, max(self._curves[family])[0], self.estimate(bits), self.estimate(ratio))

    def difference(
        self, arm: str, against: str, of: str, bits: "_OfArm", ratio: "_OfArm", error: "_OfArm | None" = None
    ) -> Difference:
        paired = [None if figure is None else self._paired(figure, arm, against) for figure in (bits, ratio, error)]
        return Difference(arm, against, of, *paired)  # type: ignore[arg-type]

    def _paired(self, figure: "_OfArm", arm: str, against: str) -> Estimate:
        one, other = figure(arm), figure(against)
        return self.estimate(lambda weights: one(weights) - other(weights))


_OfArm = Callable[[str], Statistic]


def _shared(measured: Sequence[Measurement], what: str, perturbation: str, clean: Tensor) -> NDArray[np.float64]:
    """What all models were scored on under a perturbation, `(N,)`; that of the clean data where none says."""
    found = [held[perturbation] for m in measured if perturbation in (held := getattr(m, what))]
    if any(not np.array_equal(found[0], other) for other in found[1:]):
        raise ArgumentError(
            f"All models must be scored on the same {what} under '{perturbation}', but are not; measure them on one "
            "data set with one set of perturbations."
        )
    return found[0] if found else clean.numpy().astype(np.float64)


def _perturbation_set(chosen: PerturbationSet | Sequence[Perturbation] | None) -> PerturbationSet:
    if chosen is None:
        return standard_perturbations()
    return chosen if isinstance(chosen, PerturbationSet) else PerturbationSet(tuple(chosen))


def _check_arms(
    measured: Mapping[str, Sequence[object]],
    baseline: str | None,
    seeds: Sequence[int] | None,
    details: Mapping[str, ArmDetails] | None,
) -> tuple[str, int]:
    """The baseline and the number of seeds."""
    if not measured:
        raise ArgumentError("At least one arm is required for an evaluation, but there is none; pass {'name': model}.")
    counts = {name: len(of_arm) for name, of_arm in measured.items()}
    n_seeds = next(iter(counts.values()))
    if n_seeds < 1 or set(counts.values()) != {n_seeds}:
        raise ArgumentError(
            f"Arms that are compared need the same seeds, at least one, but have {counts}; pass one model a seed."
        )
    if seeds is not None and (len(seeds) != n_seeds or len(set(seeds)) != n_seeds):
        raise ArgumentError(f"The seeds must be {n_seeds} different ones, one a model of each arm, not {list(seeds)}.")
    first = next(iter(measured)) if baseline is None else baseline
    for name in (first, *(details or {})):
        if name not in measured:
            raise ArgumentError(f"The arms are {', '.join(map(repr, measured))}; {name!r} is none of them.")
    return first, n_seeds
