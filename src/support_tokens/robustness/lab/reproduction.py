r"""One experiment from its preset to its tables; interrupted at any moment, it continues with what is missing."""

__all__ = ["Reproduction", "reproduce"]

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from support_tokens.errors import ArgumentError, RunFolderError
from support_tokens.files import LOCK, FolderLock, read_json, write_bytes, write_json, write_text
from support_tokens.regularizers import parse_regularizer, regularizer_config
from support_tokens.report import encode
from support_tokens.report.records import RobustnessReport
from support_tokens.report.robustness import render_html
from support_tokens.robustness.lab.contest import Contest, contests
from support_tokens.robustness.lab.evaluate_runs import evaluate_runs, measure_runs
from support_tokens.robustness.lab.figures import noise_png, path_png
from support_tokens.robustness.lab.job_table import JobTable
from support_tokens.robustness.lab.jobs import Job, Shard, jobs_of, run_jobs
from support_tokens.robustness.lab.markdown import render_markdown
from support_tokens.robustness.lab.paper import PaperRow, paper_rows
from support_tokens.robustness.lab.preset import Preset
from support_tokens.training import Corpus, RunFolder, TrainingResult, load_corpus, plan_from_config, train


@dataclass(frozen=True)
class Reproduction:
    """What an experiment came to; everything follows from `report` and `preset`.

    Args:
        preset: What was asked for.
        report: Robustness of the arms.
        rows: The paper's figures beside ours.
        contests: The law's best arm against the best rival.
    """

    kind: ClassVar[str] = "support-tokens/reproduction"
    schema_version: ClassVar[int] = 1

    preset: Preset
    report: RobustnessReport
    rows: tuple[PaperRow, ...]
    contests: tuple[Contest, ...]

    @classmethod
    def of(cls, preset: Preset, report: RobustnessReport) -> "Reproduction":
        """The tables of a report."""
        return cls(preset, report, paper_rows(report, preset), contests(report))

    def record(self) -> dict[str, Any]:
        """Preset, rows and contests as plain JSON values; the report has a file of its own."""
        return {
            "schema_version": self.schema_version,
            "kind": self.kind,
            "status": self.report.status,
            "preset": encode(self.preset),
            "seeds": list(self.report.seeds),
            "rows": encode(self.rows),
            "contests": encode(self.contests),
        }


def reproduce(
    preset: Preset,
    folder: str | Path,
    *,
    data: str | None = None,
    seeds: int | None = None,
    runs: str | Path | None = None,
    workers: int = 1,
    shard: str | None = None,
    progress: bool = True,
) -> Reproduction | None:
    """Trains what is missing, measures what is missing, and writes the tables.

    `folder` then holds `preset.json`, `runs/ARM-seedN/` (stock checkpoints), `measured/`, `log.jsonl` (one line a run,
    with its time), `report.json` and `report.html`, `reproduction.json` and `reproduction.md`, `degradation.png`, and
    `path.png` if the preset has a path. Each run continues from its last checkpoint. The same preset on the same
    machine, with as many threads of torch, ends in the same bytes, the log apart, whatever is interrupted and however
    many processes share the work.

    Args:
        preset: The experiment.
        folder: Folder that keeps everything.
        data: A corpus in place of the preset's: the same text at another place.
        seeds: Only the first so many seeds; more can be added later.
        runs: Folder of the trained runs, in place of `folder`/runs, which presets of one plan and corpus can share.
            A run that another process trains is waited for.
        workers: Runs at a time, each in a process of its own. A process that is killed is started again.
        shard: `I/N`, the I-th of N parts of the runs: trains and measures these alone, and makes no tables.
        progress: Show on stderr what is done.

    Returns:
        What came out; None for a shard.

    Raises:
        ArgumentError: `folder` or `runs` was begun with another preset or plan, there are not so many seeds or no such
            shard, or `workers` is below 1.
        SupportTokensError: As in `train` and `evaluate_runs`; finished runs stay.
    """
    folder = Path(folder)
    trained = folder / "runs" if runs is None else Path(runs)
    if seeds is not None and not 1 <= seeds <= len(preset.seeds):
        raise ArgumentError(
            f"seeds must be from 1 to {len(preset.seeds)}, the seeds of the preset, received {seeds}; pass fewer."
        )
    if workers < 1:
        raise ArgumentError(f"workers must be at least 1, received {workers}; pass 1.")
    part = None if shard is None else Shard.parse(shard)
    if data is not None:
        preset = dataclasses.replace(preset, corpus=data)
    jobs = jobs_of(preset, preset.seeds[:seeds], trained)
    chosen = jobs if part is None else jobs_of(preset, preset.seeds[:seeds], trained, part)
    corpus = load_corpus(preset.corpus, plan_from_config(dict(preset.plan)).context)
    _check_runs(preset, jobs, corpus)
    _claim(folder, preset)
    work = partial(_train_and_measure, preset, folder, measured=workers > 1 or part is not None)
    left = [job for job in chosen if part is not None or not job.finished]
    with JobTable(chosen, plan_from_config(dict(preset.plan)).steps, enabled=progress) as table:
        if workers > 1:
            run_jobs(left, work, workers=workers, watch=table.show)
        else:
            for job in left:
                table.show((job,))
                work(job, progress=progress)
            table.show(())
    if part is not None:
        return None
    # Arm after arm, as the report has them.
    folders = [job.folder for job in sorted(jobs, key=lambda job: preset.arms.index(job.arm))]
    report = evaluate_runs(folders, timings=False, split=True, **_options(preset, folder, progress))
    made = Reproduction.of(preset, report)
    _write(folder, made)
    return made


