r"""One layer of a record as a figure for print: margin along the text, layers by positions, and histogram."""

__all__ = ["margins_png", "margins_svg"]

import io
import math
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from support_tokens.report.format import number, visible
from support_tokens.report.records.tokens import LayerMargins, MarginRecord, TokenMargin
from support_tokens.report.scale import limits_of
from support_tokens.report.tokens.sanitized import in_table

_INK, _MUTED, _GRID, _LINE, _WEAK = "#1b1f24", "#57606a", "#d8dee4", "#0072b2", "#d55e00"
_MAP = LinearSegmentedColormap.from_list("margins", ["#8f3d00", "#d55e00", "#f0a56d", "#fbe0c8", "#fffaf5"])
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "support-tokens",
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "text.parse_math": False,
}
_LABEL = 12


def margins_png(
    record: MarginRecord,
    *,
    layer: int | None = None,
    view: str | None = None,
    text: int = 0,
    k: int = 5,
    dpi: int = 160,
) -> bytes:
    """The figure as PNG; the first layer and view of the record where None.

    Raises:
        ArgumentError: The record has no such layer, view or text.
    """
    return _drawn(record, record.select(layer, view, text), k, "png", dpi)


def margins_svg(
    record: MarginRecord, *, layer: int | None = None, view: str | None = None, text: int = 0, k: int = 5
) -> str:
    """The figure as SVG, letters as outlines: it looks the same everywhere and holds no text that could act.

    Raises:
        ArgumentError: The record has no such layer, view or text.
    """
    return _drawn(record, record.select(layer, view, text), k, "svg", 100).decode()


def _drawn(record: MarginRecord, entry: LayerMargins, k: int, kind: str, dpi: int) -> bytes:
    same = sorted(
        (other for other in record.layers if (other.text, other.view) == (entry.text, entry.view)),
        key=lambda o: o.layer,
    )
    with matplotlib.rc_context(_SETTINGS):
        rows = 2 + (len(same) > 1)
        ratios = [2.2, *([max(0.9, min(3.0, 0.22 * len(same)))] if len(same) > 1 else []), 1.3]
        figure = Figure(figsize=(8.6, 1.55 * sum(ratios) + 0.6), layout="constrained")
        axes = figure.subplots(rows, 1, height_ratios=ratios)
        figure.suptitle(
            f"{visible(record.model)}, layer {entry.layer}, {entry.view} view: {visible(record.name_of(entry.text))}",
            x=0.01, ha="left", fontsize=11, fontweight="bold", color=_INK,
        )  # fmt: skip
        _along(axes[0], entry, k)
        if len(same) > 1:
            _map(figure, axes[1], same, entry.layer)
        _spread(axes[-1], entry)
        file = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(file, format=kind, dpi=dpi, metadata=metadata)
    return file.getvalue()


def _plain(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=9, color=_MUTED)
    axes.tick_params(colors=_MUTED, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_GRID)


def _along(axes: Axes, entry: LayerMargins, k: int) -> None:
    _plain(axes, "Log margin along the text (nats); marked: support tokens, hollow where det J < 0")
    places = [token.position for token in entry.tokens]
    axes.axhline(0, color=_GRID, linewidth=1, linestyle=(0, (4, 3)))
    axes.plot(places, [_drawn_margin(token) for token in entry.tokens], color=_LINE, linewidth=1.2)
    axes.margins(x=0.02, y=0.2)
    for place, token in enumerate(entry.support_tokens(k)):
        face = "white" if token.sign < 0 else _WEAK
        height = _drawn_margin(token)
        axes.plot(token.position, height, "o", markersize=5.5, markerfacecolor=face, markeredgecolor=_WEAK)
        if place < 6:
            axes.annotate(
                _short(token), (token.position, height), xytext=(0, -11), textcoords="offset points",
                ha="center", va="top", fontsize=8, color=_INK,
            )  # fmt: skip


def _drawn_margin(token: TokenMargin) -> float:
    """A height that can be drawn: none where the Jacobian is singular."""
    return math.nan if token.log_abs_det is None else token.log_abs_det


def _short(token: TokenMargin) -> str:
    """A token that the font of the figure can write: what it cannot is named by its code."""
    shown = in_table(token)
    shown = "".join(c if _writable(c) else f"[U+{ord(c):04X}]" for c in shown)
    return shown if len(shown) <= _LABEL else f"{shown[: _LABEL - 1]}…"


def _writable(character: str) -> bool:
    from matplotlib import font_manager

    font = font_manager.get_font(font_manager.findfont("DejaVu Sans"))
    return bool(font.get_char_index(ord(character)))


def _map(figure: Figure, axes: Axes, same: list[LayerMargins], layer: int) -> None:
    _plain(axes, "Layers by positions: darker is a smaller log margin")
    high, low = limits_of(t.margin for other in same for t in other.ranked)
    values = [[_drawn_margin(t) if t.ranked else math.nan for t in other.tokens] for other in same]
    image = axes.imshow(
        values, aspect="auto", cmap=_MAP, vmin=low, vmax=high if high > low else low + 1, interpolation="nearest"
    )
    every = max(1, len(same) // 12)
    axes.set_yticks(range(0, len(same), every), [str(other.layer) for other in same[::every]])
    place = next(i for i, other in enumerate(same) if other.layer == layer)
    axes.plot([-0.5, len(values[0]) - 0.5], [place + 0.5] * 2, color=_INK, linewidth=0.8)
    axes.plot([-0.5, len(values[0]) - 0.5], [place - 0.5] * 2, color=_INK, linewidth=0.8)
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03)
    bar.ax.tick_params(colors=_MUTED, labelsize=8)
    bar.outline.set_edgecolor(_GRID)  # type: ignore[operator]


def _spread(axes: Axes, entry: LayerMargins) -> None:
    ranked = [token for token in entry.ranked if token.log_abs_det is not None]
    positive = [token.margin for token in ranked if token.sign >= 0]
    negative = [token.margin for token in ranked if token.sign < 0]
    values = positive + negative
    mean = number(sum(values) / len(values)) if values else "none"
    said = f"{len(values)} tokens, mean {mean}"
    if negative:
        said += f"; hatched: {len(negative)} with a negative determinant"
    _plain(axes, f"How log margins are spread: {said}")
    if values:
        bins = min(30, max(8, round(1.6 * len(values) ** 0.5)))
        _, _, patches = axes.hist(
            [positive, negative], bins=bins, stacked=True, color=[_LINE, _WEAK], edgecolor="white", linewidth=0.5
        )
        for patch in patches[1]:  # type: ignore[union-attr,index]
            patch.set_hatch("////")
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
