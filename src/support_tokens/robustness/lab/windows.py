"""What evaluations of runs and of models share: windows of held-out text, and a progress bar."""

__all__ = ["held_out_windows", "progress_bar", "say_expected"]

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from support_tokens.robustness.evaluate import Progress
from support_tokens.training import Windows


def held_out_windows(ids: Tensor, context: int, sequences: int) -> Tensor:
    """At most `sequences` windows of a text, `(N, context)`, spread evenly over it.

    Args:
        ids: Token ids of the text.
        context: Tokens of a window.
        sequences: Largest number of windows.
    """
    return torch.stack([window["input_ids"] for window in Windows(ids, context, limit=sequences)])  # type: ignore[attr-defined]


@contextmanager
def progress_bar(*, enabled: bool) -> Iterator[Progress]:
    """A bar on stderr with the time that is left."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), disable=not enabled) as bar:
        task = bar.add_task("evaluation", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def say_expected(seconds: float) -> None:
    """Prints on stderr how long an evaluation will take."""
    minutes = seconds / 60
    time = f"{minutes:.0f} minutes" if minutes >= 1.5 else f"{max(1, round(seconds))} seconds"
    print(f"evaluation: expected time about {time}; --sequences and --sigma shorten it.", file=sys.stderr)
