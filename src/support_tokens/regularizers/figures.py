"""What one optimiser step logged, however many micro-batches it was split into."""

__all__ = ["StepFigures", "averaged"]

from collections.abc import Mapping

import torch
from torch import Tensor

Key = tuple[str, str]
"""Name of a term's place (empty: of the whole loss) and of a figure."""


class StepFigures:
    r"""Figures of an optimiser step, summed without waiting for the device.

    $\mathrm{ce} + \sum_i w_i\, \mathrm{penalty}_i = \mathrm{total}$ holds for every split. Losses that are parts of a
    sum over the items of the whole batch add up; losses that are means are averaged. Figures of tokens are averaged
    over tokens, and of names that end in `_min` the smallest counts. A compiled model keeps the last micro-batch alone.

    Example:
        >>> figures = StepFigures()
        >>> for ce in (1.0, 3.0, 5.0):
        ...     if ce > 1:
        ...         figures.begin(split=False)
        ...         figures.add(("", "ce"), torch.tensor(ce))
        ...     else:
        ...         figures.close()
        >>> figures.read("")
        {'ce': 4.0}
    """

    def __init__(self) -> None:
        self.parts = 0
        self._closed, self._stepped, self._split = True, False, False
        self._step, self._loss = _FigureSums(), _FigureSums()

    def begin(self, *, split: bool) -> None:
        """One more micro-batch; the first of a step forgets the step before.

        Args:
            split: Its losses are parts of a sum over the items of the whole batch.
        """
        self._split, self._loss = split, _FigureSums()
        if self._closed or torch.compiler.is_compiling():
            self.parts, self._step, self._closed = 0, _FigureSums(), False
        if not torch.compiler.is_compiling():
            self.parts += 1

    def add(self, key: Key, value: Tensor, count: Tensor | None = None) -> None:
        """One figure of this micro-batch.

        Args:
            key: Whose figure, and its name.
            value: A scalar.
            count: Tokens that it is a mean over; None: it is a loss.
        """
        for sums in (self._step, self._loss):
            sums.add(key, value.detach(), None if count is None else count.detach(), self._split)

    def set(self, key: Key, value: Tensor | float) -> None:
        """A figure of which the last one counts, such as a weight."""
        for sums in (self._step, self._loss):
            sums.values[key] = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
            sums.counts[key] = 1

    def close(self) -> None:
        """The step is done; its figures stay until the next one begins."""
        self._closed = self._stepped = True

    def read(self, place: str) -> dict[str, float]:
        """The figures of one place, of the last loss alone before a step was seen; waits for the device."""
        sums = self._step if self._stepped else self._loss
        return {
            name: float(value) / max(1.0, float(sums.counts[whose, name]))
            for (whose, name), value in sums.values.items()
            if whose == place
        }

    def drop(self, place: str) -> None:
        """Forget the figures of one place."""
        for sums in (self._step, self._loss):
            for key in [key for key in sums.values if key[0] == place]:
                del sums.values[key], sums.counts[key]


class _FigureSums:
    """Sums of figures and what they are divided by."""

    def __init__(self) -> None:
        self.values: dict[Key, Tensor] = {}
        self.counts: dict[Key, Tensor | int] = {}

    def add(self, key: Key, value: Tensor, count: Tensor | None, split: bool) -> None:
        before, counted = self.values.get(key), self.counts.get(key)
        if key[1].endswith("_min"):
            self.values[key] = value if before is None else torch.minimum(before, value.to(before))
            self.counts[key] = 1
            return
        share = value if count is None else value * count
        self.values[key] = share if before is None else before + share.to(before)
        if count is None:
            self.counts[key] = 1 if split or counted is None else counted + 1
        else:
            self.counts[key] = count if counted is None else counted + count


def averaged(figures: Mapping[str, float], *, summed: bool) -> dict[str, float]:
    """Figures of all processes of training, on every process.

    Args:
        figures: Those of this process, the same names on all.
        summed: Losses are parts of a sum over the items of all processes.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or not figures:
        return dict(figures)
    gathered: list[dict[str, float]] = [{} for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(gathered, dict(figures))
    joined = {}
    for name in figures:
        values = [each[name] for each in gathered if name in each]
        loss = name.rpartition(".")[2] in ("ce", "total", "penalty")
        if name.endswith("_min"):
            joined[name] = min(values)
        else:
            joined[name] = sum(values) / (1 if loss and summed else len(values))
    return joined
