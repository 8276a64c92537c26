"""The demo: trains arms under one plan, evaluates them and leaves a report."""

__all__ = ["run_experiment", "write_report"]

from collections.abc import Mapping
from pathlib import Path

from support_tokens.arms import Arm
from support_tokens.corpora import load_corpus
from support_tokens.errors import RunFolderError
from support_tokens.experiment.evaluation import evaluate_runs
from support_tokens.plan import TrainingPlan
from support_tokens.report import render_html
from support_tokens.results import RobustnessReport
from support_tokens.run_folder import write_text
from support_tokens.small_gpt import torch_threads
from support_tokens.training import train_arms


def run_experiment(
    folder: str | Path,
    corpus_name: str,
    plan: TrainingPlan,
    arms: Mapping[str, Arm],
    *,
    resume: bool = False,
    force: bool = False,
    progress: bool = True,
    sequences: int = 64,
) -> RobustnessReport:
    """Trains the arms under one plan, evaluates them, and writes `report.json` and `report.html` into `folder`.

    Args:
        folder: Holds one run folder an arm, and the report.
        corpus_name: Corpus, as for `load_corpus`.
        plan: Shared by all arms.
        arms: Arm by label; the first is the baseline.
        resume: Go on with an experiment that was stopped.
        force: Replace an earlier experiment in `folder`.
        progress: Draw bars on stderr.
        sequences: Windows of the test part to evaluate on.

    Raises:
        SupportTokensError: As in `train_arms` and `evaluate_runs`; what was finished before stays.
    """
    folder = Path(folder)
    if (folder / "report.json").exists() and not (resume or force):
        raise RunFolderError(
            f"folder '{folder}' holds a finished experiment; open {folder / 'report.html'}, choose another folder, or "
            "pass --force to replace it."
        )
    corpus = load_corpus(corpus_name, plan.context)
    results = train_arms(plan, corpus, arms, folder, resume=resume, force=force, progress=progress)
    with torch_threads(plan.threads):
        report = evaluate_runs([result.folder for result in results.values()], sequences=sequences, progress=progress)
    write_report(report, folder)
    return report


def write_report(report: RobustnessReport, folder: str | Path) -> Path:
    """Writes `report.json` and `report.html` into `folder` and returns the path of the page."""
    folder = Path(folder)
    report.to_json(folder / "report.json")
    page = folder / "report.html"
    write_text(page, render_html(report))
    return page
