"""What a benchmark found, as a frozen value; its table and plot are made from the JSON alone."""

__all__ = ["BenchRecord", "BenchmarkArm", "Check", "Prediction", "record_table", "write_plot"]

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from support_tokens.report.records.base import Record
from support_tokens.report.schema import AT_LEAST_ONE, NON_NEGATIVE, POSITIVE

Positive = Annotated[float, POSITIVE]


@dataclass(frozen=True)
class BenchmarkArm:
    """One arm of a group that was timed in turn.

    Args:
        group: Arms of one group ran in turn on one task.
        name: The arm; `plain` is what the others are compared with.
        seconds: Of each round.
        ratio: Of medians to the first arm of the group.
        low: Lower end of its 95 % interval (bootstrap over rounds).
        high: Upper end.
        peak_bytes: Most bytes held during a step above those before it, or None.
        memory_ratio: To the first arm, or None.
    """

    group: str
    name: str
    seconds: Annotated[tuple[Positive, ...], AT_LEAST_ONE]
    ratio: Positive
    low: Positive
    high: Positive
    peak_bytes: Annotated[int, NON_NEGATIVE] | None = None
    memory_ratio: Annotated[float, NON_NEGATIVE] | None = None


@dataclass(frozen=True)
class Check:
    """A target and what was measured."""

    name: str
    measured: float
    required: str
    met: bool


@dataclass(frozen=True)
class Prediction:
    """A figure that `plan` predicted on this machine, and what was measured."""

    name: str
    predicted: float
    measured: Positive

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class BenchRecord(Record, kind="benchmark"):
    """All of one benchmark run.

    Args:
        suite: Its name.
        machine: Processor, threads, versions.
        arms: What was timed.
        checks: Targets of the suite.
        predictions: What the plan says of the same steps.
        notes: Sentences on what was left out, and why.
    """

    suite: str
    machine: Mapping[str, str | int]
    arms: Annotated[tuple[BenchmarkArm, ...], AT_LEAST_ONE]
    checks: tuple[Check, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    notes: tuple[str, ...] = field(default=())


def record_table(record: BenchRecord) -> str:
    """The record as Markdown tables.

    Example:
        >>> arm = BenchmarkArm("g", "plain", (1.0,), 1.0, 1.0, 1.0, 10_000_000, 1.0)
        >>> print(record_table(BenchRecord("s", {"torch": "2"}, (arm,))).splitlines()[4])
        | g | plain | 1.00 s | 1.000 [1.000, 1.000] | 10 MB | 1.000 |
    """
    lines = [
        "Measured on " + ", ".join(f"{key} {value}" for key, value in record.machine.items()) + ".",
        "",
        "| task | arm | step | time ratio [95 %] | peak | memory ratio |",
        "|---|---|---|---|---|---|",
    ]
    for arm in record.arms:
        middle = sorted(arm.seconds)[len(arm.seconds) // 2]
        peak = "" if arm.peak_bytes is None else f"{arm.peak_bytes / 1e6:.0f} MB"
        memory = "" if arm.memory_ratio is None else f"{arm.memory_ratio:.3f}"
        figures = f"{arm.ratio:.3f} [{arm.low:.3f}, {arm.high:.3f}]"
        lines.append(f"| {arm.group} | {arm.name} | {_seconds(middle)} | {figures} | {peak} | {memory} |")
    if record.checks:
        lines += ["", "| target | required | measured | |", "|---|---|---|---|"]
        verdict = {True: "met", False: "missed"}
        lines += [f"| {c.name} | {c.required} | {c.measured:.3f} | {verdict[c.met]} |" for c in record.checks]
    if record.predictions:
        lines += ["", "| prediction | predicted | measured | error |", "|---|---|---|---|"]
        lines += [
            f"| {p.name} | {p.predicted:.4g} | {p.measured:.4g} | {100 * p.error:+.0f} % |" for p in record.predictions
        ]
    return "\n".join([*lines, *(f"\n{note}" for note in record.notes)]) + "\n"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def write_plot(record: BenchRecord, path: str | Path) -> None:
    """Time ratios of all groups with their intervals, as SVG or PNG by the suffix of `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms = [arm for arm in record.arms if arm.ratio != 1.0 and "growth" not in arm.group][::-1]
    figure, axes = pyplot.subplots(figsize=(10, 1 + 0.3 * len(arms)), layout="constrained")
    left = [arm.ratio - arm.low for arm in arms]
    right = [arm.high - arm.ratio for arm in arms]
    errors = [[max(0.0, e) for e in left], [max(0.0, e) for e in right]]
    axes.errorbar([arm.ratio for arm in arms], range(len(arms)), xerr=errors, fmt="o", capsize=3)
    axes.set_yticks(range(len(arms)), [f"{arm.group}: {arm.name}" for arm in arms])
    axes.axvline(1.0, linewidth=1, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlabel("time over that of the first arm of the group, 95 % interval")
    figure.savefig(path)
    pyplot.close(figure)
