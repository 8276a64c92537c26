"""The report of an evaluation: verdict, page, plots, terminal."""

__all__ = [
    "ARM_COLOURS",
    "STRUCTURE_HEADS",
    "caveat",
    "conditions",
    "degradation_png",
    "headline",
    "leaders",
    "print_report",
    "render_html",
    "render_text",
    "sentence_texts",
    "structure_values",
    "under",
    "verdict",
]

from support_tokens.report.robustness.page import STRUCTURE_HEADS, render_html, structure_values
from support_tokens.report.robustness.plots import ARM_COLOURS, degradation_png
from support_tokens.report.robustness.sentence import sentence_texts
from support_tokens.report.robustness.terminal import print_report, render_text
from support_tokens.report.robustness.verdict import caveat, conditions, headline, leaders, under, verdict
