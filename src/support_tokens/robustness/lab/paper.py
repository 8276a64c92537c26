r"""The paper's figures, and ours beside them: each row agrees, differs or cannot be compared.

Size, schedule and grids of the paper's SmallGPT are not public, so agreement is of the effect and not of the run.
"""

__all__ = ["PAPER", "PaperRow", "paper_rows"]

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from support_tokens.regularizers import parse_regularizer, regularizer_label
from support_tokens.report.records import Estimate, RobustnessReport
from support_tokens.robustness.lab.preset import Preset

PAPER = {
    "clean cost": (0.014, 0.0005, "share of the baseline's BPC"),
    "baseline's degradation at sigma 0.5": (2.68, 0.005, "ratio to clean"),
    "barrier's degradation at sigma 0.5": (2.56, 0.005, "ratio to clean"),
    "difference of degradation at sigma 0.5": (-0.12, 0.01, "ratio to clean"),
    "largest gain under noise": (-0.057, 0.0005, "share of the baseline's BPC"),
    "best weight of the barrier": (0.05, 0.0, "lambda"),
}
"""Figures of arXiv:2602.22271: value, half of what its rounding leaves open, unit."""

ABSOLUTE = "embedding_noise/absolute"

Status = Literal["agrees", "differs", "not comparable"]


@dataclass(frozen=True)
class PaperRow:
    """One figure of the paper beside ours; `ours` has the interval that the status follows from, and `why` says how."""

    name: str
    unit: str
    paper: float | None
    ours: Estimate | None
    status: Status
    why: str


def paper_rows(report: RobustnessReport, preset: Preset) -> tuple[PaperRow, ...]:
    """The paper's figures beside those of a report.

    A figure *agrees* where the paper's lies in our interval, widened by the paper's rounding, and *differs* where it
    lies outside. It is *not comparable* without an interval over seeds, or where the report lacks what it needs.

    Args:
        report: Evaluated arms of the preset.
        preset: Says which arm is the paper's barrier and which make the path over its weight.
    """
    if not preset.barrier:
        return ()
    barrier = regularizer_label(parse_regularizer(preset.barrier))
    at_half = next((p.name for p in report.perturbations if (p.family, p.strength) == (ABSOLUTE, 0.5)), None)
    clean = report.perturbations[0].name
    base = report.result(report.baseline, clean).bits.value
    cost, noisy = report.difference(barrier, clean), None if at_half is None else report.difference(barrier, at_half)
    ours = {
        "clean cost": cost and _share(cost.bits, base),
        "baseline's degradation at sigma 0.5": at_half and report.result(report.baseline, at_half).degradation,
        "barrier's degradation at sigma 0.5": at_half and report.result(barrier, at_half).degradation,
        "difference of degradation at sigma 0.5": noisy and noisy.degradation,
        "largest gain under noise": _largest_gain(report, preset),
    }
    rows = [_row(report, name, found or None) for name, found in ours.items()]
    return (*rows, *_path_rows(report, preset))


def _row(report: RobustnessReport, name: str, ours: Estimate | None) -> PaperRow:
    value, rounding, unit = PAPER[name]
    if ours is None:
        return PaperRow(name, unit, value, None, "not comparable", "the report has no such noise or arm")
    if len(report.seeds) < 2 or ours.low is None or ours.high is None:
        return PaperRow(name, unit, value, ours, "not comparable", "no interval over seeds")
    inside = ours.low - rounding <= value <= ours.high + rounding
    why = "the paper's figure lies " + ("in" if inside else "outside of") + " the interval"
    if name == "largest gain under noise":
        why += "; the largest of many, which its interval does not know"
    return PaperRow(name, unit, value, ours, "agrees" if inside else "differs", why)


def _largest_gain(report: RobustnessReport, preset: Preset) -> Estimate | None:
    """The most negative relative difference of bits over the path and all sigmas of absolute noise."""
    found = []
    for arm in _labels(preset.path):
        for p in report.perturbations:
            difference = report.difference(arm, p.name) if p.family == ABSOLUTE else None
            if difference is not None:
                found.append(_share(difference.bits, report.result(report.baseline, p.name).bits.value))
    return min(found, key=lambda gain: gain.value, default=None)


def _path_rows(report: RobustnessReport, preset: Preset) -> list[PaperRow]:
    """Whether bits under noise have their minimum inside of the path, and where."""
    labels = _labels(preset.path)
    weights = {
        label: float(getattr(parse_regularizer(arm), "weight", 0.0))
        for label, arm in zip(labels, preset.path, strict=True)
    }
    heights = {a.arm: a.bits.value for a in report.areas if a.family == ABSOLUTE and a.arm in weights}
    shape, unit = "U-shaped path", "mean BPC over absolute noise"
    best_name = "best weight of the barrier"
    value, _, lambda_unit = PAPER[best_name]
    if len(heights) < 3 or len(report.seeds) < 2:
        why = "fewer than three weights, or one seed"
        return [
            PaperRow(shape, unit, None, None, "not comparable", why),
            PaperRow(best_name, lambda_unit, value, None, "not comparable", why),
        ]
    order = sorted(heights, key=lambda arm: weights[arm])
    best = min(order, key=lambda arm: heights[arm])
    level = [arm for arm in order if arm == best or not _between(report, best, arm).excludes(0.0)]
    ends = [_between(report, best, end) for end in (order[0], order[-1]) if end != best]
    where = Estimate(weights[best], min(weights[a] for a in level), max(weights[a] for a in level))
    if len(ends) == 2 and all(end.excludes(0.0) for end in ends):
        shaped: tuple[Status, str] = "agrees", "the best weight is clearly ahead of both ends of the path"
    elif len(ends) == 1 and not set(order[1:-1]) & set(level):
        shaped = "differs", "an end of the path is clearly ahead of all weights inside of it"
    else:
        shaped = "not comparable", "the intervals do not tell the best weight from an end of the path"
    covered = where.low is not None and where.high is not None and where.low <= value <= where.high
    placed: tuple[Status, str] = "not comparable", "without a clear minimum there is no best weight"
    if shaped[0] == "agrees":
        placed = "agrees" if covered else "differs", "the interval is that of the weights level with the best"
    elif shaped[0] == "differs":
        placed = "differs", "the best weight is an end of the path"
    return [
        PaperRow(shape, unit, None, ends[0] if ends else None, *shaped),
        PaperRow(best_name, lambda_unit, value, where, *placed),
    ]


def _between(report: RobustnessReport, arm: str, other: str) -> Estimate:
    """Mean bits of `arm` minus those of `other` over absolute noise."""
    return report.area_difference(arm, other, ABSOLUTE).bits


def _labels(arms: Sequence[str]) -> list[str]:
    return [regularizer_label(parse_regularizer(arm)) for arm in arms]


def _share(difference: Estimate, base: float) -> Estimate:
    """A difference as a share of the baseline's figure, which is taken as it is."""
    if difference.low is None or difference.high is None:
        return Estimate(difference.value / base)
    return Estimate(difference.value / base, difference.low / base, difference.high / base)
