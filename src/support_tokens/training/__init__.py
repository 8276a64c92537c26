"""Text, a model and a regularizer to a run folder."""

__all__ = [
    "CORPORA",
    "PLANS",
    "SOURCE_LIMIT",
    "Corpus",
    "RunFolder",
    "StopAtInterrupt",
    "TrainingPlan",
    "TrainingResult",
    "Windows",
    "demo_plan",
    "last_sealed_checkpoint",
    "load_corpus",
    "plan_from_config",
    "read_result",
    "split_text",
    "train",
    "train_arms",
]

from support_tokens.training.callbacks import StopAtInterrupt, last_sealed_checkpoint
from support_tokens.training.corpora import CORPORA, SOURCE_LIMIT, Corpus, Windows, load_corpus, split_text
from support_tokens.training.plan import PLANS, TrainingPlan, demo_plan, plan_from_config
from support_tokens.training.run_folder import RunFolder
from support_tokens.training.trainer import TrainingResult, read_result, train, train_arms
