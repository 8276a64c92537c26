r"""The predicted cost of the barrier on a model or machine that is not here: counted operations over measured rates.

`python benchmarks/plan.py 8b --length 8192 --positions 16` prints a prediction. `python benchmarks/plan.py --check
RECORD.json` adds to the record of `support-tokens bench --suite targets`, just measured on this machine, what the plan
predicts for the same steps.
"""

__all__ = ["Plan", "Roofline", "measure_roofline", "plan_step", "predictions"]

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from counts import SHAPES, Counts, Shape, barrier_counts, plain_counts, shape_of

from support_tokens.errors import ArgumentError, SupportTokensError
from support_tokens.margins.linalg import slogdet_and_inverse
from support_tokens.models import checked_device
from support_tokens.report.records import BenchRecord, Prediction


@dataclass(frozen=True)
class Roofline:
    """Rates that a machine reaches, measured or given.

    Args:
        product: Operations a second of matrix products of the step.
        elimination: Side of matrices to operations a second of elimination.
        memory: Bytes a second.
    """

    product: float
    elimination: dict[int, float]
    memory: float

    def rate(self, side: int) -> float:
        """Operations a second of elimination at a side: between measured sides by interpolation of logarithms, outside
        of them the nearest.

        Example:
            >>> Roofline(1e9, {10: 1e8, 1000: 1e10}, 1e9).rate(100)
            1000000000.0
        """
        known = sorted(self.elimination)
        if side <= known[0] or side >= known[-1]:
            return self.elimination[known[0] if side <= known[0] else known[-1]]
        upper = next(k for k in known if k >= side)
        lower = known[known.index(upper) - 1]
        share = math.log(side / lower) / math.log(upper / lower)
        return round(self.elimination[lower] ** (1 - share) * self.elimination[upper] ** share, 3)

    def seconds(self, counts: Counts) -> float:
        """Time of some work: products, eliminations and passes over memory one after the other."""
        spent = counts.product / self.product + counts.moved / self.memory
        return spent + (counts.elimination / self.rate(counts.side) if counts.side else 0.0)


@dataclass(frozen=True)
class Plan:
    """A predicted step with and without the barrier, on each of N devices that share the batch.

    Args:
        plain: Work of the plain step.
        barrier: Work that the barrier adds.
        plain_seconds: Its predicted time.
        barrier_seconds: Predicted time that the barrier adds.
    """

    plain: Counts
    barrier: Counts
    plain_seconds: float
    barrier_seconds: float

    @property
    def time_ratio(self) -> float:
        """Step with the barrier over the plain one."""
        return 1 + self.barrier_seconds / self.plain_seconds

    @property
    def memory_ratio(self) -> float:
        """Peak above weights and optimiser with the barrier over the plain one."""
        return 1 + self.barrier.memory / self.plain.memory


def plan_step(
    shape: Shape,
    roofline: Roofline,
    *,
    batch: int,
    length: int,
    source: str = "model",
    positions: int | None = None,
    rank: int = 32,
    devices: int = 1,
    item: int = 4,
) -> Plan:
    """Predicts a training step with the barrier of one layer.

    Args:
        shape: The model.
        roofline: Rates of one device.
        batch: B over all devices.
        length: T.
        source: `model` or `prior`.
        positions: n of each sequence; None: all.
        rank: R of the law.
        devices: N; sequences, or positions where there are fewer sequences, are shared evenly.
        item: Bytes of a number in the plain step; the barrier computes in 4.

    Example:
        >>> rates = Roofline(1e14, {32: 1e12, 4096: 2e13}, 2e12)
        >>> plan = plan_step(shape_of("8b"), rates, batch=8, length=8192, positions=16, devices=8)
        >>> plan.time_ratio > 1
        True
    """
    if devices < 1 or batch < 1 or length < 1:
        raise ArgumentError(f"devices, batch and length must be at least 1, received {devices}, {batch} and {length}.")
    plain = _shared(plain_counts(shape, batch, length, item=item), devices)
    added = _shared(
        barrier_counts(shape, batch, length, source=source, positions=positions, rank=rank), min(devices, batch)
    )
    return Plan(plain, added, roofline.seconds(plain), roofline.seconds(added))


def _shared(counts: Counts, devices: int) -> Counts:
    return Counts(
        counts.product / devices,
        counts.elimination / devices,
        counts.side,
        counts.moved / devices,
        counts.memory / devices,
    )


