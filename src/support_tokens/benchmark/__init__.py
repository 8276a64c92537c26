"""Speed and memory beside peers, timed in one run."""

__all__ = [
    "Plan",
    "Roofline",
    "Shape",
    "Timing",
    "barrier_counts",
    "in_turn",
    "law_penalty",
    "mean_reach",
    "measure_roofline",
    "peak_memory",
    "plain_counts",
    "plan_step",
    "ratio",
    "run_suite",
    "shape_of",
    "small_gpt_task",
]

from support_tokens.benchmark.measure import Timing, in_turn, measure_roofline, peak_memory, ratio
from support_tokens.benchmark.plan import (
    Plan,
    Roofline,
    Shape,
    barrier_counts,
    mean_reach,
    plain_counts,
    plan_step,
    shape_of,
)
from support_tokens.benchmark.suites import run_suite
from support_tokens.benchmark.tasks import law_penalty, small_gpt_task
