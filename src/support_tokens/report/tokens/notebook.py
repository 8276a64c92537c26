r"""A record inside a notebook: static HTML that needs no script, since notebooks run none that they do not trust."""

__all__ = ["margins_fragment"]

from markupsafe import Markup, escape

from support_tokens.report.format import number, visible
from support_tokens.report.records.tokens import LayerMargins, MarginRecord
from support_tokens.report.scale import ALPHAS, limits_of
from support_tokens.report.tokens.marked import marked_tokens
from support_tokens.report.tokens.sanitized import in_table

_PANELS, _TOKENS = 24, 2000


def margins_fragment(record: MarginRecord, *, k: int = 5) -> str:
    """Each text, layer and view as text coloured by margin, with its support tokens; the first stands open.

    At most 24 of them and 2000 tokens of each are shown, and a sentence says so.

    Example:
        >>> from support_tokens.report.records.tokens import TokenMargin
        >>> record = MarginRecord("m", (LayerMargins(0, "noise", (TokenMargin(0, 5, "<b>", 1, 0.5),)),))
        >>> "&lt;b&gt;" in margins_fragment(record)
        True
    """
    parts = [_panel(record, entry, k, place == 0) for place, entry in enumerate(record.layers[:_PANELS])]
    more = len(record.layers) - _PANELS
    if more > 0:
        parts.append(Markup("<p>{} more panels: to_html writes them all.</p>").format(more))
    notes = [Markup("<p style='opacity:.75;margin:.3em 0'>{}</p>").format(visible(note)) for note in record.notes]
    head = Markup("<p style='margin:.3em 0'><b>Support tokens</b> of {}</p>").format(visible(record.model))
    return str(Markup("<div style='max-width:60em'>{}</div>").format(Markup("").join([head, *parts, *notes])))


def _panel(record: MarginRecord, entry: LayerMargins, k: int, opened: bool) -> Markup:
    limits = limits_of(token.margin for token in entry.ranked)
    spans = []
    for token in marked_tokens(entry, limits, k)[:_TOKENS]:
        style = "unicode-bidi:isolate;padding:.15em 0;"
        if token.band is not None:
            style += f"background:rgba(213,94,0,{ALPHAS[token.band]});"
        if token.rank:
            style += "outline:2px solid currentColor;outline-offset:-1px;font-weight:700;"
        if token.negative:
            style += "text-decoration:underline dotted 2px;"
        rank = Markup("<sup>{}</sup>").format(token.rank) if token.rank else ""
        spans.append(
            Markup('<span style="{}" title="{}">{}{}</span>').format(style, token.description, token.text, rank)
            + Markup("\n") * token.breaks
        )
    text = Markup(
        '<div dir="auto" style="font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere;line-height:2">'
        "{}</div>"
    ).format(Markup("").join(spans))
    left = len(entry.tokens) - _TOKENS
    if left > 0:
        text += Markup("<p>{} more tokens: to_html writes them all.</p>").format(left)
    rows = Markup("").join(
        Markup(
            "<tr><td>{}</td><td style='text-align:left'><bdi>{}</bdi></td><td>{}</td><td>{}</td><td>{}</td></tr>"
        ).format(rank, in_table(t), t.position, number(t.margin), "−" if t.sign < 0 else "+" if t.sign else "0")
        for rank, t in enumerate(entry.support_tokens(k), start=1)
    )
    table = Markup(
        "<table><thead><tr><th></th><th style='text-align:left'>support token</th><th>position</th><th>log margin</th>"
        "<th>sign</th></tr></thead><tbody>{}</tbody></table>"
    ).format(rows)
    named = f"{visible(record.name_of(entry.text))}, layer {entry.layer}, {entry.view} view"
    return Markup(
        "<details{}><summary>{}: a stronger colour is a smaller log margin, {} to {}</summary>{}{}</details>"
    ).format(Markup(" open") if opened else "", escape(named), number(limits[0]), number(limits[1]), text, table)
