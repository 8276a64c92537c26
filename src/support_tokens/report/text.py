"""The report in a terminal: verdict and table."""

__all__ = ["print_report", "render_text"]

import io
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from support_tokens.intervals import Estimate
from support_tokens.report import words
from support_tokens.report.verdict import direction, families, verdict
from support_tokens.results import RobustnessReport

_TONES = {"better": "✓", "worse": "✗", "open": "?", "note": "•"}
_MARKS = {"lower": " ▼", "higher": " ▲", "unclear": ""}
_STYLES = {"lower": "green", "higher": "yellow", "unclear": ""}


def print_report(report_json: RobustnessReport | Mapping[str, Any], console: Console | None = None) -> None:
    """Prints verdict and table with rich; names from the report are shown as they are, never as markup.

    Args:
        report_json: A report, or the JSON object that one was written as.
        console: Where to; standard output where None.

    Raises:
        RunFolderError: The object is no robustness report of this schema version.
    """
    report = report_json if isinstance(report_json, RobustnessReport) else RobustnessReport.from_record(report_json)
    (console or Console()).print(_page(report), highlight=False)


def render_text(report_json: RobustnessReport | Mapping[str, Any], *, width: int = 120) -> str:
    """What `print_report` prints, as plain text of the given width."""
    file = io.StringIO()
    print_report(report_json, Console(file=file, width=width, color_system=None, legacy_windows=False))
    return file.getvalue()


def _page(report: RobustnessReport) -> Group:
    said = verdict(report)
    table = Table(caption=Text(_caption(report)), caption_justify="left")
    for head in ("noise", *(words.label(report, arm.name) for arm in report.arms)):
        table.add_column(Text(head))
    for perturbation in report.perturbations:
        clean = perturbation.family == "clean"
        cells = []
        for arm in report.arms:
            result, difference = (
                report.result(arm.name, perturbation.name),
                report.difference(arm.name, perturbation.name),
            )
            lines = [_figure(words.number(result.bits.value), result.bits, 3, difference and difference.bits)]
            if not clean:
                degradation = result.degradation
                shown = words.ratio(degradation.value)
                lines.append(_figure(shown, degradation, 2, difference and difference.degradation))
            cells.append(Text("\n").join(lines))
        table.add_row(
            Text(words.setting(perturbation)), *cells, end_section=clean or _last_of_family(report, perturbation)
        )
    for family in families(report):
        areas = {area.arm: area.degradation for area in report.areas if area.family == family}
        cells = [_figure(words.ratio(areas[arm.name].value), areas[arm.name], 2, None) for arm in report.arms]
        table.add_row(Text(f"mean, {words.family(family)}"), *cells)
    findings = [Text(f"  {_TONES[f.tone]} {f.text} [{f.figures}]") for f in said.findings]
    return Group(Text(said.headline, style="bold"), Text(said.caveat), *findings, Text(), table)


def _last_of_family(report: RobustnessReport, perturbation: object) -> bool:
    place = next(i for i, p in enumerate(report.perturbations) if p is perturbation)
    rest = report.perturbations[place + 1 :]
    return not rest or rest[0].family != report.perturbations[place].family


def _figure(shown: str, estimate: Estimate, digits: int, difference: Estimate | None) -> Text:
    where = direction(difference) if difference else "unclear"
    return Text.assemble(
        (shown, "bold"), (_MARKS[where], _STYLES[where]), " ", (words.interval(estimate, digits), "dim")
    )


def _caption(report: RobustnessReport) -> str:
    seeds = "1 seed" if len(report.seeds) == 1 else f"{len(report.seeds)} seeds"
    return (
        f"{report.measure} and ratio to clean, {100 * report.bootstrap.confidence:g} % intervals, "
        f"n = {report.data.sequences} sequences, {seeds}; ▼ lower, ▲ higher than the baseline: the interval of the "
        "paired difference excludes zero"
    )
