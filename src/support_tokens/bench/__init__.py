"""Speed and memory: steps timed in turn beside their peers, and plans past this machine from counted operations."""

__all__ = ["BenchRecord", "Ceilings", "Plan", "Shape", "measure_ceilings", "plan_step", "run_suite", "shape_of"]

from support_tokens.bench.measure import measure_ceilings
from support_tokens.bench.plan import Ceilings, Plan, Shape, plan_step, shape_of
from support_tokens.bench.record import BenchRecord
from support_tokens.bench.suites import run_suite
