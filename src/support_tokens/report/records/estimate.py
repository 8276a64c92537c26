"""A figure with its interval."""

__all__ = ["Estimate"]

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    r"""A figure with its interval.

    Args:
        value: The figure on the whole sample.
        low: Lower end of the interval, None where no interval can be given (a single sequence).
        high: Upper end of the interval, None likewise.

    Example:
        >>> Estimate(0.3, 0.1, 0.5).excludes(0.0), Estimate(0.3, -0.1, 0.7).excludes(0.0), Estimate(0.3).excludes(0.0)
        (True, False, False)
    """

    value: float
    low: float | None = None
    high: float | None = None

    def excludes(self, value: float) -> bool:
        """Whether there is an interval and `value` lies outside of it; without an interval nothing is excluded."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high

    def __neg__(self) -> "Estimate":
        if self.low is None or self.high is None:
            return Estimate(-self.value)
        return Estimate(-self.value, -self.high, -self.low)
