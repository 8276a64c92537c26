r"""Figures of a report as SVG to stand inside a page, and as PNG.

The SVG takes its colours from the page's style sheet (custom properties), so that it follows light, dark and print. It
holds no text of the user: names of arms and tokens stand in the page, where they are escaped and set in its fonts.
"""

__all__ = ["ARM_COLOURS", "ARM_COLOURS_DARK", "curve_svg", "degradation_png", "histogram_svg", "swatch", "trace_svg"]

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from support_tokens.report import format as fmt
from support_tokens.report.records.histograms import MarginCounts, MarginHistogram
from support_tokens.report.records.robustness import RobustnessReport
from support_tokens.report.records.tokens import LayerMargins

# Okabe and Ito's palette for all kinds of colour vision; yellow is left out, which vanishes on white.
ARM_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a8518a", "#000000", "#b07400", "#2a8fd0", "#7a5230")
ARM_COLOURS_DARK = ("#56b4e9", "#f2854a", "#2ec498", "#dd94bf", "#e8e8e8", "#f0b440", "#9ad0f5", "#c9a07c")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES = ("", "6 2.5", "1.5 1.8", "7 2 1.5 2", "4 1.5", "9 2 2 2 2 2", "3 3", "1 3")
_SHAPES = (
    "M17 3a3.2 3.2 0 1 0 .01 0z",
    "M14 3.2h6v6h-6z",
    "M17 2.4l3.6 6.6h-7.2z",
    "M17 2l4 4.2-4 4.2-4-4.2z",
    "M17 10l3.6-6.6h-7.2z",
    "M15.6 2.4h2.8v2.4h2.4v2.8h-2.4v2.4h-2.8v-2.4h-2.4v-2.8h2.4z",
    "M14 2.6l3 2.4 3-2.4 1 1-2.4 2.6 2.4 2.6-1 1-3-2.4-3 2.4-1-1 2.4-2.6-2.4-2.6z",
    "M17 1.6l1.3 3 3.2.3-2.4 2.1.8 3.2-2.9-1.7-2.9 1.7.8-3.2-2.4-2.1 3.2-.3z",
)


@dataclass(frozen=True)
class _Colours:
    ink: str
    muted: str
    grid: str
    arms: tuple[str, ...]

    def of(self, place: int) -> str:
        return self.arms[place % len(self.arms)]


# Colours that matplotlib writes out and `_inline` exchanges for the page's custom properties.
_STAND_INS = {f"#0d0e0{i}": f"var(--{name})" for i, name in enumerate(("ink", "muted", "grid"))} | {
    f"#0d0f0{i}": f"var(--arm-{i})" for i in range(len(ARM_COLOURS))
}
# Families whose axes are ours and short; a stranger's axis may be of any length.
_AXES = ("embedding_noise", "worst_case", "typos", "token_drop", "weight_rounding")
_PAGE = _Colours("#0d0e00", "#0d0e01", "#0d0e02", tuple(c for c in _STAND_INS if c.startswith("#0d0f")))
_PAPER = _Colours("#1b1f24", "#57606a", "#d8dee4", ARM_COLOURS)

_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "support-tokens",
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.unicode_minus": True,
    "path.simplify": False,
}


def swatch(place: int) -> str:
    """A legend's sample of the line and marker of the arm at `place`, as SVG."""
    shape, dashes = _SHAPES[_marker(place)], _DASHES[_marker(place)]
    colour = f"var(--arm-{place % len(ARM_COLOURS)})"
    return (
        '<svg class="swatch" viewBox="0 0 34 12.4" aria-hidden="true" focusable="false">'
        f'<path d="M1 6.2h32" style="stroke:{colour};stroke-width:2;fill:none;stroke-dasharray:{dashes or "none"}"/>'
        f'<path d="{shape}" style="fill:{colour}"/></svg>'
    )


def curve_svg(report: RobustnessReport, family: str) -> str:
    """Degradation of each arm over the strengths of a family, with the bands of its intervals."""
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(4.4, 3.1), layout="constrained")
        _curve(figure.add_subplot(), report, family, _PAGE)
        ends = [
            f"{fmt.label(report, arm.name)} {fmt.ratio(points[-1][1])}"
            for arm in report.arms
            if (points := _points(report, arm.name, family))
        ]
        strength = f"{max(p.strength for p in report.perturbations if p.family == family):g}"
        description = (
            f"Degradation ratio under {fmt.family(family)}; at the largest strength, {strength}: {', '.join(ends)}."
        )
        return _inline(figure, description, f"curve-{family}")


