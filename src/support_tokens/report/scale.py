r"""One scale for all pages: seven bands of one hue that differ in lightness, told apart without colour vision too.

Every view asks here for the band of a figure; pages get bands and limits as data and compute none themselves.
"""

__all__ = ["ALPHAS", "BANDS", "DIVERGING_ALPHAS", "band", "band_css", "diverging_band", "limits_of", "spread_of"]

import math
from collections.abc import Iterable, Sequence

BANDS = 7
"""Bands of a scale: 0 is the strong end (the largest margin), the last the weak one (the smallest)."""

ALPHAS = (0.03, 0.12, 0.22, 0.33, 0.45, 0.58, 0.72)
"""Opacity of the weak colour in each band."""

DIVERGING_ALPHAS = (0.62, 0.4, 0.2, 0.0, 0.2, 0.42, 0.68)
"""Opacity in each band of a scale of changes: the strong colour in the first three, the weak one in the last three."""

Limits = tuple[float, float]
"""Ends of a scale, strong and weak."""


def limits_of(values: Iterable[float], *, weak_is_high: bool = False) -> Limits:
    """Ends of the scale of some figures: their 98 % and 2 % quantiles, so that one outlier does not flatten the rest.

    Args:
        values: Figures; infinite ones are left out.
        weak_is_high: Whether a large figure is the weak one, as for surprisal.

    Example:
        >>> limits_of([0.0, 1.0, 2.0]), limits_of([0.0, 1.0, 2.0], weak_is_high=True), limits_of([])
        ((1.96, 0.04), (0.04, 1.96), (0.0, 0.0))
    """
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return 0.0, 0.0
    high, low = _quantile(ordered, 0.98), _quantile(ordered, 0.02)
    return (low, high) if weak_is_high else (high, low)


def band(value: float, limits: Limits) -> int:
    """The band of a figure between the strong and the weak end of a scale.

    Example:
        >>> [band(value, (1.0, 0.0)) for value in (2.0, 0.5, -1.0)], band(0.75, (0.0, 1.0)), band(1.0, (1.0, 1.0))
        ([0, 3, 6], 5, 0)
    """
    strong, weak = limits
    if strong == weak:
        return BANDS - 1 if value == -math.inf else 0
    place = (strong - value) / (strong - weak)
    return min(BANDS - 1, int(BANDS * max(0.0, min(1.0, place))))


def spread_of(changes: Iterable[float]) -> float:
    """The end of a scale of changes: the 98 % quantile of their sizes.

    Example:
        >>> spread_of([0.5, -1.0]), spread_of([])
        (0.99, 0.0)
    """
    ordered = sorted(abs(value) for value in changes if math.isfinite(value))
    return _quantile(ordered, 0.98) if ordered else 0.0


def diverging_band(change: float, end: float, floor: float = 0.0) -> int:
    """The band of a change: 3 where it is within `floor`, 2 to 0 as it grows, 4 to 6 as it shrinks, up to `end`.

    Example:
        >>> [diverging_band(change, 3.0, 0.1) for change in (5.0, 1.5, 0.2, 0.1, -0.2, -5.0)]
        [0, 1, 2, 3, 4, 6]
    """
    if abs(change) <= floor or end <= floor:
        return BANDS // 2
    step = 1 + min(2, int(3 * (min(abs(change), end) - floor) / (end - floor)))
    return BANDS // 2 - step if change > 0 else BANDS // 2 + step


def band_css() -> str:
    """Style of the bands: classes `m0` to `m6`, and `d0` to `d6` for changes, of colours `--weak` and `--strong`."""
    rules = [f".m{i}{{background:rgba(var(--weak),{alpha:g})}}" for i, alpha in enumerate(ALPHAS)]
    rules += [
        f".d{i}{{background:rgba(var(--{'strong' if i < BANDS // 2 else 'weak'}),{alpha:g})}}"
        for i, alpha in enumerate(DIVERGING_ALPHAS)
    ]
    return "".join(rules)


def _quantile(ordered: Sequence[float], level: float) -> float:
    place = level * (len(ordered) - 1)
    left = int(place)
    right = min(left + 1, len(ordered) - 1)
    return ordered[left] + (place - left) * (ordered[right] - ordered[left])
