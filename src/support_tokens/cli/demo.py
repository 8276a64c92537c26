"""`support-tokens demo`: three arms of SmallGPT, trained, perturbed and compared in minutes."""

__all__ = ["demo"]

from pathlib import Path
from typing import Annotated, Any

import typer

from support_tokens.cli.options import Data, Force, Resume, interruptible
from support_tokens.cli.plan_options import with_plan


@with_plan("demo")
def demo(
    *,
    output: Annotated[Path, typer.Option(help="Folder to write into.")] = Path("runs/demo"),
    data: Data = "kjv",
    force: Force = False,
    resume: Resume = False,
    **plan: Any,
) -> None:
    """Train three arms of SmallGPT, evaluate them under noise and write a report, in minutes."""
    from support_tokens.regularizers import parse_regularizer
    from support_tokens.report.robustness import print_report
    from support_tokens.robustness.lab import run_experiment
    from support_tokens.training import TrainingPlan

    arms = {name: parse_regularizer(name) for name in ("ce", "barrier", "noise")}
    with interruptible("interrupted; --resume continues."):
        report = run_experiment(output, data, TrainingPlan(**plan), arms, resume=resume, force=force)
    print_report(report)
    print(f"Report: {output / 'report.html'}")
