r"""The report as one HTML file: no network, no script, readable on a phone, in the dark and in print."""

__all__ = ["STRUCTURE_HEADS", "render_html", "structure_values"]

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from support_tokens.report import format as fmt
from support_tokens.report.records.estimate import Estimate
from support_tokens.report.records.histograms import MarginCounts, MarginHistogram
from support_tokens.report.records.robustness import PerturbationRecord, RobustnessReport
from support_tokens.report.records.structure import StructureFigures
from support_tokens.report.robustness import plots
from support_tokens.report.robustness.sentence import SUPPORT, ArmText, sentence_texts
from support_tokens.report.robustness.verdict import RULES, Finding, Verdict, direction, has_curve, verdict
from support_tokens.report.scale import BANDS, band_css


@dataclass(frozen=True)
class _Cell:
    bits: Estimate
    degradation: Estimate | None
    bits_direction: str
    degradation_direction: str


@dataclass(frozen=True)
class _TableRow:
    head: str
    cells: list[_Cell]
    summary: bool = False


@dataclass(frozen=True)
class _Group:
    title: str
    rows: list[_TableRow]


def render_html(report_json: RobustnessReport | Mapping[str, Any]) -> str:
    r"""The whole report as one self-contained HTML document.

    Args:
        report_json: A report, or the JSON object that one was written as; nothing else is read, least of all a model.

    Returns:
        HTML with inline style and SVG; the same report gives the same text.

    Raises:
        RunFolderError: The object is no robustness report of this schema version.
    """
    report = report_json if isinstance(report_json, RobustnessReport) else RobustnessReport.from_record(report_json)
    files = resources.files("support_tokens.report.robustness")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        visible=fmt.visible,
        number=fmt.number,
        signed=fmt.signed,
        percent=fmt.percent,
        ratio=fmt.ratio,
        interval=fmt.interval,
    )
    template = environment.from_string(files.joinpath("page.html").read_text(encoding="utf-8"))
    arms = [(place, arm, fmt.label(report, arm.name)) for place, arm in enumerate(report.arms)]
    return template.render(
        report=report,
        arms=arms,
        title=_title(report),
        style=Markup(files.joinpath("page.css").read_text(encoding="utf-8") + band_css()),
        bands=BANDS,
        colours=Markup(_colours()),
        swatches=[Markup(plots.swatch(place)) for place, _, _ in arms],
        verdict=(result := verdict(report)),
        outcomes=_outcomes(report, result),
        rules=RULES,
        groups=list(_groups(report)),
        curves=[(fmt.family(f), Markup(plots.curve_svg(report, f))) for f in report.families],
        noise_only=all(f.startswith("embedding_noise/") for f in report.families),
        calibration=_calibration(report),
        structure=_structure(report),
        structure_heads=STRUCTURE_HEADS,
        histograms=[_histogram(report, histogram) for histogram in report.margins],
        sentence=_sentence(report),
        config=list(_flat(report.config)),
        versions=sorted(report.versions.items()),
        confidence=f"{100 * report.bootstrap.confidence:g}\u00a0%",
        direction_words={"lower": "▼", "higher": "▲", "unclear": ""},
    )


def _title(report: RobustnessReport) -> str:
    title = report.config.get("title")
    return fmt.visible(title) if isinstance(title, str) and title else "Robustness under noise"


def _colours() -> str:
    def block(colours: tuple[str, ...]) -> str:
        return "".join(f"--arm-{place}:{colour};" for place, colour in enumerate(colours))

    return (
        f":root{{{block(plots.ARM_COLOURS)}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{block(plots.ARM_COLOURS_DARK)}}}}}"
    )


def _outcomes(report: RobustnessReport, result: Verdict) -> list[tuple[str, list[Finding]]]:
    """Wins, losses and open questions: one row a condition, one finding for each arm but the baseline."""
    topics = result.by_topic("better", "worse", "open")
    return [(topic.removeprefix("Under ").capitalize(), findings) for topic, findings in topics.items()]


def _groups(report: RobustnessReport) -> Iterator[_Group]:
    """Rows of the table: the clean one, then each family's strengths and the mean over its curve."""
    by_family: dict[str, list[_TableRow]] = {}
    for perturbation in report.perturbations:
        cells = []
        for arm in report.arms:
            result = report.result(arm.name, perturbation.name)
            difference = report.difference(arm.name, perturbation.name)
            clean = perturbation.family == "clean"
            cells.append(
                _Cell(
                    result.bits,
                    None if clean else result.degradation,
                    direction(report, difference.bits) if difference else "unclear",
                    direction(report, difference.degradation) if difference and not clean else "unclear",
                )
            )
        by_family.setdefault(perturbation.family, []).append(_TableRow(fmt.setting(perturbation), cells))
    for family in filter(has_curve, report.families):
        cells = []
        for arm in report.arms:
            area = report.area(arm.name, family)
            against = None if arm.name == report.baseline else report.area_difference(arm.name, report.baseline, family)
            cells.append(
                _Cell(
                    area.bits,
                    area.degradation,
                    direction(report, against.bits) if against else "unclear",
                    direction(report, against.degradation) if against else "unclear",
                )
            )
        by_family[family].append(_TableRow("mean of the curve", cells, summary=True))
    for family, rows in by_family.items():
        yield _Group("" if family == "clean" else fmt.family(family).capitalize(), rows)


