r"""Log margins of several arms as plain records: histograms over shared edges, and one text as each arm reads it."""

__all__ = ["ArmMargins", "MarginCounts", "MarginHistogram", "histograms", "sentence"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import numpy as np

from support_tokens.errors import ArgumentError
from support_tokens.report.records.tokens import LayerMargins, MarginRecord
from support_tokens.report.schema import AT_LEAST_ONE, FRACTION, NON_NEGATIVE

Count = Annotated[int, NON_NEGATIVE]


@dataclass(frozen=True)
class MarginCounts:
    """Histogram of one arm's log margins.

    Args:
        arm: Its name.
        n: Margins in all.
        counts: Of each bin.
        negative_counts: Those of them with a negative determinant.
        below: Below the first edge.
        above: Above the last edge.
        singular: Of log margin minus infinity, which no bin holds.
        mean: Mean log margin in nats, None where all are singular.
        minimum: Smallest one, None likewise.
        negative_fraction: Fraction with a negative determinant.
    """

    arm: str
    n: Annotated[int, AT_LEAST_ONE]
    counts: tuple[Count, ...]
    negative_counts: tuple[Count, ...]
    below: Count
    above: Count
    singular: Count
    mean: float | None
    minimum: float | None
    negative_fraction: Annotated[float, FRACTION]


@dataclass(frozen=True)
class MarginHistogram:
    """Histograms of several arms over the same edges; `source`, `layer` and `view` say whose margins they are."""

    source: str
    layer: int
    view: str
    edges: tuple[float, ...]
    arms: Annotated[tuple[MarginCounts, ...], AT_LEAST_ONE]

    def __post_init__(self) -> None:
        bins = {len(of_arm) for counts in self.arms for of_arm in (counts.counts, counts.negative_counts)}
        if bins != {len(self.edges) - 1} or any(left >= right for left, right in pairwise(self.edges)):
            raise ArgumentError(
                f"A histogram of {len(self.edges)} edges must have increasing edges and one count fewer for each arm, "
                f"but its numbers of counts are {sorted(bins)}."
            )


@dataclass(frozen=True)
class ArmMargins:
    r"""Margins of one arm, on held-out text and along one sentence.

    Args:
        log_abs_det: $\log|\det J_t|$ at the ranked positions of the held-out text, in nats.
        sign: Sign of $\det J_t$ at the same positions.
        source: Whose attention: `model` or `prior`.
        layer: Which block's, from 0.
        view: `noise` (J of x - mu) or `block` (J of x + mu).
        text: Margins along a held-out text, or None.

    Raises:
        ArgumentError: Numbers of margins and signs that differ.
    """

    log_abs_det: Sequence[float]
    sign: Sequence[int]
    source: str = "model"
    layer: int = 0
    view: str = "noise"
    text: LayerMargins | None = None

    def __post_init__(self) -> None:
        if len(self.log_abs_det) != len(self.sign):
            raise ArgumentError(
                f"Margins need one sign each, but there are {len(self.log_abs_det)} margins and {len(self.sign)} signs."
            )

    @property
    def comparable(self) -> tuple[str, int, str]:
        """Source, layer and view: what two arms must share to be compared."""
        return self.source, self.layer, self.view


def histograms(arms: Mapping[str, ArmMargins | None], *, bins: int = 40) -> tuple[MarginHistogram, ...]:
    r"""One histogram for each source, layer and view, over edges that its arms share.

    Edges cover all arms' finite log margins and 0, the margin of no coupling. Where a few outliers would stretch them,
    they run from the 0.5 % to the 99.5 % quantile, and what lies outside is counted as `below` and `above`.

    Args:
        arms: Margins by arm; None or no margins: the arm is left out.
        bins: Number of bins.

    Example:
        >>> (histogram,) = histograms({"a": ArmMargins([0.0, 0.5, 1.0], [1, 1, -1])}, bins=2)
        >>> histogram.edges, histogram.arms[0].counts, histogram.arms[0].negative_fraction
        ((0.0, 0.5, 1.0), (1, 2), 0.3333333333333333)
    """
    present = {name: margins for name, margins in arms.items() if margins is not None and len(margins.log_abs_det)}
    groups = dict.fromkeys(margins.comparable for margins in present.values())
    return tuple(
        _histogram(group, {name: m for name, m in present.items() if m.comparable == group}, bins) for group in groups
    )


def sentence(arms: Mapping[str, ArmMargins | None]) -> tuple[MarginRecord, ...]:
    r"""A held-out text as each arm reads it, a record an arm.

    Args:
        arms: Margins by arm; texts of another source, layer or view than the first are left out.

    Example:
        >>> text = LayerMargins.of_columns("abc", [0.0, -1.0, -2.0], [1, 1, 1])
        >>> (record,) = sentence({"a": ArmMargins([], [], text=text), "b": None})
        >>> record.model, [token.token for token in record.select().support_tokens(1)]
        ('a', ['c'])
    """
    present = {name: margins for name, margins in arms.items() if margins is not None and margins.text is not None}
    first = next((margins.comparable for margins in present.values()), None)
    return tuple(
        MarginRecord(name, (margins.text,))
        for name, margins in present.items()
        if margins.comparable == first and margins.text is not None
    )


def _histogram(group: tuple[str, int, str], arms: Mapping[str, ArmMargins], bins: int) -> MarginHistogram:
    columns = {name: (np.asarray(m.log_abs_det, dtype=np.float64), np.asarray(m.sign)) for name, m in arms.items()}
    edges = _edges(np.concatenate([values[np.isfinite(values)] for values, _ in columns.values()]), bins)
    counts = tuple(_counts(name, values, signs, edges) for name, (values, signs) in columns.items())
    return MarginHistogram(*group, tuple(edges.tolist()), counts)


def _edges(values: np.ndarray, bins: int) -> np.ndarray:
    low, inner_low, inner_high, high = np.quantile(values, [0, 0.005, 0.995, 1]).tolist() if values.size else [0.0] * 4
    if high - low > 1.5 * (inner_high - inner_low) > 0:
        low, high = inner_low, inner_high
    low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-6:
        low, high = low - 0.5, high + 0.5
    return np.linspace(low, high, bins + 1)


def _counts(arm: str, values: np.ndarray, signs: np.ndarray, edges: np.ndarray) -> MarginCounts:
    finite = np.isfinite(values)
    counted = values[finite]
    return MarginCounts(
        arm=arm,
        n=len(values),
        counts=tuple(np.histogram(counted, edges)[0].tolist()),
        negative_counts=tuple(np.histogram(values[finite & (signs < 0)], edges)[0].tolist()),
        below=int((counted < edges[0]).sum()),
        above=int((counted > edges[-1]).sum()),
        singular=int((~finite).sum()),
        mean=float(counted.mean()) if counted.size else None,
        minimum=float(counted.min()) if counted.size else None,
        negative_fraction=float((signs < 0).mean()),
    )
