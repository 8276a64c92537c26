r"""Colours of margins: steps of one hue that differ in lightness, told apart without colour vision too."""

__all__ = ["BANDS", "band", "limits_of"]

from collections.abc import Iterable, Sequence

BANDS = 7
"""Steps of the scale: 0 is the largest margin, the last the smallest."""


def limits_of(values: Iterable[float]) -> tuple[float, float]:
    """Ends of the scale, largest first: the 2 % and 98 % quantiles, so that one outlier does not flatten the rest.

    Example:
        >>> limits_of([0.0, 1.0, 2.0])
        (1.96, 0.04)
    """
    ordered = sorted(values)
    if not ordered:
        return 0.0, 0.0
    return _quantile(ordered, 0.98), _quantile(ordered, 0.02)


def band(value: float, limits: tuple[float, float]) -> int:
    """The step of a value between two limits, largest first.

    Example:
        >>> [band(value, (1.0, 0.0)) for value in (2.0, 0.5, -1.0)], band(1.0, (1.0, 1.0))
        ([0, 3, 6], 0)
    """
    high, low = limits
    if high <= low:
        return 0
    return min(BANDS - 1, max(0, int(BANDS * (high - value) / (high - low))))


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    left = int(place)
    right = min(left + 1, len(ordered) - 1)
    return ordered[left] + (place - left) * (ordered[right] - ordered[left])
