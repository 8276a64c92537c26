"""Records in a notebook: a sentence that needs no script, and the page itself in a frame of its own."""

__all__ = ["fragment"]

from functools import singledispatch
from typing import Any

from markupsafe import Markup

from support_tokens.report.format import number, visible
from support_tokens.report.generation import generation_html
from support_tokens.report.records.benchmark import BenchRecord, record_table
from support_tokens.report.records.changes import MarginChanges
from support_tokens.report.records.generation import Generation, GenerationRecord
from support_tokens.report.records.robustness import RobustnessReport
from support_tokens.report.records.tokens import MarginRecord
from support_tokens.report.robustness.page import render_html
from support_tokens.report.robustness.verdict import caveat, headline
from support_tokens.report.tokens.notebook import margins_fragment
from support_tokens.report.tokens.page import changes_html


@singledispatch
def fragment(value: Any) -> str:
    """HTML of a value for a notebook; text of the value is escaped, and the frame reaches nothing outside of it.

    Example:
        >>> fragment(Generation("a", 1, "<b>", (), "length", "Done.")).count("<iframe")
        1
    """
    return str(Markup("<p>{}</p>").format(repr(value)))


@fragment.register
def _(record: MarginRecord) -> str:
    return margins_fragment(record)


@fragment.register
def _(changes: MarginChanges) -> str:
    compared = [change for layer in changes.layers for change in layer.tokens if change.difference is not None]
    moved = sum(not changes.unchanged(change) for change in compared)
    head = Markup("<p><b>{} → {}</b>: {} of {} log margins changed by more than {} nats.</p>").format(
        visible(changes.before), visible(changes.after), moved, len(compared), number(changes.floor)
    )
    return head + _frame(changes_html(changes), "Comparison of margins")


@fragment.register
def _(report: RobustnessReport) -> str:
    head = Markup("<p><b>{}</b></p><p>{}</p>").format(headline(report), caveat(report))
    return head + _frame(render_html(report), "Robustness report")


@fragment.register
def _(record: GenerationRecord) -> str:
    return _frame(generation_html(record), "Generated text")


@fragment.register
def _(generation: Generation) -> str:
    return _frame(generation_html(GenerationRecord("Generated text", (generation,))), "Generated text", "18em")


@fragment.register
def _(record: BenchRecord) -> str:
    return str(Markup("<pre>{}</pre>").format(record_table(record)))


def _frame(page: str, title: str, height: str = "40em") -> Markup:
    return Markup(
        '<iframe sandbox="allow-scripts" title="{}" srcdoc="{}" style="width:100%;height:{};border:0"></iframe>'
    ).format(title, page, height)
