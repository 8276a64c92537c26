"""Reports: the JSON of an evaluation to the terminal, to one HTML file and to PNG. Reads JSON only, never a model."""

__all__ = ["Finding", "Verdict", "degradation_png", "print_report", "render_html", "render_text", "verdict"]

from support_tokens.report.page import render_html
from support_tokens.report.plots import degradation_png
from support_tokens.report.text import print_report, render_text
from support_tokens.report.verdict import Finding, Verdict, verdict
