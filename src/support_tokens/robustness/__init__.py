"""Robustness of language models: arms x perturbations x seeds, measured, compared and reported with intervals."""

__all__ = [
    "COUPLING_LEVELS",
    "FAMILIES",
    "PRESETS",
    "AdversarialNoise",
    "ArmDetails",
    "Batch",
    "Bootstrap",
    "Clean",
    "DomainShift",
    "EmbeddingNoise",
    "EvaluationData",
    "LazyModels",
    "Measurement",
    "Perturbation",
    "PerturbationSet",
    "Preset",
    "Quantization",
    "TokenDrop",
    "TokenizerSpelling",
    "Typos",
    "chosen_perturbations",
    "compare",
    "contests",
    "evaluate_models",
    "evaluate_robustness",
    "evaluate_runs",
    "load_preset",
    "measure",
    "measure_arms",
    "measure_structure",
    "misspell",
    "paper_rows",
    "reproduce",
    "round_channels",
    "run_experiment",
    "standard_noise",
    "standard_perturbations",
    "write_report",
]

from support_tokens.robustness.bootstrap import Bootstrap
from support_tokens.robustness.comparison import ArmDetails, compare
from support_tokens.robustness.evaluate import LazyModels, evaluate_robustness, measure_arms
from support_tokens.robustness.lab.contest import contests
from support_tokens.robustness.lab.demo import run_experiment, write_report
from support_tokens.robustness.lab.evaluate_runs import evaluate_runs
from support_tokens.robustness.lab.models import evaluate_models
from support_tokens.robustness.lab.paper import paper_rows
from support_tokens.robustness.lab.preset import PRESETS, Preset, load_preset
from support_tokens.robustness.lab.reproduction import reproduce
from support_tokens.robustness.lab.spelling import TokenizerSpelling
from support_tokens.robustness.measure import EvaluationData, Measurement, measure
from support_tokens.robustness.perturbations.adversarial import AdversarialNoise
from support_tokens.robustness.perturbations.base import Batch, Clean, Perturbation
from support_tokens.robustness.perturbations.embeddings import EmbeddingNoise, TokenDrop, standard_noise
from support_tokens.robustness.perturbations.set import (
    FAMILIES,
    PerturbationSet,
    chosen_perturbations,
    standard_perturbations,
)
from support_tokens.robustness.perturbations.text import DomainShift, Typos, misspell
from support_tokens.robustness.perturbations.weights import Quantization, round_channels
from support_tokens.robustness.structure import COUPLING_LEVELS, measure_structure