def _train_and_measure(preset: Preset, folder: Path, job: Job, *, measured: bool, progress: bool = False) -> None:
    """Does one job; what it left when it was killed is used."""
    plan = dataclasses.replace(plan_from_config(dict(preset.plan)), seed=job.seed)
    with FolderLock.of(job.folder, wait=True):
        finished, begun = job.finished, (job.folder / "config.json").exists()
        # A run that was killed before it had a configuration left nothing worth keeping.
        result = train(
            plan,
            load_corpus(preset.corpus, plan.context),
            parse_regularizer(job.arm),
            job.folder,
            resume=begun,
            force=not begun,
            progress=progress,
        )
        if not finished:
            _log(folder, job.arm, job.seed, result)
        if measured:
            measure_runs([job.folder], **_options(preset, folder, progress))


def _options(preset: Preset, folder: Path, progress: bool) -> dict[str, Any]:
    # The runs know the text that they were trained on, and that it is still the same.
    return {
        "sequences": preset.sequences,
        "sigmas": preset.sigmas,
        "families": preset.families,
        "others": preset.others,
        "cache": folder / "measured",
        "progress": progress,
    }


def _check_runs(preset: Preset, jobs: Sequence[Job], corpus: Corpus) -> None:
    """Refuses runs of another plan or corpus before anything is trained."""
    for job in jobs:
        if not (job.folder / "config.json").exists():
            continue
        plan = dataclasses.replace(plan_from_config(dict(preset.plan)), seed=job.seed)
        config = {
            "plan": dataclasses.asdict(plan),
            "corpus": corpus.identity(),
            "arm": regularizer_config(parse_regularizer(job.arm)),
        }
        stored = RunFolder.open(job.folder).config()
        for name, wanted in json.loads(json.dumps(config)).items():
            if stored.get(name) != wanted:
                raise ArgumentError(
                    f"runs must hold runs of this preset, received a run of another {name} in '{job.folder}'; "
                    "choose another --runs or --output."
                )


def _claim(folder: Path, preset: Preset) -> None:
    """Marks the folder as that of the preset, or checks that it is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"'{folder}' cannot be made ({error.strerror}); choose another folder.") from error
    mark, wanted = folder / "preset.json", json.loads(json.dumps(preset.record()))
    with FolderLock.of(folder, wait=True):
        if not mark.exists():
            # `runs` without a mark cannot be ours, since the mark is written first.
            if any(entry.name != LOCK and not entry.name.startswith(".preset.json") for entry in folder.iterdir()):
                raise RunFolderError(f"folder '{folder}' is not empty and holds no preset.json; choose another folder.")
            write_json(mark, {key: value for key, value in wanted.items() if key != "schema_version"})
    stored = read_json(mark)
    if wanted != stored:
        differing = sorted(key for key in wanted if stored.get(key) != wanted[key])
        raise ArgumentError(
            f"the experiment in '{folder}' was begun with another preset ({', '.join(differing)} differ); "
            "continue with the same, or choose another --output."
        )


def _log(folder: Path, arm: str, seed: int, result: TrainingResult) -> None:
    row = {
        "arm": arm,
        "seed": seed,
        "steps": result.steps,
        "seconds": round(result.seconds, 1),
        "validation_bpc": result.validation_bpc,
        "threads": result.threads,
    }
    with open(folder / "log.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _write(folder: Path, made: Reproduction) -> None:
    made.report.to_json(folder / "report.json")
    write_text(folder / "report.html", render_html(made.report))
    made.report.to_csv(folder / "report.csv")
    if any(area.family.startswith("embedding_noise/") for area in made.report.areas):
        write_bytes(folder / "degradation.png", noise_png(made.report))
    if made.preset.path:
        write_bytes(folder / "path.png", path_png(made.report, made.preset))
    write_json(
        folder / "reproduction.json", {key: value for key, value in made.record().items() if key != "schema_version"}
    )
    write_text(folder / "reproduction.md", render_markdown(made.preset, made.report, made.rows, made.contests))
