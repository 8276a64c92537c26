"""Records to terminal, HTML and PNG; never a model."""

__all__ = [
    "Finding",
    "Verdict",
    "band",
    "band_css",
    "decode",
    "degradation_png",
    "encode",
    "family",
    "generation_html",
    "generation_table",
    "interval",
    "label",
    "limits_of",
    "number",
    "print_report",
    "render_html",
    "render_text",
    "signal_limits",
    "signal_value",
    "signed",
    "verdict",
    "visible",
]

from typing import TYPE_CHECKING

from support_tokens._lazy import lazy_exports

if TYPE_CHECKING:
    from support_tokens.report.format import family, interval, label, number, signed, visible
    from support_tokens.report.generation import generation_html, generation_table, signal_limits, signal_value
    from support_tokens.report.robustness.page import render_html
    from support_tokens.report.robustness.plots import degradation_png
    from support_tokens.report.robustness.terminal import print_report, render_text
    from support_tokens.report.robustness.verdict import Finding, Verdict, verdict
    from support_tokens.report.scale import band, band_css, limits_of
    from support_tokens.report.schema import decode, encode

__getattr__ = lazy_exports(
    __name__,
    {
        "family": "format",
        "interval": "format",
        "label": "format",
        "number": "format",
        "signed": "format",
        "visible": "format",
        "generation_html": "generation",
        "generation_table": "generation",
        "signal_limits": "generation",
        "signal_value": "generation",
        "render_html": "robustness.page",
        "degradation_png": "robustness.plots",
        "print_report": "robustness.terminal",
        "render_text": "robustness.terminal",
        "Finding": "robustness.verdict",
        "Verdict": "robustness.verdict",
        "verdict": "robustness.verdict",
        "band": "scale",
        "band_css": "scale",
        "limits_of": "scale",
        "decode": "schema",
        "encode": "schema",
    },
)
