"""Runs of an experiment as independent jobs: each arm and seed in a process of its own, continued if it is killed."""

__all__ = ["Job", "JobLost", "Shard", "jobs_of", "run_jobs"]

import multiprocessing
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from support_tokens.errors import ArgumentError, SupportTokensError
from support_tokens.robustness.lab.preset import Preset

RETRIES = 3
"""Times that a job goes on after its process was killed."""


@dataclass(frozen=True)
class Job:
    """One arm under one seed, trained in `folder`."""

    arm: str
    seed: int
    folder: Path

    @property
    def finished(self) -> bool:
        """Whether its run is finished."""
        return (self.folder / "result.json").exists()


class Shard(NamedTuple):
    """One of `count` parts of the jobs, `number` from 1 on.

    Example:
        >>> Shard.parse("2/4")
        Shard(number=2, count=4)
    """

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Reads `I/N`.

        Raises:
            ArgumentError: There is no such shard.
        """
        matched = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if matched is None or not 1 <= int(matched[1]) <= int(matched[2]):
            raise ArgumentError(f"shard must be I/N with I from 1 to N, received {text!r}; pass 1/4 ... 4/4, say.")
        return cls(int(matched[1]), int(matched[2]))


class JobLost(SupportTokensError):
    """A job failed, or its process was killed again and again."""


def jobs_of(preset: Preset, seeds: Sequence[int], trained: Path, shard: Shard | None = None) -> list[Job]:
    """The runs of an experiment, seed after seed, or every N-th of them."""
    jobs = [
        Job(arm, seed, trained / f"{re.sub(r'[^a-zA-Z0-9.+-]+', '-', arm)}-seed{seed}")
        for seed in seeds
        for arm in preset.arms
    ]
    return jobs if shard is None else jobs[shard.number - 1 :: shard.count]


def run_jobs(
    jobs: Sequence[Job],
    work: Callable[[Job], None],
    *,
    workers: int,
    watch: Callable[[Sequence[Job]], None] = lambda _: None,
) -> None:
    """Does all jobs, `workers` at a time, each in a new process.

    A process that is killed is started again and goes on from the last checkpoint of its run. A job that raises ends,
    the others are finished, and then its error is raised.

    Args:
        jobs: What to do.
        work: Does a job; a picklable function that can be called again for a job that was begun.
        workers: Processes at a time.
        watch: Called about every half second with the jobs that run.

    Raises:
        JobLost: A job failed, or its process was killed more than `RETRIES` times.
    """
    context = multiprocessing.get_context("spawn")
    waiting, killed, errors = deque(jobs), dict.fromkeys(jobs, 0), []
    running: dict[Job, tuple[BaseProcess, Connection]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.popleft()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_do, args=(work, job, theirs), name=f"{job.arm}, seed {job.seed}")
                process.start()
                theirs.close()
                running[job] = process, ours
            watch(tuple(running))
            wait([process.sentinel for process, _ in running.values()], timeout=0.5)
            for job, (process, pipe) in list(running.items()):
                if process.is_alive():
                    continue
                process.join()
                del running[job]
                message = _message(pipe)
                killed[job] += process.exitcode != 0
                if message is None and killed[job] > RETRIES:
                    message = f"its process ended {killed[job]} times, last with code {process.exitcode}; start again"
                if message is not None:
                    errors.append(f"{process.name}: {message}")
                elif process.exitcode != 0:
                    waiting.append(job)
                pipe.close()
        watch(())
    except BaseException:
        # At Ctrl-C the terminal interrupts the workers too, and each leaves a checkpoint; otherwise they are told here.
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            process.join()
        raise
    if errors:
        others = f" (and {len(errors) - 1} more failed)" if len(errors) > 1 else ""
        raise JobLost(f"{errors[0]}{others}")


def _message(pipe: Connection) -> str | None:
    """What an ended process said; None if it said nothing."""
    try:
        return pipe.recv()
    except EOFError:
        return None


def _do(work: Callable[[Job], None], job: Job, pipe: Connection) -> None:
    try:
        work(job)
    except SupportTokensError as error:
        pipe.send(str(error))
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(1) from None
