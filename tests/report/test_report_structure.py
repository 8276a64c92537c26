"""Calibration and structure in the page: they stand there if a report has them, whole whatever their names."""

import dataclasses

import pytest

from support_tokens.report.records import Estimate, RobustnessReport, StructureFigures
from support_tokens.report.robustness import STRUCTURE_HEADS, render_html, structure_values
from synthetic_reports import CE, HOSTILE, synthetic


def figures(arm: str, setting: str) -> StructureFigures:
    return StructureFigures(
        arm, setting, 0, "noise", 8, (1.0, 2.0), (3.0, 4.0), (0.5, 0.5), (), (-1.0, -3.0), (-2.0, -2.0), (0.1, 0.1),
        (0.0, 0.5), (0.25, 0.75), (0.5,), ((0.0,), (0.0,)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def report() -> RobustnessReport:
    made = synthetic(seeds=2, labels={"other": HOSTILE}, ce=CE, other=(2.0, 1.0, 1.0, 1.0))
    return dataclasses.replace(
        made,
        results=tuple(dataclasses.replace(r, calibration=Estimate(0.25, 0.2, 0.3)) for r in made.results),
        differences=tuple(dataclasses.replace(d, calibration=Estimate(0.1, 0.05, 0.2)) for d in made.differences),
        structure=tuple(figures(arm, setting) for setting in ("own", HOSTILE) for arm in ("ce", "other")),
    )


def test_structure_and_calibration_stand_in_the_page(report):
    page = render_html(RobustnessReport.from_record(report.record()))
    assert '<h2 id="calibration">' in page and '<h2 id="structure">' in page
    assert page.count("<b>0.250</b>") == 2 * len(report.perturbations)
    assert page.count("Calibration error higher than the baseline's") == len(report.perturbations)
    assert "<script>alert" not in page and "\x1b" not in page and "\u202e" not in page
    for head in STRUCTURE_HEADS:
        assert f'<th scope="col">{head}</th>' in page


def test_a_report_without_them_has_no_empty_sections():
    page = render_html(synthetic(ce=CE, other=(2.0, 1.0, 1.0, 1.0)))
    assert 'id="calibration"' not in page and 'id="structure"' not in page


def test_values_are_means_over_seeds_and_empty_where_unknown():
    values = structure_values(figures("ce", "own"))
    assert values == ["1.500", "3.500", "0.500", "", "−2.000", "−2.000", "0.250", "0.500"]
