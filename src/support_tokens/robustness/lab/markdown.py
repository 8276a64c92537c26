"""The tables of an experiment as Markdown, made from its report."""

__all__ = ["render_markdown"]

from collections.abc import Iterator, Sequence

from support_tokens.report import family, interval, label, number, signed, visible
from support_tokens.report.records import Estimate, RobustnessReport
from support_tokens.report.robustness import STRUCTURE_HEADS, caveat, headline, structure_values
from support_tokens.robustness.lab.contest import LARGEST_COST, Contest
from support_tokens.robustness.lab.paper import PaperRow
from support_tokens.robustness.lab.preset import Preset


def render_markdown(
    preset: Preset, report: RobustnessReport, rows: Sequence[PaperRow], contests: Sequence[Contest]
) -> str:
    """Verdict, the paper's figures beside ours, contests, every arm under every family, and structure.

    Args:
        preset: What was asked for.
        report: What came out.
        rows: Made by `paper_rows`.
        contests: Made by `contests`.
    """
    parts = [f"# {_cell(visible(preset.title))}", headline(report), caveat(report), report.status]
    if rows:
        parts += [
            "## Beside the paper",
            "Size, schedule and grids of the paper are not public, so agreement is of the effect and not of the run.",
            _table(("figure", "unit", "paper", "here", "95 % interval", "status", "why"), map(_paper, rows)),
        ]
    if contests:
        said = (
            f"Arms within {100 * LARGEST_COST:.1f} % of the baseline's clean figure; mean bits over the curve. Each "
            "side's best arm is chosen on one half of the sequences and judged on the other; the trained models are "
            "the same in both, so a lead by lucky seeds needs other seeds to be found out."
        )
        parts += [
            "## The law against its rivals",
            said,
            _table(
                ("perturbation", "law", "best rival", "difference", "95 % interval", "ahead"), map(_contest, contests)
            ),
        ]
    parts += ["## All arms", _table(*_arms(report))]
    if report.structure:
        parts += ["## Structure", _table(*_structure(report))]
    return "\n\n".join(parts) + "\n"


def _paper(row: PaperRow) -> tuple[str, ...]:
    digits = 4 if row.unit.startswith("share") else 3
    here = row.ours and number(row.ours.value, digits)
    return (
        row.name,
        row.unit,
        "" if row.paper is None else number(row.paper, digits),
        here or "",
        _interval(row.ours, digits),
        row.status,
        row.why,
    )


def _contest(contest: Contest) -> tuple[str, ...]:
    return (
        family(contest.family),
        visible(contest.law),
        visible(contest.rival),
        signed(contest.difference.value, 4),
        _interval(contest.difference, 4),
        contest.outcome,
    )


def _arms(report: RobustnessReport) -> tuple[tuple[str, ...], Iterator[tuple[str, ...]]]:
    """Clean bits, calibration, RMS, and mean bits over each curve."""
    curves = report.families
    clean = report.perturbations[0].name
    heights = {(a.arm, a.family): a.bits for a in report.areas}

    def rows() -> Iterator[tuple[str, ...]]:
        for arm in report.arms:
            result = report.result(arm.name, clean)
            yield (
                label(report, arm.name),
                _figure(result.bits),
                "" if result.calibration is None else number(result.calibration.value, 4),
                number(arm.rms_ratio, 2),
                *(_figure(heights[arm.name, family]) for family in curves),
            )

    head = ("arm", f"clean {report.measure}", "ECE", "RMS / baseline's", *(family(f) for f in curves))
    return head, rows()


def _structure(report: RobustnessReport) -> tuple[tuple[str, ...], Iterator[tuple[str, ...]]]:
    rows = ((label(report, s.arm), visible(s.setting), *structure_values(s)) for s in report.structure)
    return ("arm", "embeddings", *STRUCTURE_HEADS), rows


def _figure(estimate: Estimate) -> str:
    return f"{number(estimate.value)} ({_interval(estimate, 3)})"


def _interval(estimate: Estimate | None, digits: int) -> str:
    return "" if estimate is None else interval(estimate, digits)


def _table(head: Sequence[str], rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    """Text that ends no cell and begins no markup of HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;")
