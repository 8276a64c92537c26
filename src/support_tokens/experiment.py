r"""Experiments from end to end: trained runs -> frozen noise -> report; and the demo, which trains them first."""

__all__ = ["TrainedRun", "evaluate_runs", "open_run", "run_experiment", "write_report"]

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from torch import nn

from support_tokens.analysis import model_margins
from support_tokens.arms import Arm, arm_config, arm_from_config, arm_label
from support_tokens.corpora import Corpus, Windows, load_corpus
from support_tokens.errors import ArgumentError, DataError, RunFolderError
from support_tokens.margin_records import ArmMargins, Trace
from support_tokens.measurement import EvaluationData
from support_tokens.perturbation_set import standard_perturbations
from support_tokens.plan import TrainingPlan
from support_tokens.report import render_html
from support_tokens.results import RobustnessReport
from support_tokens.robustness import ArmDetails, evaluate_robustness
from support_tokens.run_folder import RunFolder, write_text
from support_tokens.small_gpt import encode, load_small_gpt, unknown_rate
from support_tokens.training import read_result, train_arms

_MARGIN_WINDOWS = 16
_SENTENCE = 160


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its folder, its arm, and the seed and configuration it was trained with."""

    folder: Path
    arm: Arm
    seed: int
    config: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The arm with its options, the same for all seeds of it."""
        return arm_label(self.arm)


def open_run(folder: str | Path) -> TrainedRun:
    """Opens the folder of a finished run.

    Raises:
        RunFolderError: There is no finished run, or its configuration cannot be used.
    """
    run = RunFolder.open(folder)
    read_result(run.path)
    config = run.config()
    try:
        return TrainedRun(run.path, arm_from_config(config["arm"]), int(config["plan"]["seed"]), config)
    except (KeyError, TypeError, ArgumentError) as error:
        raise RunFolderError(f"'{run.path / 'config.json'}' is not that of a run ({error}); train again.") from error


def evaluate_runs(
    folders: Sequence[str | Path],
    *,
    data: str | None = None,
    sequences: int = 64,
    sigmas: Sequence[float] = (0.1, 0.25, 0.5, 1.0),
    seed: int = 0,
    progress: bool = True,
) -> RobustnessReport:
    r"""Evaluates finished runs on held-out text, clean and under embedding noise; runs that differ in seed only are
    one arm.

    The first folder's arm is the baseline. Noise of each sigma is added to the embeddings once as it is and once times
    the root mean square of the model's clean embeddings.

    Args:
        folders: Run folders, trained on one corpus with one context.
        data: Corpus whose test part is read; None: the corpus the runs were trained on.
        sequences: Windows of the test part, spread evenly.
        sigmas: Standard deviations of the noise.
        seed: Seed of the noise.
        progress: Draw a bar on stderr.

    Raises:
        ArgumentError: No folders, or runs that cannot be compared.
        DataError: The corpus cannot be read or has changed since training.
        RunFolderError: A folder holds no finished run.
    """
    if not folders:
        raise ArgumentError("At least one run folder is required for an evaluation, received none; train one first.")
    runs = [open_run(folder) for folder in folders]
    by_label = _by_label(runs)
    first = runs[0]
    corpus = _corpus(first, data)
    _, tokenizer = load_small_gpt(first.folder)
    context = int(first.config["plan"]["context"])
    corpus.require(context)
    ids = encode(tokenizer, corpus.test)
    windows = torch.stack([window["input_ids"] for window in Windows(ids, context, limit=sequences)])  # type: ignore[attr-defined]
    held_out = EvaluationData(windows, characters=1)
    models = {label: _LazyModels(of_arm) for label, of_arm in by_label.items()}
    sentence = encode(tokenizer, _sentence(corpus.test, context)).unsqueeze(0)
    details = {
        label: ArmDetails(
            label=label,
            description=of_arm[0].arm.summary,
            seconds=sum(read_result(run.folder).seconds for run in of_arm),
            margins=_margins(models[label][0], tokenizer, windows[:_MARGIN_WINDOWS], sentence),
        )
        for label, of_arm in by_label.items()
    }
    config = {
        "title": f"SmallGPT under embedding noise: {corpus.name}",
        "plan": {key: value for key, value in first.config["plan"].items() if key != "seed"},
        "trained_on": first.config["corpus"],
        "evaluated_on": corpus.identity(),
        "unknown_characters": unknown_rate(tokenizer, windows),
        "arms": {label: arm_config(of_arm[0].arm) for label, of_arm in by_label.items()},
    }
    with _bar(enabled=progress) as (bar, task):
        return evaluate_robustness(
            models,
            held_out,
            standard_perturbations(sigmas, seed=seed),
            seeds=[run.seed for run in by_label[first.label]],
            details=details,
            config=config,
            progress=lambda done, total, what: bar.update(task, completed=done, total=total, description=what),
        )


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
            f"pass --force "
            "to replace it."
        )
    corpus = load_corpus(corpus_name, plan.context)
    results = train_arms(plan, corpus, arms, folder, resume=resume, force=force, progress=progress)
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


