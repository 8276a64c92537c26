"""Speed and memory of the barrier beside baselines, timed in one run."""

__all__ = [
    "SUITES",
    "Timing",
    "in_turn",
    "law_penalty",
    "peak_memory",
    "ratio",
    "run_suite",
    "small_gpt_task",
]

from support_tokens.benchmark.measure import Timing, in_turn, peak_memory, ratio
from support_tokens.benchmark.suites import SUITES, run_suite
from support_tokens.benchmark.tasks import law_penalty, small_gpt_task
