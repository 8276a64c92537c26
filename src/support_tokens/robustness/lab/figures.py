"""Figures of an experiment as PNG: degradation under noise, and the path over the weight of the barrier."""

__all__ = ["noise_png", "path_png"]

import dataclasses
import io

from matplotlib.figure import Figure

from support_tokens.regularizers import parse_regularizer, regularizer_label
from support_tokens.report import family
from support_tokens.report.records import RobustnessReport
from support_tokens.report.robustness import ARM_COLOURS, degradation_png
from support_tokens.robustness.lab.preset import Preset


def noise_png(report: RobustnessReport) -> bytes:
    """Degradation curves under absolute and scale-matched noise; other families have too few points for a curve."""
    families = {p.family for p in report.perturbations if p.family.startswith("embedding_noise/")}
    kept = tuple(p for p in report.perturbations if p.family in families | {"clean"})
    names = {p.name for p in kept}
    return degradation_png(
        dataclasses.replace(
            report,
            perturbations=kept,
            results=tuple(r for r in report.results if r.perturbation in names),
            differences=tuple(d for d in report.differences if d.condition in names),
            areas=tuple(a for a in report.areas if a.family in families),
            area_differences=tuple(d for d in report.area_differences if d.condition in families),
            split=None,
        )
    )


def path_png(report: RobustnessReport, preset: Preset, *, dots_per_inch: int = 160) -> bytes:
    """Mean bits under each kind of noise over the weight of the barrier, with intervals; weight 0 stands at the left.

    Args:
        report: Evaluated arms of the preset.
        preset: With a path.
        dots_per_inch: Resolution.
    """
    arms = [
        (float(getattr(parse_regularizer(arm), "weight", 0.0)), regularizer_label(parse_regularizer(arm)))
        for arm in preset.path
    ]
    arms.sort()
    families = [f for f in dict.fromkeys(a.family for a in report.areas) if f.startswith("embedding_noise/")]
    figure = Figure(figsize=(5.2, 3.4), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    clean = report.perturbations[0].name
    curves = [("clean", {a.name: report.result(a.name, clean).bits for a in report.arms})]
    curves += [(family(f), {a.arm: a.bits for a in report.areas if a.family == f}) for f in families]
    places = range(len(arms))
    for colour, (name, heights) in zip(ARM_COLOURS, curves, strict=False):
        found = [heights[label] for _, label in arms]
        axes.plot(places, [e.value for e in found], color=colour, marker="o", ms=4, lw=1.6, label=name)
        low = [e.value if e.low is None else e.low for e in found]
        high = [e.value if e.high is None else e.high for e in found]
        axes.fill_between(places, low, high, color=colour, alpha=0.18, lw=0)
    axes.set_xticks(list(places), [f"{weight:g}" for weight, _ in arms])
    axes.set_xlabel("weight of the barrier")
    axes.set_ylabel(f"{report.measure}, mean over the curve")
    axes.legend(frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dots_per_inch, metadata={"Software": None})
    return file.getvalue()