@dataclass(frozen=True)
class _CalibrationRow:
    head: str
    cells: list[tuple[Estimate | None, str]]


def _calibration(report: RobustnessReport) -> list[_CalibrationRow]:
    """Calibration errors with the direction of their paired difference; none where no result has one."""
    rows = []
    for perturbation in report.perturbations:
        cells = []
        for arm in report.arms:
            difference = report.difference(arm.name, perturbation.name)
            against = difference and difference.calibration
            found = report.result(arm.name, perturbation.name).calibration
            cells.append((found, direction(report, against) if against else "unclear"))
        rows.append(_CalibrationRow(_head(perturbation), cells))
    return rows if any(estimate for row in rows for estimate, _ in row.cells) else []


def _head(perturbation: PerturbationRecord) -> str:
    """A row's head that needs no group above it."""
    set_to, whose = fmt.setting(perturbation), perturbation.family
    return f"{fmt.family(whose)}, {set_to}" if whose.startswith("embedding_noise/") else set_to


STRUCTURE_HEADS = (
    "RMS", "effective rank", "dispersion", "signal / noise", "mean log margin", "least log margin", "negative",
    "attractive",
)  # fmt: skip
"""Columns of the table of structure, in the order of `structure_values`."""


def structure_values(figures: StructureFigures) -> list[str]:
    """Means over seeds, as displayed; empty where a figure is not known."""
    columns = (
        figures.embedding_rms, figures.effective_rank, figures.dispersion, figures.signal_to_noise,
        figures.log_margin_mean, figures.log_margin_min, figures.negative_fraction, figures.attractive_fraction,
    )  # fmt: skip
    return [fmt.number(sum(column) / len(column)) if column else "" for column in columns]


def _structure(report: RobustnessReport) -> list[tuple[str, list[tuple[int, str, list[str]]]]]:
    """Rows under the setting of their embeddings."""
    places = {arm.name: place for place, arm in enumerate(report.arms)}
    groups: dict[str, list[tuple[int, str, list[str]]]] = {}
    for figures in report.structure:
        row = (places[figures.arm], fmt.label(report, figures.arm), structure_values(figures))
        groups.setdefault(figures.setting, []).append(row)
    return list(groups.items())


@dataclass(frozen=True)
class _HistogramView:
    whose: str
    panels: list[tuple[int, str, MarginCounts, Markup]]
    outside: int


def _histogram(report: RobustnessReport, histogram: MarginHistogram) -> _HistogramView:
    places = {arm.name: place for place, arm in enumerate(report.arms)}
    panels = []
    for counts in histogram.arms:
        name = fmt.label(report, counts.arm)
        mean = "none" if counts.mean is None else fmt.number(counts.mean)
        description = (
            f"Histogram of {counts.n} log margins of {name}: mean {mean}, {counts.negative_fraction:.1%} negative."
        )
        svg = Markup(plots.histogram_svg(histogram, counts, places[counts.arm], description))
        panels.append((places[counts.arm], name, counts, svg))
    outside = sum(counts.below + counts.above for counts in histogram.arms)
    return _HistogramView(_whose(histogram.source, histogram.layer, histogram.view), panels, outside)


@dataclass(frozen=True)
class _SentenceView:
    whose: str
    texts: list[ArmText]
    limits: tuple[float, float]
    svg: Markup


def _sentence(report: RobustnessReport) -> _SentenceView | None:
    if not report.sentence:
        return None
    texts, limits = sentence_texts(report)
    weakest = [f"{text.name} “{text.support[0].token}” at {text.support[0].position}" for text in texts if text.support]
    description = f"Log margin along the held-out text; smallest margins: {', '.join(weakest) or 'none'}."
    first = report.sentence[0].layers[0]
    lines = [(text.place, record.layers[0]) for text, record in zip(texts, report.sentence, strict=True)]
    svg = Markup(plots.trace_svg(lines, SUPPORT, description))
    return _SentenceView(_whose("model", first.layer, first.view), texts, limits, svg)


def _whose(source: str, layer: int, view: str) -> str:
    maps = {"noise": "noise map x − μ(x)", "block": "block map x + μ(x)"}
    sources = {"model": f"attention of block {layer}", "prior": "the embedding law learned beside the model"}
    return f"{sources.get(source, fmt.visible(source))}, {maps.get(view, fmt.visible(view))}"


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """A nested configuration as lines of dotted names and values."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and value and any(isinstance(item, Mapping) for item in value):
        for place, item in enumerate(value):
            yield from _flat(item, f"{name}[{place}]")
    elif name:
        shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        yield name, shown
