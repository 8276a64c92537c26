r"""What the script of a page reads: columns of figures, and rows of tokens that can be shown as they are."""

__all__ = ["changes_data", "margins_data"]

from collections.abc import Iterable, Sequence
from typing import Any

from support_tokens.report.format import visible
from support_tokens.report.records.changes import LayerChanges, MarginChanges, TokenChange
from support_tokens.report.records.tokens import LayerMargins, MarginRecord, TokenMargin
from support_tokens.report.tokens.sanitized import breaks_after, in_text

_DIGITS = 6


def margins_data(record: MarginRecord, k: int) -> dict[str, Any]:
    """The data of a page over one record."""
    rows = {}
    for entry in record.layers:
        rows.setdefault(entry.text, [_row(token) for token in entry.tokens])
    return {
        "kind": "margins",
        "k": k,
        "texts": [{"name": visible(record.name_of(text)), "rows": own} for text, own in sorted(rows.items())],
        "panels": [_panel(entry, place) for place, entry in _placed(record.layers)],
        "quantities": [
            {"name": "margin", "label": "Log margin log|det J|", "weak": "low", "digits": 3},
            {"name": "sigma", "label": "Distance to degeneracy σ_min", "weak": "low", "digits": 4},
            {"name": "share", "label": "Share of the barrier’s gradient", "weak": "high", "digits": 1, "percent": True},
            {"name": "surprise", "label": "Surprise (nats)", "weak": "high", "digits": 2},
        ],
    }


def changes_data(changes: MarginChanges) -> dict[str, Any]:
    """The data of a page over one comparison."""
    rows = {}
    for entry in changes.layers:
        rows.setdefault(entry.text, [_change_row(change) for change in entry.tokens])
    many = len(rows) > 1
    return {
        "kind": "changes",
        "k": changes.k,
        "names": [visible(changes.before), visible(changes.after)],
        "texts": [{"name": f"text {t + 1}" if many else "text", "rows": own} for t, own in sorted(rows.items())],
        "panels": [_change_panel(entry, place) for place, entry in _placed(changes.layers)],
        "quantities": [
            {"name": "difference", "label": "Change of the log margin", "weak": "diverging", "digits": 3},
            {"name": "margin", "label": "Log margin after", "weak": "low", "digits": 3},
            {"name": "before", "label": "Log margin before", "weak": "low", "digits": 3},
        ],
    }


def _placed(entries: Sequence[Any]) -> Iterable[tuple[int, Any]]:
    places = {text: place for place, text in enumerate(sorted({entry.text for entry in entries}))}
    return ((places[entry.text], entry) for entry in entries)


def _row(token: TokenMargin) -> dict[str, Any]:
    row: dict[str, Any] = {"s": in_text(token), "p": token.position, "i": token.id}
    if breaks := breaks_after(token):
        row["b"] = breaks
    return row


def _panel(entry: LayerMargins, place: int) -> dict[str, Any]:
    tokens = entry.tokens
    return {
        "text": place,
        "layer": entry.layer,
        "view": entry.view,
        "sign": [token.sign for token in tokens],
        "ranked": [int(token.valid and token.rankable) for token in tokens],
        "margin": _column(token.log_abs_det for token in tokens),
        "sigma": _column(token.sigma_min for token in tokens),
        "share": _column(token.gradient_share for token in tokens),
        "surprise": _column(token.surprisal_nats for token in tokens),
        "coupling": [token.coupling_sign for token in tokens],
        "heads": [None if token.per_head is None else _column(token.per_head) for token in tokens],
    }


def _change_row(change: TokenChange) -> dict[str, Any]:
    there = change.after if change.after is not None else change.before
    assert there is not None, "a change has a token before or after"
    row = _row(there)
    if change.kind != "same":
        row["c"] = change.kind
    if change.kind == "replaced" and change.before is not None:
        row["was"] = in_text(change.before)
    return row


def _change_panel(entry: LayerChanges, place: int) -> dict[str, Any]:
    both = [(change.before, change.after) for change in entry.tokens]
    return {
        "text": place,
        "layer": entry.layer,
        "view": entry.view,
        "sign": [(after or before).sign for before, after in both],  # type: ignore[union-attr]
        "signBefore": [None if before is None else before.sign for before, _ in both],
        "ranked": [int(after is not None and after.valid and after.rankable) for _, after in both],
        "difference": _column(change.difference for change in entry.tokens),
        "margin": _column(None if after is None else after.log_abs_det for _, after in both),
        "before": _column(None if before is None else before.log_abs_det for before, _ in both),
        "sigma": _column(None if after is None else after.sigma_min for _, after in both),
        "sigmaBefore": _column(None if before is None else before.sigma_min for before, _ in both),
        "rank": [change.rank_after for change in entry.tokens],
        "rankBefore": [change.rank_before for change in entry.tokens],
    }


def _column(values: Iterable[float | None]) -> list[float | None]:
    """Six digits: more than a reader sees, half of the size."""
    return [None if value is None else float(f"{value:.{_DIGITS}g}") for value in values]