@contextmanager
def _bar(*, enabled: bool) -> Iterator[tuple[Progress, TaskID]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not enabled) as bar:
        yield bar, bar.add_task("evaluation", total=None)


class _LazyModels(Sequence):
    """The models of one arm, read when they are asked for: one at a time is in memory."""

    def __init__(self, runs: Sequence[TrainedRun]) -> None:
        self._runs = runs

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, index):  # type: ignore[override]
        return load_small_gpt(self._runs[index].folder)[0]


def _by_label(runs: Sequence[TrainedRun]) -> dict[str, list[TrainedRun]]:
    by_label: dict[str, list[TrainedRun]] = {}
    for run in runs:
        by_label.setdefault(run.label, []).append(run)
    first = runs[0]
    for run in runs:
        for part in ("plan", "corpus"):
            ours, theirs = dict(run.config[part]), dict(first.config[part])
            if part == "plan":
                del ours["seed"], theirs["seed"]
            if ours != theirs:
                raise ArgumentError(
                    f"runs that are compared must share their {part} (but for the seed), and those of '{run.folder}' "
                    f"and "
                    f"'{first.folder}' differ; evaluate them apart, or train them alike."
                )
    for of_arm in by_label.values():
        of_arm.sort(key=lambda run: run.seed)
    seeds = {label: [run.seed for run in of_arm] for label, of_arm in by_label.items()}
    if any(s != seeds[first.label] for s in seeds.values()):
        raise ArgumentError(f"arms that are compared must have the same seeds, received {seeds}; add the missing runs.")
    return by_label


def _corpus(run: TrainedRun, data: str | None) -> Corpus:
    trained_on = run.config["corpus"]
    corpus = load_corpus(trained_on["name"] if data is None else data)
    if data is None and corpus.sha256 != trained_on["sha256"]:
        raise DataError(
            f"corpus '{corpus.name}' has changed since '{run.folder}' was trained on it (another checksum); "
            "restore it, or pass --data."
        )
    return corpus


def _sentence(text: str, context: int) -> str:
    """A stretch of the text that begins at a sentence and is no longer than the context or a line or two of print."""
    begin = re.search(r"[.!?]\s+(?=[A-Z])", text)
    start = begin.end() if begin else 0
    return text[start : start + min(context, _SENTENCE)]


def _margins(model: nn.Module, tokenizer, windows: torch.Tensor, sentence: torch.Tensor) -> ArmMargins:
    on_text = model_margins(model, windows)[0]
    on_sentence = model_margins(model, sentence)[0]
    rankable = on_text.rankable
    trace = Trace(
        tokens=[tokenizer.decode([token]) for token in sentence[0].tolist()],
        log_abs_det=on_sentence.log_abs_det[0].tolist(),
        sign=[int(s) for s in on_sentence.sign[0].tolist()],
        valid=on_sentence.rankable[0].tolist(),
    )
    return ArmMargins(
        log_abs_det=on_text.log_abs_det[rankable].tolist(),
        sign=[int(s) for s in on_text.sign[rankable].tolist()],
        trace=trace,
    )