def histogram_svg(histogram: MarginHistogram, counts: MarginCounts, place: int, description: str) -> str:
    """One arm's log margins over the shared edges and to the shared height; negative determinants hatched."""
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(3.5, 2.0), layout="constrained")
        axes = figure.add_subplot()
        _dress(axes, _PAGE)
        colour, edges = _PAGE.of(place), histogram.edges
        axes.stairs([c / counts.n for c in counts.counts], edges, fill=True, color=colour, alpha=0.35, lw=0)
        axes.stairs([c / counts.n for c in counts.counts], edges, color=colour, lw=1.4)
        if any(counts.negative_counts):
            fractions = [c / counts.n for c in counts.negative_counts]
            axes.stairs(fractions, edges, fill=True, facecolor="none", edgecolor=_PAGE.ink, hatch="////", lw=0.6)
        axes.axvline(0, color=_PAGE.ink, lw=0.9)
        if counts.mean is not None and edges[0] <= counts.mean <= edges[-1]:
            axes.axvline(counts.mean, color=_PAGE.ink, lw=1.1, ls=(0, (3, 2)))
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(0, 1.06 * max(max(other.counts) / other.n for other in histogram.arms) or 1)
        axes.set_xlabel("log margin, log |det J|  (nats)")
        axes.set_ylabel("fraction of positions")
        axes.yaxis.set_major_locator(MaxNLocator(3))
        return _inline(figure, description, f"histogram-{histogram.source}-{histogram.layer}-{histogram.view}-{place}")


