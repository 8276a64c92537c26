"""The demo: trains arms under one plan, evaluates them and leaves a report."""

__all__ = ["run_experiment", "write_report"]

from collections.abc import Iterable, Mapping
from pathlib import Path

from support_tokens.errors import RunFolderError
from support_tokens.files import write_text
from support_tokens.models import torch_threads
from support_tokens.regularizers import Regularizer
from support_tokens.report.records import RobustnessReport
from support_tokens.report.robustness import render_html
from support_tokens.robustness.lab.evaluate_runs import evaluate_runs
from support_tokens.training import TrainingPlan, load_corpus, train_arms


def run_experiment(
    folder: str | Path,
    corpus_name: str,
    plan: TrainingPlan,
    arms: Mapping[str, Regularizer],
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
        arms: Regularizer by label; the first is the baseline.
        resume: Go on with an experiment that was stopped.
        force: Replace an earlier experiment in `folder`.
        progress: Draw bars on stderr.
        sequences: Windows of the test part to evaluate on.

    Raises:
        RunFolderError: `folder` holds a finished experiment, or something that is no part of an experiment.
        SupportTokensError: As in `train_arms` and `evaluate_runs`; what was finished before stays.
    """
    folder = Path(folder)
    _check_folder(folder, arms, resume=resume, force=force)
    corpus = load_corpus(corpus_name, plan.context)
    results = train_arms(plan, corpus, arms, folder, resume=resume, force=force, progress=progress)
    with torch_threads(plan.threads):
        report = evaluate_runs([result.folder for result in results.values()], sequences=sequences, progress=progress)
    write_report(report, folder)
    return report


def _check_folder(folder: Path, arms: Iterable[str], *, resume: bool, force: bool) -> None:
    """Lets an experiment go into a folder that is new, empty, or an earlier experiment's, and nowhere else."""
    reports, arms = {"report.json", "report.html"}, set(arms)
    present = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    begun = any((folder / label / "config.json").is_file() for label in arms)
    strange = [name for name in present if name not in arms and (name not in reports or not begun)]
    if strange and not (resume and begun):
        raise RunFolderError(
            f"folder '{folder}' holds '{strange[0]}', which is no part of an experiment, so nothing is written there; "
            "choose another folder."
        )
    if reports & set(present) and not (resume or force):
        raise RunFolderError(
            f"folder '{folder}' holds a finished experiment; open {folder / 'report.html'}, choose another folder, or "
            "pass --force to replace it."
        )


def write_report(report: RobustnessReport, folder: str | Path) -> Path:
    """Writes `report.json` and `report.html` into `folder` and returns the path of the page."""
    folder = Path(folder)
    report.to_json(folder / "report.json")
    page = folder / "report.html"
    write_text(page, render_html(report))
    return page
