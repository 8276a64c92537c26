"""What an experiment is doing: runs that are finished, that run and that are left, and when it will end."""

__all__ = ["JobTable"]

import json
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from rich.console import Console
from rich.live import Live
from rich.table import Table

from support_tokens.robustness.lab.jobs import Job


class JobTable:
    """A table on stderr, redrawn in a terminal; elsewhere one line whenever a run begins or ends.

    Args:
        jobs: All runs.
        steps: Steps of each.
        enabled: Whether anything is shown.
        console: Where; stderr if None.
        clock: Seconds.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        steps: int,
        *,
        enabled: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs, self._steps, self._enabled, self._clock = jobs, steps, enabled, clock
        self._console = Console(stderr=True) if console is None else console
        self._begun_at, self._begun_steps = clock(), self._steps_done()
        self._last = ""
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> "JobTable":
        if self._enabled and self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._live.stop()

    def show(self, running: Sequence[Job]) -> None:
        """Draws the present state.

        Args:
            running: The jobs that run in this process or its children.
        """
        if not self._enabled:
            return
        if self._console.is_terminal:
            self._live.update(self.table(running), refresh=True)
            return
        names = ", ".join(f"{job.arm} (seed {job.seed})" for job in running) or "nothing"
        counts = self._counts(running)
        if (line := f"{counts}, running: {names}") != self._last:
            self._last = line
            self._console.print(
                f"{line}; expected end {self.expected_end()}", highlight=False, markup=False, soft_wrap=True
            )

    def table(self, running: Sequence[Job]) -> Table:
        """One row for each running job with its step; the caption counts the others."""
        table = Table("running", "seed", "step", caption=f"{self._counts(running)}; expected end {self.expected_end()}")
        for job in running:
            table.add_row(job.arm, str(job.seed), f"{_step(job)} of {self._steps}")
        return table

    def expected_end(self) -> str:
        """Clock time at the rate of steps since the start; `unknown` before the first step."""
        done = self._steps_done()
        made = done - self._begun_steps
        if made <= 0:
            return "unknown"
        left = len(self._jobs) * self._steps - done
        seconds = (self._clock() - self._begun_at) * left / made
        return f"{datetime.now() + timedelta(seconds=seconds):%d %b %H:%M}"

    def _counts(self, running: Sequence[Job]) -> str:
        finished = sum(job.finished for job in self._jobs)
        left = sum(not job.finished and job not in running for job in self._jobs)
        return f"{finished} of {len(self._jobs)} runs finished, {left} left"

    def _steps_done(self) -> int:
        return sum(self._steps if job.finished else _step(job) for job in self._jobs)


def _step(job: Job) -> int:
    """The last step that a run has logged."""
    try:
        lines = (job.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return int(json.loads(lines[-1])["step"])
    except (OSError, ValueError, LookupError):  # not begun, or a line that is being written
        return 0