def measure_roofline(device: str = "cpu", *, sides: tuple[int, ...] = (32, 128, 576)) -> Roofline:
    """Rates of this machine: products of the size of a feed-forward layer, eliminations of some sides, a long copy."""
    a, b = torch.randn(1024, 576, device=device), torch.randn(576, 1536, device=device)
    product = 2 * 1024 * 576 * 1536 / _best(lambda: a @ b, device)
    rates = {}
    for side in sides:
        count = max(4, min(1024, 2**22 // side**2))
        noise = torch.randn(count, side, side, device=device, generator=_seeded(device))
        matrix = torch.eye(side, device=device) + 0.3 * noise / side**0.5
        rates[side] = 2 * count * side**3 / _best(lambda m=matrix: slogdet_and_inverse(m), device)
    source, target = torch.randn(2**25, device=device), torch.empty(2**25, device=device)
    moved = 2 * 4 * 2**25 / _best(lambda: target.copy_(source), device)
    return Roofline(product, rates, moved)


def _best(run: Callable[[], object], device: str, times: int = 7) -> float:
    run()
    found = []
    for _ in range(times):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _seeded(device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def predictions(record: BenchRecord, roofline: Roofline) -> tuple[Prediction, ...]:
    """What the plan says of the steps of the suite `targets`, beside what its record measured.

    Args:
        record: Of that suite.
        roofline: Rates of the machine that made the record.

    Raises:
        ArgumentError: The record is of another suite.
    """
    if record.suite != "targets":
        raise ArgumentError(f"the record must be of the suite 'targets', received {record.suite!r}; run that suite.")
    small, large = SHAPES["small-gpt"], SHAPES["smollm2-135m"]
    law, own = barrier_counts(small, 16, 256, source="prior"), barrier_counts(large, 2, 512, positions=64)
    prior_alone = barrier_counts(small, 8, 256, source="prior")
    steps = [
        ("SmallGPT plain step, s", ("SmallGPT step", "plain"), (plain_counts(small, 16, 256),)),
        (
            "SmallGPT step with the law, s",
            ("SmallGPT step", "prior, all positions"),
            (plain_counts(small, 16, 256), law),
        ),
        ("SmolLM2-135M plain step, s", ("SmolLM2-135M step", "plain"), (plain_counts(large, 2, 512),)),
        (
            "SmolLM2-135M step with 64 positions, s",
            ("SmolLM2-135M step", "model, 64 positions"),
            (plain_counts(large, 2, 512), own),
        ),
        ("SmolLM2-135M penalty of 64 positions by itself, s", ("SmolLM2-135M penalty by itself", "ours"), (own,)),
        ("penalty of the law by itself, 8 sequences, s", ("growth in batch", "B = 8"), (prior_alone,)),
    ]
    measured = {(arm.group, arm.name): statistics.median(arm.seconds) for arm in record.arms}
    return tuple(Prediction(name, sum(map(roofline.seconds, counts)), measured[place]) for name, place, counts in steps)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a plan, or adds predictions to a record."""
    parser = argparse.ArgumentParser(description="Predict the cost of the barrier for a model that is not here.")
    parser.add_argument("model", nargs="?", default="8b", help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument("--check", metavar="RECORD", help="add predictions to a record of the suite 'targets'")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences over all devices")
    parser.add_argument("--positions", type=int, help="positions of each sequence; all if left out")
    parser.add_argument("--source", default="model", help="model or prior")
    parser.add_argument("--devices", type=int, default=1, help="devices that share the batch")
    parser.add_argument("--device", default="cpu", help="where rates are measured, as torch names it")
    for name, what in (("product", "matrix products"), ("elimination", "float32 elimination")):
        parser.add_argument(f"--{name}", type=float, help=f"teraflop/s of {what} there; measured here if left out")
    parser.add_argument("--memory", type=float, help="gigabytes/s there")
    given = parser.parse_args(arguments)
    try:
        checked_device(given.device)
        if given.check is not None:
            record = BenchRecord.from_json(given.check)
            predicted = predictions(record, measure_roofline(given.device))
            dataclasses.replace(record, predictions=predicted).to_json(given.check)
            for p in predicted:
                print(f"{p.name}: predicted {p.predicted:.3g}, measured {p.measured:.3g}, error {100 * p.error:+.0f} %")
            return
        shape = shape_of(given.model)
        _print(_plan(shape, given), given)
    except SupportTokensError as error:
        sys.exit(f"error: {error}")


def _plan(shape: Shape, given: argparse.Namespace) -> Plan:
    rates = (given.product, given.elimination, given.memory)
    if all(rate is None for rate in rates):
        roofline = measure_roofline(given.device)
    elif all(rate is not None and rate > 0 for rate in rates):
        roofline = Roofline(given.product * 1e12, {shape.side: given.elimination * 1e12}, given.memory * 1e9)
    else:
        raise ArgumentError("--product, --elimination and --memory are required together; pass three rates above 0.")
    sizes = {name: getattr(given, name) for name in ("batch", "length", "source", "positions", "devices")}
    return plan_step(shape, roofline, **sizes)


def _print(plan: Plan, given: argparse.Namespace) -> None:
    for name, counts, seconds in (
        ("plain step", plan.plain, plan.plain_seconds),
        ("barrier", plan.barrier, plan.barrier_seconds),
    ):
        print(
            f"{name:<11} {counts.product:.3g} operations in products, {counts.elimination:.3g} in eliminations of side "
            f"{counts.side}, {counts.moved:.3g} bytes moved, {counts.memory / 1e9:.3g} GB held: {seconds:.3g} s"
        )
    origin = "rates measured on this machine" if given.product is None else "given rates"
    print(
        f"time x {plan.time_ratio:.3f}, memory x {plan.memory_ratio:.3f} on each of {given.devices} devices; predicted "
        f"from {origin}, not measured"
    )


if __name__ == "__main__":
    main()
