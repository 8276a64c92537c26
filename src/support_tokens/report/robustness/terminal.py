"""The report in a terminal: verdict and table."""

__all__ = ["print_report", "render_text"]

import io
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.table import Column, Table
from rich.text import Text

from support_tokens.report import format as fmt
from support_tokens.report.records.estimate import Estimate
from support_tokens.report.records.robustness import RobustnessReport
from support_tokens.report.robustness.verdict import RULES, direction, has_curve, verdict

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
    result = verdict(report)
    findings = Table.grid(Column(), Column(), padding=(0, 1))
    for finding in result.findings:
        if finding.tone != "open":
            findings.add_row(_TONES[finding.tone], Text.assemble(finding.text, " ", (finding.figures, "dim")))
    # What is open is named in one line, since nothing follows from it.
    unclear = ", ".join(
        topic.removeprefix("Under ").lower()
        for topic, of_topic in result.by_topic().items()
        if {finding.tone for finding in of_topic} == {"open"}
    )
    lines = [Text(f"? no clear difference: {unclear}", style="dim")] if unclear else []
    parts = [Text(result.headline, style="bold"), Text(result.caveat), findings, *lines]
    return Group(*parts, Text(RULES, style="dim"), Text(), _table(report))


def _table(report: RobustnessReport) -> Table:
    table = Table(caption=Text(_caption(report)), caption_justify="left")
    table.add_column("condition", no_wrap=True)
    for arm in report.arms:
        table.add_column(Text(fmt.label(report, arm.name)))
    rows: dict[str, list[tuple[str, list[Text]]]] = {}
    for perturbation in report.perturbations:
        cells = []
        for arm in report.arms:
            result, against = report.result(arm.name, perturbation.name), report.difference(arm.name, perturbation.name)
            lines = [_bits(report, result.bits, against and against.bits)]
            if perturbation.family != "clean":
                lines.append(_ratio(report, result.degradation, against and against.degradation))
            cells.append(Text("\n").join(lines))
        rows.setdefault(perturbation.family, []).append((fmt.setting(perturbation), cells))
    for family in filter(has_curve, report.families):
        means = []
        for arm in report.arms:
            mean = report.area(arm.name, family)
            other = None if arm.name == report.baseline else report.area_difference(arm.name, report.baseline, family)
            bits = _bits(report, mean.bits, other and other.bits)
            lines = [bits, _ratio(report, mean.degradation, other and other.degradation)]
            means.append(Text("\n").join(lines))
        rows[family].append(("mean of curve", means))
    for of_family in rows.values():
        for head, cells in of_family:
            table.add_row(Text(head), *cells)
        table.add_section()
    return table


def _bits(report: RobustnessReport, bits: Estimate, difference: Estimate | None) -> Text:
    return _figure(report, fmt.number(bits.value), bits, difference)


def _ratio(report: RobustnessReport, ratio: Estimate, difference: Estimate | None) -> Text:
    return _figure(report, fmt.ratio(ratio.value), ratio, difference)


def _figure(report: RobustnessReport, text: str, estimate: Estimate, difference: Estimate | None) -> Text:
    """Number, mark and interval, short enough for three arms on 80 columns."""
    where = direction(report, difference) if difference else "unclear"
    ends = "" if estimate.low is None or estimate.high is None else f" {estimate.low:.2f}–{estimate.high:.2f}"
    return Text.assemble((text, "bold"), (_MARKS[where], _STYLES[where]), (ends, "dim"))


def _caption(report: RobustnessReport) -> str:
    seeds = f", {len(report.seeds)} seeds" if len(report.seeds) > 1 else ", 1 seed" if report.trained else ""
    return (
        f"{report.measure} and ratio to clean with {100 * report.bootstrap.confidence:g}\u00a0% intervals, "
        f"n = {report.data.sequences} sequences{seeds}; ▼ lower, ▲ higher than the baseline: the interval of the "
        "paired difference excludes zero"
    )
