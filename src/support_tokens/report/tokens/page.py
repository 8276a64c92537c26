r"""A record or a comparison as one HTML file: no network, nothing but its own script, every text inert."""

__all__ = ["changes_html", "margins_html"]

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from support_tokens.report.format import number, visible
from support_tokens.report.records.changes import MarginChanges
from support_tokens.report.records.tokens import MarginRecord
from support_tokens.report.scale import band_css
from support_tokens.report.tokens.page_data import changes_data, margins_data
from support_tokens.report.tokens.sanitized import in_table

_VIEWS = {"noise": "noise map x − μ(x)", "block": "block map x + μ(x)"}
_FALLBACK_PANELS = 24


def margins_html(record: MarginRecord, *, k: int = 5, title: str | None = None) -> str:
    r"""All views of a record as one self-contained HTML document.

    A content security policy stands in the file: it may run its own script, known by its checksum, and load nothing.

    Args:
        record: What an analysis wrote; nothing else is read, least of all a model.
        k: How many support tokens are marked at first.
        title: Heading; None: the name of the model.

    Returns:
        HTML; the same record gives the same text.
    """
    count = sum(text.tokens for text in record.texts) or len(record.layers[0].tokens)
    texts = len({entry.text for entry in record.layers})
    about = [
        ("model", visible(record.model)),
        ("texts", f"{texts}, {count} tokens"),
        ("precision", record.dtype),
        ("window", record.window and f"{record.window} tokens, {record.overlap} repeated as context"),
    ]
    fallback = [
        {
            "head": f"{visible(record.name_of(entry.text))}, layer {entry.layer}, {_VIEWS.get(entry.view, entry.view)}",
            "rows": [(t.position, in_table(t), number(t.margin), t.sign) for t in entry.support_tokens(k)],
        }
        for entry in record.layers[:_FALLBACK_PANELS]
    ]
    return _render(
        data=margins_data(record, k),
        title=visible(title or record.model),
        eyebrow="Support tokens",
        lede=_lede(record, texts, count),
        notes=record.notes,
        about=[(name, str(value)) for name, value in about if value],
        versions=sorted(record.versions.items()),
        fallback=fallback,
    )


def changes_html(changes: MarginChanges, *, title: str | None = None) -> str:
    """A comparison as one self-contained HTML document, as `margins_html`."""
    before, after = visible(changes.before), visible(changes.after)
    return _render(
        data=changes_data(changes),
        title=visible(title) if title else f"{before} → {after}",
        eyebrow="Support tokens compared",
        lede=f"What changed from {before} to {after}: differences of the log margin, and which of the {changes.k} "
        "support tokens were gained and lost.",
        notes=changes.notes,
        about=[("before", before), ("after", after)],
        versions=[],
        fallback=[],
    )


def _lede(record: MarginRecord, texts: int, count: int) -> str:
    layers = sorted({entry.layer for entry in record.layers})
    named = f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers"
    whose = f"{count} tokens" if texts == 1 else f"{texts} texts, {count} tokens"
    return f"How far each token is from the point where attention degenerates: {whose}, {named}."


def _render(
    *,
    data: Mapping[str, Any],
    title: str,
    eyebrow: str,
    lede: str,
    notes: Sequence[str],
    about: Sequence[tuple[str, str]],
    versions: Sequence[tuple[str, str]],
    fallback: Sequence[Mapping[str, Any]],
) -> str:
    files = resources.files("support_tokens.report.tokens")
    style, script = (files.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    style += band_css()
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(files.joinpath("page.html").read_text(encoding="utf-8"))
    policy = (
        f"default-src 'none'; script-src '{_checksum(script)}'; style-src '{_checksum(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return template.render(
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        data=Markup(_inert(data)),
        kind=data["kind"],
        several_texts=len(data["texts"]) > 1,
        title=title,
        eyebrow=eyebrow,
        lede=lede,
        notes=[visible(note) for note in notes],
        about=about,
        versions=versions,
        fallback=fallback,
    )


def _checksum(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _inert(data: Mapping[str, Any]) -> str:
    """JSON in which nothing can end the element that holds it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
