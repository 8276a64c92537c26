"""`support-tokens train`: SmallGPT on a text, with a regularizer."""

__all__ = ["train"]

from pathlib import Path
from typing import Annotated, Any

import typer

from support_tokens.cli.options import Data, Force, Resume, interruptible
from support_tokens.cli.plan_options import with_plan


@with_plan("small")
def train(
    *,
    output: Annotated[Path, typer.Option(help="Run folder to write.")],
    data: Data = "kjv",
    arm: Annotated[
        str, typer.Option(help="Regularizer with its options: ce, noise, barrier:weight=0.05, ...")
    ] = "barrier",
    force: Force = False,
    resume: Resume = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also log for TensorBoard.")] = False,
    **plan: Any,
) -> None:
    """Train SmallGPT on a text with one regularizer."""
    from support_tokens.regularizers import parse_regularizer
    from support_tokens.training import TrainingPlan, load_corpus
    from support_tokens.training import train as run

    chosen = TrainingPlan(**plan)
    corpus = load_corpus(data, chosen.context)
    with interruptible("interrupted; --resume continues from the last checkpoint."):
        result = run(
            chosen, corpus, parse_regularizer(arm), output, resume=resume, force=force, tensorboard=tensorboard
        )
    print(result.sentence)
    print(f"Run folder: {result.folder}")
