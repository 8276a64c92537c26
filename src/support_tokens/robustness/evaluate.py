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
from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.files import versions
from support_tokens.report.records import (
    ArmMargins,
    ArmRecord,
    BootstrapRecord,
    Choice,
    PerturbationRecord,
    RobustnessReport,
    Split,
    StructureFigures,
    histograms,
    sentence,
)
from support_tokens.robustness.bootstrap import Bootstrap
from support_tokens.robustness.measure import EvaluationData, Measurement, measure
from support_tokens.robustness.perturbations.base import Perturbation
from support_tokens.robustness.perturbations.set import PerturbationSet, standard_perturbations
from support_tokens.robustness.statistics import Comparison

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
    split: bool = False,
    config: Mapping[str, Any] | None = None,
) -> RobustnessReport:
    r"""The report of what `measure` gave for each arm and seed; arguments as in `evaluate_robustness`.

    `structure` is what is known of the structure of the arms. With `split`, and two sequences or more, the report also
    holds what choosing arms on one half of the sequences and judging them on the other needs.
    """
    first, n_seeds = _check_arms(measured, baseline, seeds, details)
    order = [first, *(name for name in measured if name != first)]
    chosen = bootstrap or Bootstrap()
    figures = Comparison(measured, data, perturbations, chosen, n_seeds)
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
        Comparison(
            {arm: [m.part(rows) for m in of_arm] for arm, of_arm in measured.items()},
            data.part(rows),
            perturbations,
            bootstrap,
            len(next(iter(measured.values()))),
        )
        for rows in (slice(0, None, 2), slice(1, None, 2))
    )
    return Split(
        tuple(Choice(arm, of, bits) for arm in measured for of, bits in chosen_on.heights(arm).items()),
        tuple(judged_on.area_difference(*pair, family) for pair in pairs for family in judged_on.families),
    )


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
