"""Suites of benchmarks, each one record: steps of ours and of peers in turn, targets, growth."""

__all__ = ["SUITES", "run_suite"]

import math
from collections.abc import Callable
from contextlib import ExitStack

import torch

from support_tokens.benchmark import peers
from support_tokens.benchmark.generation import generation_steps
from support_tokens.benchmark.measure import Step, Timing, in_turn, machine, peak_memory, ratio
from support_tokens.benchmark.tasks import (
    barrier_step,
    law_penalty,
    model_penalty,
    peer_step,
    small_gpt_task,
    smollm2_task,
)
from support_tokens.errors import ArgumentError
from support_tokens.law import EmbeddingPrior
from support_tokens.margins import state_margins
from support_tokens.models import capture_attention, checked_device
from support_tokens.report.records import BenchmarkArm, BenchRecord, Check

SUITES = ("targets", "peers", "smoke", "generate")
"""`targets`: all of the targets and peers, in minutes; `peers`: SmallGPT only; `smoke`: all of it on toy sizes;
`generate`: generation with margins beside plain generation."""


def run_suite(
    suite: str, *, rounds: int = 7, device: str = "cpu", log: Callable[[str], None] = lambda _: None
) -> BenchRecord:
    """Runs a suite.

    Args:
        suite: One of `SUITES`.
        rounds: Times each arm runs; slow groups take fewer.
        device: `cpu`, or an accelerator that torch names.
        log: Told what begins.

    Raises:
        ArgumentError: The suite is unknown, or the device cannot be used here.
    """
    if suite not in SUITES:
        raise ArgumentError(f"suite must be one of {', '.join(SUITES)}, received {suite!r}; choose one of them.")
    checked_device(device)
    run = _Run(rounds, device, log)
    if suite == "generate":
        run.generation(length=64, tokens=32)
        return BenchRecord(suite, machine(device), tuple(run.arms), tuple(run.checks))
    toy = suite == "smoke"
    run.small_gpt(batch=2 if toy else 16, length=32 if toy else 256)
    run.against_autograd(length=12 if toy else 128)
    if suite != "peers":
        run.smollm2(length=32 if toy else 512)
        run.growth((16, 32) if toy else (128, 256, 512, 1024))
    return BenchRecord(suite, machine(device), tuple(run.arms), tuple(run.checks))


