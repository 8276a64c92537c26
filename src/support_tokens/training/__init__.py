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

from typing import TYPE_CHECKING

from support_tokens._lazy import lazy_exports

if TYPE_CHECKING:
    from support_tokens.training.callbacks import StopAtInterrupt, last_sealed_checkpoint
    from support_tokens.training.corpora import CORPORA, SOURCE_LIMIT, Corpus, Windows, load_corpus, split_text
    from support_tokens.training.plan import PLANS, TrainingPlan, demo_plan, plan_from_config
    from support_tokens.training.run_folder import RunFolder
    from support_tokens.training.trainer import TrainingResult, read_result, train, train_arms

__getattr__ = lazy_exports(
    __name__,
    {
        "StopAtInterrupt": "callbacks",
        "last_sealed_checkpoint": "callbacks",
        "CORPORA": "corpora",
        "SOURCE_LIMIT": "corpora",
        "Corpus": "corpora",
        "Windows": "corpora",
        "load_corpus": "corpora",
        "split_text": "corpora",
        "PLANS": "plan",
        "TrainingPlan": "plan",
        "demo_plan": "plan",
        "plan_from_config": "plan",
        "RunFolder": "run_folder",
        "TrainingResult": "trainer",
        "read_result": "trainer",
        "train": "trainer",
        "train_arms": "trainer",
    },
)
