"""The report of an evaluation: verdict, page, plots, terminal."""

__all__ = [
    "ARM_COLOURS",
    "STRUCTURE_HEADS",
    "degradation_png",
    "headline",
    "leaders",
    "print_report",
    "render_html",
    "render_text",
    "seed_caveat",
    "sentence_texts",
    "structure_values",
    "under_noise",
    "verdict",
]

from support_tokens.report.robustness.page import STRUCTURE_HEADS, render_html, structure_values
from support_tokens.report.robustness.plots import ARM_COLOURS, degradation_png
from support_tokens.report.robustness.sentence import sentence_texts
from support_tokens.report.robustness.terminal import print_report, render_text
from support_tokens.report.robustness.verdict import headline, leaders, seed_caveat, under_noise, verdict