class _Run:
    """One run of a suite and what it has found so far."""

    def __init__(self, rounds: int, device: str, log: Callable[[str], None]) -> None:
        self.rounds, self.device, self.log = rounds, device, log
        self.arms: list[BenchmarkArm] = []
        self.checks: list[Check] = []

    def timed(
        self, group: str, steps: dict[str, Step], *, rounds: int | None = None, memory: bool = False
    ) -> dict[str, BenchmarkArm]:
        """Times steps in turn; the first is what the others are compared with."""
        self.log(group)
        times = in_turn(steps, rounds=rounds or self.rounds, device=self.device)
        peaks = {name: peak_memory(step, self.device) if memory else None for name, step in steps.items()}
        first = next(iter(steps))
        found = {name: _arm(group, name, times, peaks, first) for name in steps}
        self.arms += found.values()
        return found

    def check(self, name: str, measured: float, most: float) -> None:
        """Holds a figure to the most it may be."""
        self.checks.append(Check(name, measured, f"at most {most:g}", measured <= most))

    def small_gpt(self, batch: int, length: int) -> None:
        """SmallGPT: ours and the peers, one step each in turn."""
        some = min(64, length)
        plain = small_gpt_task(batch, length, device=self.device)
        with ExitStack() as stack:
            steps: dict[str, Step] = {"plain": peer_step(plain)}
            for name, options in {
                "prior, all positions": {"source": "prior"},
                f"prior, {some} positions": {"source": "prior", "positions": some},
                f"prior, {some} candidates": {"source": "prior", "positions": "support", "candidates": some},
                "model, all positions": {"source": "model"},
                f"model, {some} positions": {"source": "model", "positions": some},
            }.items():
                task = small_gpt_task(batch, length, device=self.device)
                steps[name] = stack.enter_context(barrier_step(task, **options))
            with_dropout = small_gpt_task(batch, length, dropout=0.1, device=self.device)
            steps["R-Drop"] = peer_step(with_dropout, peers.r_drop)
            steps["SMART, one inner step"] = peer_step(small_gpt_task(batch, length, device=self.device), peers.smart)
            noisy = small_gpt_task(batch, length, device=self.device)
            stack.enter_context(peers.neftune(noisy.model))
            steps["NEFTune"] = peer_step(noisy)
            steps["Jacobian regularisation, one projection"] = peer_step(
                small_gpt_task(batch, length, device=self.device), peers.jacobian_regularised
            )
            found = self.timed("SmallGPT step", steps, memory=True)
        ours = found["prior, all positions"]
        self.check("SmallGPT, prior of rank 32, all positions: time", ours.ratio, 1.15)
        self.check("SmallGPT, prior of rank 32, all positions: peak memory", ours.memory_ratio or math.inf, 1.10)

    def against_autograd(self, length: int) -> None:
        """The law's penalty and gradient: ours, and the two ways that autograd offers, at the same work."""
        generator = torch.Generator().manual_seed(0)
        law = EmbeddingPrior(128, 32, generator=generator).to(self.device)
        x = torch.randn(1, length, 128, generator=generator).to(self.device).requires_grad_()

        def by(penalty: Callable) -> Step:
            return lambda: penalty(law, x).backward()

        steps = {
            "ours": law_penalty(1, length, device=self.device),
            "dense covariance by autograd": by(peers.dense_covariance_penalty),
            "autograd Jacobian": by(peers.naive_jacobian_penalty),
        }
        found = self.timed("penalty of one sequence", steps, rounds=3)
        name = f"autograd Jacobian over ours, {length} positions, D = 128 (wanted: at least 100)"
        measured = found["autograd Jacobian"].ratio
        self.checks.append(Check(name, measured, "at least 100", measured >= 100))

    def smollm2(self, length: int) -> None:
        """The shape of SmolLM2-135M: the barrier on its own first layer, and the margins of one layer."""
        task = smollm2_task(2, length, device=self.device)
        many, few = min(64, length), min(16, length)
        optimiser = task.optimiser()
        plain = peer_step(task, optimiser=optimiser)

        def attached(positions: int) -> Step:
            # One model for all arms, as two more would not fit everywhere: the barrier is on it for its own step only.
            def step() -> None:
                with barrier_step(task, optimiser, source="model", positions=positions) as inner:
                    inner()

            return step

        steps = {"plain": plain, f"model, {many} positions": attached(many), f"model, {few} positions": attached(few)}
        found = self.timed("SmolLM2-135M step", steps, rounds=min(5, self.rounds), memory=True)
        for count, most in ((many, 1.10), (few, 1.03)):
            arm = found[f"model, {count} positions"]
            self.check(f"SmolLM2-135M shape, {count} positions: time", arm.ratio, most)
            self.check(f"SmolLM2-135M shape, {count} positions: peak memory", arm.memory_ratio or math.inf, 1.05)
        optimiser.zero_grad()
        self.timed("SmolLM2-135M penalty by itself", {"ours": model_penalty(task, many)}, rounds=3)
        self._analysis(task.model.eval(), task.ids[:1])

    @torch.no_grad()
    def _analysis(self, model, ids: torch.Tensor) -> None:
        with capture_attention(model, layers=(0,)) as captured:
            model(ids)
        state = captured.states()[0]
        steps = {"forward pass": lambda: model(ids), "margins of one layer": lambda: state_margins(state)}
        found = self.timed("SmolLM2-135M, one sequence, every token exact", steps, rounds=3)
        self.check("margins of one layer, in forward passes", found["margins of one layer"].ratio, 3.0)

    def generation(self, length: int, tokens: int) -> None:
        """The shape of SmolLM2-135M: a greedy text with the uncertainty of each token, beside the text alone."""
        steps = generation_steps(length, tokens, device=self.device)
        found = self.timed(f"SmolLM2-135M, {tokens} tokens after {length}", steps)
        ours = found["and the margin of one layer"]
        self.check("SmolLM2-135M shape, generation with the margin of one layer: time", ours.ratio, 1.10)

    def growth(self, lengths: tuple[int, ...]) -> None:
        """The law's penalty by length, batch and number of positions."""
        steps = {f"T = {length}": law_penalty(2, length, device=self.device) for length in lengths}
        arms = list(self.timed("growth in length", steps, rounds=5).values())
        self.check("growth in length: exponent", _exponent(lengths, arms), 2.1)
        length = lengths[1]
        batches = (2, 4, 8)
        arms = list(
            self.timed(
                "growth in batch", {f"B = {b}": law_penalty(b, length, device=self.device) for b in batches}
            ).values()
        )
        self.check("growth in batch: exponent", _exponent(batches, arms), 1.1)
        counts = tuple(length // k for k in (4, 2, 1))
        steps = {f"n = {n}": law_penalty(4, length, positions=n, device=self.device) for n in counts}
        self.check(
            "growth in positions: exponent",
            _exponent(counts, list(self.timed("growth in positions", steps).values())),
            1.1,
        )


def _arm(group: str, name: str, times: dict[str, Timing], peaks: dict[str, int | None], first: str) -> BenchmarkArm:
    middle, low, high = ratio(times[name], times[first])
    peak, base = peaks[name], peaks[first]
    memory = None if not peak or not base else peak / base
    return BenchmarkArm(group, name, times[name].seconds, middle, low, high, peak, memory)


def _exponent(sizes: tuple[int, ...], arms: list[BenchmarkArm]) -> float:
    """Slope of log time in log size, by least squares."""
    x = torch.tensor([math.log(size) for size in sizes])
    y = torch.tensor([math.log(Timing(arm.seconds).median) for arm in arms])
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
