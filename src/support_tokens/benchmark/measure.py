"""Timing in turn, peak memory from allocations, intervals of ratios."""

__all__ = ["Step", "Timing", "in_turn", "machine", "peak_memory", "ratio"]

import gc
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch

Step = Callable[[], None]


@dataclass(frozen=True)
class Timing:
    """Seconds of one arm, one figure a round; rounds of all arms are paired."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return float(np.median(self.seconds))


def in_turn(steps: dict[str, Step], *, rounds: int, device: str = "cpu", budget: float = float("inf")) -> dict:
    """Times arms in turn, A B C A B C ..., after one step of each that does not count.

    Args:
        steps: Arms, each a function that does one step.
        rounds: Times each arm runs.
        device: Where; an accelerator is waited for before and after.
        budget: Seconds after which no further round begins, once three are done.

    Returns:
        `Timing` by arm.

    Example:
        >>> sorted(in_turn({"a": lambda: None, "b": lambda: None}, rounds=3))
        ['a', 'b']
    """
    began = time.perf_counter()
    for step in steps.values():
        step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - began > budget:
            break
        for name, step in steps.items():
            gc.collect()
            _wait(device)
            start = time.perf_counter()
            step()
            _wait(device)
            found[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(seconds)) for name, seconds in found.items()}


def ratio(arm: Timing, plain: Timing, *, draws: int = 2000, seed: int = 0) -> tuple[float, float, float]:
    """Ratio of medians, with the 95 % interval of a bootstrap over paired rounds.

    Example:
        >>> ratio(Timing((2.0, 2.0, 2.0)), Timing((1.0, 1.0, 1.0)))
        (2.0, 2.0, 2.0)
    """
    a, b = np.asarray(arm.seconds), np.asarray(plain.seconds)
    index = np.random.default_rng(seed).integers(0, len(a), (draws, len(a)))
    drawn = np.median(a[index], axis=1) / np.median(b[index], axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(np.median(a) / np.median(b)), float(low), float(high)


def peak_memory(step: Step, device: str = "cpu") -> int:
    """Most bytes held during a step above those held before it, from the allocations that the profiler saw."""
    step()
    gc.collect()
    if device != "cpu":
        _wait(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        _wait(device)
        return torch.cuda.max_memory_allocated() - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events: list = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def machine(device: str = "cpu") -> dict:
    """What figures depend on: processor, threads, versions; no name of a host, no path."""
    name = platform.processor() or platform.machine()
    if device != "cpu":
        name = torch.cuda.get_device_name()
    versions = {package: version(package) for package in ("torch", "transformers", "support-tokens")}
    return {
        "device": name,
        "architecture": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        **versions,
    }


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
