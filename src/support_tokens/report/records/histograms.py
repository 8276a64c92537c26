r"""Log margins of several arms as plain records: histograms over shared edges, and traces along a text."""

__all__ = ["ArmMargins", "Trace", "histograms", "sentence"]

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from support_tokens.errors import ArgumentError
from support_tokens.report.records.robustness import MarginCounts, MarginHistogram, MarginTrace, SentenceMargins


@dataclass(frozen=True)
class Trace:
    r"""Margins along one text.

    Args:
        tokens: The text of each token, as it was read.
        log_abs_det: $\log|\det J_t|$ of each token, in nats; minus infinity where $J_t$ is singular.
        sign: Sign of $\det J_t$ of each token.
        valid: Which tokens may be ranked; None: all. Under a strict mask the first two are not, since their margin is
            zero by structure.

    Raises:
        ArgumentError: Lengths that differ.
    """

    tokens: Sequence[str]
    log_abs_det: Sequence[float]
    sign: Sequence[int]
    valid: Sequence[bool] | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.log_abs_det), len(self.sign), len(self.valid or self.tokens)}
        if len(lengths) != 1:
            raise ArgumentError(
                f"A trace needs one log margin, sign and validity a token, but their numbers are {sorted(lengths)}."
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
        trace: Margins along a held-out sentence, or None.

    Raises:
        ArgumentError: Numbers of margins and signs that differ.
    """

    log_abs_det: Sequence[float]
    sign: Sequence[int]
    source: str = "model"
    layer: int = 0
    view: str = "noise"
    trace: Trace | None = None

    def __post_init__(self) -> None:
        if len(self.log_abs_det) != len(self.sign):
            raise ArgumentError(
                f"Margins need one sign each, but there are {len(self.log_abs_det)} margins and {len(self.sign)} signs."
            )

    @property
    def of(self) -> tuple[str, int, str]:
        """What may be compared: source, layer and view."""
        return self.source, self.layer, self.view


def histograms(arms: Mapping[str, ArmMargins | None], *, bins: int = 40) -> tuple[MarginHistogram, ...]:
    r"""One histogram for each source, layer and view, over edges that its arms share.

    Edges cover all arms' finite log margins and 0, the margin of no coupling. Where a few outliers would stretch them,
    they run from the 0.5 % to the 99.5 % quantile, and what lies outside is counted as `below` and `above`.

    Args:
        arms: Margins by arm; None or no margins: the arm is left out.
        bins: Number of bins.

    Example:
        >>> (made,) = histograms({"a": ArmMargins([0.0, 0.5, 1.0], [1, 1, -1])}, bins=2)
        >>> made.edges, made.arms[0].counts, made.arms[0].negative_share
        ((0.0, 0.5, 1.0), (1, 2), 0.3333333333333333)
    """
    made = []
    for of in dict.fromkeys(m.of for m in arms.values() if m is not None and len(m.log_abs_det)):
        of_arms = {
            name: (np.asarray(m.log_abs_det, dtype=np.float64), np.asarray(m.sign))
            for name, m in arms.items()
            if m is not None and m.of == of and len(m.log_abs_det)
        }
        pooled = np.concatenate([values[np.isfinite(values)] for values, _ in of_arms.values()])
        edges = _edges(pooled, bins)
        made.append(MarginHistogram(*of, tuple(edges.tolist()), tuple(_counts(n, *of_arms[n], edges) for n in of_arms)))
    return tuple(made)


def sentence(arms: Mapping[str, ArmMargins | None], *, support: int = 5) -> SentenceMargins | None:
    r"""The traces of the arms along a held-out text with their support tokens; None where there is none.

    Args:
        arms: Margins by arm; traces of another source, layer or view than the first are left out.
        support: How many support tokens are marked: those of the smallest log margin, the earlier one where equal.

    Example:
        >>> made = sentence({"a": ArmMargins([], [], trace=Trace("abc", [0.0, -1.0, -2.0], [1, 1, 1]))}, support=1)
        >>> made.arms[0].support
        (2,)
    """
    found = {name: m for name, m in arms.items() if m is not None and m.trace is not None}
    if not found:
        return None
    of = next(iter(found.values())).of
    return SentenceMargins(*of, tuple(_trace(n, m.trace, support) for n, m in found.items() if m.of == of and m.trace))


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
        negative_share=float((signs < 0).mean()),
    )


def _trace(arm: str, trace: Trace, support: int) -> MarginTrace:
    valid = tuple(bool(v) for v in trace.valid) if trace.valid is not None else (True,) * len(trace.tokens)
    ranked = sorted((float(m), place) for place, m in enumerate(trace.log_abs_det) if valid[place])
    return MarginTrace(
        arm=arm,
        tokens=tuple(trace.tokens),
        log_abs_det=tuple(float(m) if math.isfinite(m) else None for m in trace.log_abs_det),
        sign=tuple(int(s) for s in trace.sign),
        valid=valid,
        support=tuple(place for _, place in ranked[:support]),
    )
