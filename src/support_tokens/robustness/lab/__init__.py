"""The laboratory: an experiment as a preset, resumed run by run, and its figures beside those of the paper."""

__all__ = [
    "PRESETS",
    "Preset",
    "TokenizerSpelling",
    "contests",
    "evaluate_models",
    "evaluate_runs",
    "load_preset",
    "paper_rows",
    "reproduce",
    "run_experiment",
    "write_report",
]

from support_tokens.robustness.lab.contest import contests
from support_tokens.robustness.lab.demo import run_experiment, write_report
from support_tokens.robustness.lab.evaluate_runs import evaluate_runs
from support_tokens.robustness.lab.models import evaluate_models
from support_tokens.robustness.lab.paper import paper_rows
from support_tokens.robustness.lab.preset import PRESETS, Preset, load_preset
from support_tokens.robustness.lab.reproduction import reproduce
from support_tokens.robustness.lab.spelling import TokenizerSpelling
