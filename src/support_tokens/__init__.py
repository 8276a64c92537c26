"""Support tokens: stability margins of causal self-attention.

tokens -> embeddings -> attention state -> covariance -> Jacobian block -> log|det| -> margins -> barrier -> objective
-> training -> robustness -> report. A module imports only what stands above it:

    errors         errors and warnings
    devices        the device that a user names, checked before use
    attention      AttentionState: the contract between any model and the mathematics
    moments        causal weights, mean and (value, key) covariance
    lapack         functions of LU factorisations, right for batches too
    inverse        sign, log|det| and inverse of many matrices in one elimination
    logdet         sign and log|det| with a gradient that is safe at the boundary
    assembly       blocks as sums of few products, and what is made of them
    jacobian       diagonal Jacobian blocks, dense or reduced
    margins        Margins, attention_slogdet, attention_margins
    fused          a penalty and its gradient in one pass over chunks
    screen         which positions to look at first, at a small part of the cost
    barrier        penalties of margins, schedules of their weight, the controller that holds a margin
    law            EmbeddingPrior, the paper's law: density, sampling, certificates, depth
    filtering      particle filter over latent embeddings
    modes          evaluation mode for a while
    sites          where embeddings enter a model
    architectures  one table a family of models: where projections, norms and rotations are
    recording      what the hooks of one attention layer keep
    states         recorded tensors -> attention states
    capture        queries, keys and values out of a Hugging Face model
    sources        what a barrier acts on: the law, or the model's own attention
    objective      the penalised loss: the barriers that sit in a model
    handle         BarrierHandle: the user's hold on an attached barrier
    attach         attach_barrier: one line on a causal language model
    run_folder     files that are never half written; the folder of a run
    callbacks      the barrier beside the Trainer of transformers
    corpora        named corpora and files -> text in three parts
    plan           what one training run is asked to do
    small_gpt      SmallGPT: a small GPT-2 over characters
    arms           training arms as configuration
    trainer_callbacks  progress, metrics, sealed checkpoints
    training       the Trainer of transformers, set up for an experiment
    schema         frozen records <-> JSON of a known version
    intervals      paired BCa intervals over sequences and seeds
    perturb        seeded perturbations of embeddings, texts and weights
    perturbation_set   a frozen set of perturbations, known by its checksum
    records        the plain records that a robustness report is made of
    results        the robustness report as a frozen value
    margin_records  log margins of arms as plain records
    measurement    what one model loses under perturbations
    structure      what embeddings and attention of one model look like
    statistics     figures of a report, each a function of the weights of the sequences
    robustness     arms x perturbations x seeds -> RobustnessReport
    report         result JSON -> terminal, HTML, PNG; never a model
    token_margins  margins of the tokens of texts as plain records
    margin_changes  what changed between two records of margins
    views          records of margins -> terminal, notebook, HTML, PNG, SVG; never a model
    analysis       text -> MarginReport: the margins of a model's own attention
    decoding       uncertainty of tokens and texts from one pass; generation that knows its margin
    latent_prediction  next-token probabilities averaged over the latent noise
    selective      uncertainty against error, and thresholds that keep a stated risk
    explorer       local web page over analysis (optional extra)
    experiment     runs from end to end: train, evaluate, report
    bench          speed and memory beside peers; plans past this machine
    lab            presets of experiments, resumed arm by arm, beside the paper's figures
    cli            the command line, one verb a function
    __main__       python -m support_tokens
"""

__all__ = [
    "ArgumentError",
    "AttentionState",
    "BarrierCallback",
    "BarrierHandle",
    "CaptureError",
    "DataError",
    "EmbeddingLaw",
    "EmbeddingPrior",
    "MarginController",
    "MarginReport",
    "Margins",
    "NumericalError",
    "NumericalWarning",
    "ParticleFilter",
    "RobustnessReport",
    "RunFolderError",
    "Slogdet",
    "SupportTokensError",
    "TrainingError",
    "UnsupportedModelError",
    "WarmupSchedule",
    "analyze",
    "attach_barrier",
    "attached_barriers",
    "attention_margins",
    "attention_slogdet",
    "capture_attention",
    "evaluate_robustness",
    "generate",
    "is_near_singular",
    "model_margins",
    "safe_slogdet",
    "score_sequences",
    "score_tokens",
    "sigma_min",
]

from importlib import import_module
from typing import TYPE_CHECKING, Any

from support_tokens.attach import BarrierHandle, attach_barrier, attached_barriers
from support_tokens.attention import AttentionState
from support_tokens.barrier import MarginController, WarmupSchedule
from support_tokens.errors import (
    ArgumentError,
    CaptureError,
    DataError,
    NumericalError,
    NumericalWarning,
    RunFolderError,
    SupportTokensError,
    TrainingError,
    UnsupportedModelError,
)
from support_tokens.filtering import ParticleFilter
from support_tokens.law import EmbeddingLaw, EmbeddingPrior
from support_tokens.logdet import Slogdet, is_near_singular, safe_slogdet, sigma_min
from support_tokens.margins import Margins, attention_margins, attention_slogdet

if TYPE_CHECKING:
    from support_tokens.analysis import MarginReport, analyze, model_margins
    from support_tokens.callbacks import BarrierCallback
    from support_tokens.capture import capture_attention
    from support_tokens.decoding import generate, score_sequences, score_tokens
    from support_tokens.results import RobustnessReport
    from support_tokens.robustness import evaluate_robustness


# What needs more than torch is read when it is first asked for.
_LAZY = {
    "BarrierCallback": "callbacks",
    "MarginReport": "analysis",
    "RobustnessReport": "results",
    "analyze": "analysis",
    "capture_attention": "capture",
    "evaluate_robustness": "robustness",
    "generate": "decoding",
    "model_margins": "analysis",
    "score_sequences": "decoding",
    "score_tokens": "decoding",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        try:
            return getattr(import_module(f"support_tokens.{_LAZY[name]}"), name)
        except ModuleNotFoundError as error:
            raise ImportError(
                f"support_tokens.{name} needs the package {error.name}, which is not installed; "
                "run `pip install 'support-tokens[train]'`."
            ) from error
    raise AttributeError(f"module 'support_tokens' has no attribute {name!r}")
