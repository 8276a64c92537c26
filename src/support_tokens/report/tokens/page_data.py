r"""What the script of a page reads: columns of figures with their bands, and rows of tokens for display."""

__all__ = ["changes_data", "margins_data"]

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from support_tokens.report.format import visible
from support_tokens.report.records.changes import LayerChanges, MarginChanges, TokenChange
from support_tokens.report.records.tokens import LayerMargins, MarginRecord, TokenMargin
from support_tokens.report.scale import ALPHAS, DIVERGING_ALPHAS, band, diverging_band, limits_of, spread_of
from support_tokens.report.tokens.sanitized import breaks_after, in_text

_DIGITS = 6
_NO_BAND = "-"


@dataclass(frozen=True)
class _Quantity:
    """A figure that the text can be coloured by: the name of its column, and which end of its scale is the weak one."""

    name: str
    label: str
    digits: int
    weak: str = "low"
    percent: bool = False


_OF_RECORD = (
    _Quantity("margin", "Log margin log|det J|", 3),
    _Quantity("sigma", "Distance to degeneracy σ_min", 4),
    _Quantity("share", "Share of the barrier’s gradient", 1, "high", percent=True),
    _Quantity("surprise", "Surprisal (nats)", 2, "high"),
)
_OF_CHANGES = (
    _Quantity("difference", "Change of the log margin", 3, "diverging"),
    _Quantity("margin", "Log margin after", 3),
    _Quantity("before", "Log margin before", 3),
)


def margins_data(record: MarginRecord, k: int) -> dict[str, Any]:
    """The data of a page over one record."""
    rows = {}
    for entry in record.layers:
        rows.setdefault(entry.text, [_row(token) for token in entry.tokens])
    # All layers of a text share the scale of the map, so that layers can be compared.
    shared = {
        (entry.text, entry.view): limits_of(
            token.margin
            for other in record.layers
            if (other.text, other.view) == (entry.text, entry.view)
            for token in other.ranked
        )
        for entry in record.layers
    }
    return {
        "kind": "margins",
        "k": k,
        "alphas": ALPHAS,
        "texts": [{"name": visible(record.name_of(text)), "rows": own} for text, own in sorted(rows.items())],
        "panels": [_panel(entry, place, shared[entry.text, entry.view]) for place, entry in _placed(record.layers)],
        "quantities": [asdict(quantity) for quantity in _OF_RECORD],
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
        "floor": changes.floor,
        "alphas": DIVERGING_ALPHAS,
        "names": [visible(changes.before), visible(changes.after)],
        "texts": [{"name": f"text {t + 1}" if many else "text", "rows": own} for t, own in sorted(rows.items())],
        "panels": [_change_panel(entry, place, changes.floor) for place, entry in _placed(changes.layers)],
        "quantities": [asdict(quantity) for quantity in _OF_CHANGES],
    }


def _placed(entries: Sequence[Any]) -> Iterable[tuple[int, Any]]:
    places = {text: place for place, text in enumerate(sorted({entry.text for entry in entries}))}
    return ((places[entry.text], entry) for entry in entries)


def _row(token: TokenMargin) -> dict[str, Any]:
    row: dict[str, Any] = {"s": in_text(token), "p": token.position, "i": token.id}
    if breaks := breaks_after(token):
        row["b"] = breaks
    return row


def _panel(entry: LayerMargins, place: int, shared: tuple[float, float]) -> dict[str, Any]:
    tokens = entry.tokens
    ranked = [token.ranked for token in tokens]
    columns = {
        "margin": [token.margin for token in tokens],
        "sigma": [token.sigma_min for token in tokens],
        "share": [token.gradient_share for token in tokens],
        "surprise": [token.surprisal_nats for token in tokens],
    }
    margins = columns["margin"]
    return {
        "text": place,
        "layer": entry.layer,
        "view": entry.view,
        "sign": [token.sign for token in tokens],
        "ranked": [int(flag) for flag in ranked],
        "order": [token.position for token in entry.support_tokens(len(tokens))],
        **{name: _column(values) for name, values in columns.items()},
        "coupling": [token.coupling_sign for token in tokens],
        "heads": [None if token.per_head is None else _column(token.per_head) for token in tokens],
        **_bands(_OF_RECORD, columns, ranked),
        "map": _digits(margins, ranked, lambda value: band(value, shared)),
        "mapLimits": _column(shared),
    }


def _change_row(change: TokenChange) -> dict[str, Any]:
    row = _row(change.token)
    if change.kind != "same":
        row["c"] = change.kind
    if change.first:
        row["f"] = 1
    if change.kind == "replaced" and change.before is not None:
        row["was"] = in_text(change.before)
    return row


def _change_panel(entry: LayerChanges, place: int, floor: float) -> dict[str, Any]:
    both = [(change.before, change.after) for change in entry.tokens]
    columns = {
        "difference": [change.difference for change in entry.tokens],
        "margin": [None if after is None else after.margin for _, after in both],
        "before": [None if before is None else before.margin for before, _ in both],
    }
    bands = _bands(_OF_CHANGES, columns, [True] * len(both), floor)
    return {
        "text": place,
        "layer": entry.layer,
        "view": entry.view,
        "sign": [change.token.sign for change in entry.tokens],
        "signBefore": [None if before is None else before.sign for before, _ in both],
        "ranked": [int(after is not None and after.ranked) for _, after in both],
        **{name: _column(values) for name, values in columns.items()},
        "sigma": _column(None if after is None else after.sigma_min for _, after in both),
        "sigmaBefore": _column(None if before is None else before.sigma_min for before, _ in both),
        "rank": [change.rank_after for change in entry.tokens],
        "rankBefore": [change.rank_before for change in entry.tokens],
        **bands,
        # Each layer has a scale of its own: changes of deep layers would hide those of all others.
        "map": bands["bands"]["difference"],
        "mapLimits": bands["limits"]["difference"],
    }


def _bands(
    quantities: Sequence[_Quantity], columns: dict[str, list], counted: Sequence[bool], floor: float = 0.0
) -> dict[str, dict[str, Any]]:
    """Of each quantity: its bands, one digit a token, and the ends of its scale, strong and weak."""
    bands, limits = {}, {}
    for quantity in quantities:
        values = columns[quantity.name]
        present = [value for value, count in zip(values, counted, strict=True) if count and value is not None]
        if quantity.weak == "diverging":
            end = spread_of(present)
            limits[quantity.name] = _column((end, -end))
            bands[quantity.name] = _digits(values, counted, lambda value, end=end: diverging_band(value, end, floor))
        else:
            ends = limits_of(present, weak_is_high=quantity.weak == "high")
            limits[quantity.name] = _column(ends)
            bands[quantity.name] = _digits(values, counted, lambda value, ends=ends: band(value, ends))
    return {"bands": bands, "limits": limits}


def _digits(values: Sequence[float | None], counted: Sequence[bool], band_of) -> str:
    pairs = zip(values, counted, strict=True)
    return "".join(str(band_of(value)) if count and value is not None else _NO_BAND for value, count in pairs)


def _column(values: Iterable[float | None]) -> list[float | None]:
    """Six digits: more than a reader sees, half of the size; None where there is no finite figure."""
    return [None if value is None or math.isinf(value) else float(f"{value:.{_DIGITS}g}") for value in values]
