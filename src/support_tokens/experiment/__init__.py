r"""Experiments from end to end: trained runs or any models -> frozen perturbations -> report; and the demo, which
trains them first."""

__all__ = ["TrainedRun", "evaluate_models", "evaluate_runs", "open_run", "run_experiment", "write_report"]

from support_tokens.experiment.demo import run_experiment, write_report
from support_tokens.experiment.evaluation import evaluate_runs
from support_tokens.experiment.models import evaluate_models
from support_tokens.experiment.runs import TrainedRun, open_run