def trace_svg(texts: Sequence[tuple[int, LayerMargins]], support: int, description: str) -> str:
    """Log margins along the text, a line an arm; support tokens carry its marker, negative determinants a cross.

    Args:
        texts: The place of each arm, and its margins.
        support: How many support tokens are marked.
        description: What the figure says to those who do not see it.
    """
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(8.8, 2.9), layout="constrained")
        axes = figure.add_subplot()
        _dress(axes, _PAGE)
        axes.axhline(0, color=_PAGE.ink, lw=0.9)
        for place, entry in texts:
            colour = _PAGE.of(place)
            heights = [t.log_abs_det if t.ranked and t.log_abs_det is not None else float("nan") for t in entry.tokens]
            axes.plot(range(len(heights)), heights, color=colour, lw=1.2, ls=_dash(place), alpha=0.85)
            weakest = [token.position for token in entry.support_tokens(support)]
            axes.plot(
                weakest,
                [heights[t] for t in weakest],
                color=colour,
                marker=_MARKERS[_marker(place)],
                markersize=6.5,
                markeredgecolor=_PAGE.ink,
                markeredgewidth=0.9,
                ls="",
                zorder=3,
            )
            folded = [token.position for token in entry.ranked if token.sign < 0]
            axes.plot(folded, [heights[t] for t in folded], color=_PAGE.ink, marker="x", markersize=5, ls="", zorder=4)
        axes.set_xlim(-0.5, max(len(entry.tokens) for _, entry in texts) - 0.5)
        axes.set_xlabel("position in the text")
        axes.set_ylabel("log margin (nats)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return _inline(figure, description, "trace")


def degradation_png(report: RobustnessReport, *, dots_per_inch: int = 160) -> bytes:
    """The curves of all families with a legend, as a PNG on white for a README or a paper."""
    curves = report.families or ["clean"]
    labels = [_drawable(fmt.label(report, arm.name)) for arm in report.arms]
    width = 4.4 * len(curves)
    # A sample of the line takes 0.7 inches and a letter at most 0.08; rows past the second make the figure higher.
    columns = max(1, min(4, len(labels), int(width / (0.7 + 0.08 * max(map(len, labels))))))
    rows = -(-len(labels) // columns)
    with matplotlib.rc_context(_SETTINGS):
        height = 3.5 + 0.22 * max(0, rows - 2)
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
        drawn: Axes | None = None
        for place, family in enumerate(curves):
            drawn = figure.add_subplot(1, len(curves), place + 1)
            _curve(drawn, report, family, _PAPER)
            drawn.set_title(fmt.family(family), color=_PAPER.ink, parse_math=False)
        if drawn is not None:
            legend = figure.legend(
                drawn.get_lines()[: len(report.arms)],
                labels,
                loc="outside lower center",
                ncols=columns,
                frameon=False,
                labelcolor=_PAPER.ink,
            )
            for text in legend.get_texts():
                text.set_parse_math(False)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=dots_per_inch, metadata={"Software": None})
        return file.getvalue()


def _points(report: RobustnessReport, arm: str, family: str) -> list[tuple[float, float, float, float]]:
    """Strength, ratio and its interval, from clean on; a point without an interval is its own band."""
    points = []
    for perturbation in report.perturbations:
        if perturbation.family in ("clean", family):
            ratio = report.result(arm, perturbation.name).degradation
            low = ratio.value if ratio.low is None else ratio.low
            high = ratio.value if ratio.high is None else ratio.high
            points.append((perturbation.strength, ratio.value, low, high))
    return sorted(points)


def _curve(axes: Axes, report: RobustnessReport, family: str, colours: _Colours) -> None:
    _dress(axes, colours)
    for place, arm in enumerate(report.arms):
        strengths, ratios, lows, highs = zip(*_points(report, arm.name, family), strict=True)
        look = {"color": colours.of(place), "ls": _dash(place), "marker": _MARKERS[_marker(place)]}
        axes.plot(strengths, ratios, lw=1.8, markersize=5, **look)
        axes.fill_between(strengths, lows, highs, color=colours.of(place), alpha=0.18, lw=0)
    axis = next((p.axis for p in report.perturbations if p.family == family), "strength")
    shown = fmt.visible(axis)
    axes.set_xlabel(re.sub(r"\bsigma\b", "σ", shown) if family.split("/")[0] in _AXES else "strength")
    axes.set_ylabel(f"{report.measure} / clean {report.measure}")
    axes.set_xlim(left=0)


def _dress(axes: Axes, colours: _Colours) -> None:
    axes.patch.set_visible(False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(colours.muted)
    axes.tick_params(colors=colours.muted, labelcolor=colours.ink, length=3)
    axes.xaxis.label.set_color(colours.ink)
    axes.yaxis.label.set_color(colours.ink)
    axes.grid(axis="y", color=colours.grid, lw=0.8)
    axes.set_axisbelow(True)


def _marker(place: int) -> int:
    """Arms beyond the eighth repeat colours, but with another marker and dash."""
    return (place + place // len(ARM_COLOURS)) % len(_MARKERS)


def _dash(place: int) -> tuple[int, tuple[float, ...]] | str:
    dashes = _DASHES[_marker(place)]
    return (0, tuple(float(d) / 1.8 for d in dashes.split())) if dashes else "-"


def _drawable(text: str) -> str:
    """Text in which what the figure's font lacks is a question mark; matplotlib would draw a box and warn."""
    from matplotlib.font_manager import findfont, get_font

    known = get_font(findfont("DejaVu Sans")).get_charmap()
    return "".join(c if ord(c) in known else "?" for c in text)


def _inline(figure: Figure, description: str, name: str) -> str:
    """The figure as one `<svg>` element that scales with the page, has `description`, and shares no id with another."""
    figure.patch.set_visible(False)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    prefix = re.sub(r"[^a-z0-9]+", "-", name.lower())
    text = re.sub(r'(?<=\bid=")(?=[^"]+")', f"{prefix}-", text)
    text = re.sub(r'(?<=href="#)|(?<=url\(#)', f"{prefix}-", text)
    text = re.sub("|".join(_STAND_INS), lambda found: _STAND_INS[found[0]], text)
    opening = f'<svg class="plot" role="img" aria-label="{html.escape(description, quote=True)}"'
    text = re.sub(r'(<svg\b[^>]*?) (?:width|height)="[^"]*pt"', r"\1", text)
    text = re.sub(r'(<svg\b[^>]*?) (?:width|height)="[^"]*pt"', r"\1", text)
    return text.replace("<svg", opening, 1).strip()
