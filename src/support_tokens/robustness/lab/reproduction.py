r"""One experiment from its preset to its tables, arm by arm: killed at any moment, it goes on with what is missing."""

__all__ = ["Reproduction", "reproduce"]

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from support_tokens.errors import ArgumentError, RunFolderError
from support_tokens.files import read_json, write_bytes, write_json, write_text
from support_tokens.regularizers import parse_regularizer
from support_tokens.report import encode
from support_tokens.report.records import RobustnessReport
from support_tokens.report.robustness import render_html
from support_tokens.robustness.lab.contest import Contest, contests
from support_tokens.robustness.lab.evaluate_runs import evaluate_runs
from support_tokens.robustness.lab.figures import noise_png, path_png
from support_tokens.robustness.lab.markdown import render_markdown
from support_tokens.robustness.lab.paper import PaperRow, paper_rows
from support_tokens.robustness.lab.preset import Preset
from support_tokens.training import TrainingResult, load_corpus, plan_from_config, train


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
    progress: bool = True,
) -> Reproduction:
    """Trains what is missing, measures what is missing, and writes the tables.

    `folder` then holds `preset.json`, `runs/ARM-seedN/` (stock checkpoints), `measured/`, `log.jsonl` (one line a run,
    with its time), `report.json` and `report.html`, `reproduction.json` and `reproduction.md`, `degradation.png`, and
    `path.png` where the preset has a path. Seed after seed is trained, and each run goes on from its last checkpoint.
    Started again with the same preset on the same machine, with as many threads, it writes the same bytes, the log
    apart.

    Args:
        preset: The experiment.
        folder: Where everything is kept.
        data: A corpus in place of the preset's: the same text at another place.
        seeds: Only the first so many seeds; more can be added later.
        runs: Folder of the trained runs, in place of `folder`/runs: presets of one plan and corpus that name the same
            one train an arm they share once. One experiment at a time may train there.
        progress: Draw bars on stderr.

    Raises:
        ArgumentError: The folder was begun with another preset, or there are not so many seeds.
        SupportTokensError: As in `train` and `evaluate_runs`; what was finished before stays.
    """
    folder = Path(folder)
    trained = folder / "runs" if runs is None else Path(runs)
    if seeds is not None and not 1 <= seeds <= len(preset.seeds):
        raise ArgumentError(f"seeds must be from 1 to {len(preset.seeds)}, as many as the preset has, not {seeds}.")
    if data is not None:
        preset = dataclasses.replace(preset, corpus=data)
    _claim(folder, preset)
    plan = plan_from_config(dict(preset.plan))
    corpus = load_corpus(preset.corpus, plan.context)
    chosen = preset.seeds[:seeds]
    for seed in chosen:
        for arm in preset.arms:
            run = _run_folder(trained, arm, seed)
            finished = (run / "result.json").exists()
            begun = (run / "config.json").exists()
            # A run that was killed before it had a configuration left nothing worth keeping.
            result = train(
                dataclasses.replace(plan, seed=seed),
                corpus,
                parse_regularizer(arm),
                run,
                resume=begun,
                force=not begun,
                progress=progress,
            )
            if not finished:
                _log(folder, arm, seed, result)
    report = evaluate_runs(
        [_run_folder(trained, arm, seed) for arm in preset.arms for seed in chosen],
        # The runs know the text that they were trained on, and that it is still the same.
        sequences=preset.sequences,
        sigmas=preset.sigmas,
        families=preset.families,
        others=preset.others,
        timings=False,
        split=True,
        cache=folder / "measured",
        progress=progress,
    )
    made = Reproduction.of(preset, report)
    _write(folder, made)
    return made


def _claim(folder: Path, preset: Preset) -> None:
    """Marks the folder as that of the preset, or checks that it is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"'{folder}' cannot be made ({error.strerror}); choose another folder.") from error
    mark, wanted = folder / "preset.json", preset.record()
    if not mark.exists():
        # `runs` without a mark cannot be ours: the mark is written first.
        if any(folder.iterdir()) and not all(entry.name.startswith(".preset.json") for entry in folder.iterdir()):
            raise RunFolderError(f"folder '{folder}' is not empty and holds no preset.json; choose another folder.")
        write_json(mark, {key: value for key, value in wanted.items() if key != "schema_version"})
    found = read_json(mark)
    if json.loads(json.dumps(wanted)) != found:
        differing = sorted(key for key in wanted if found.get(key) != json.loads(json.dumps(wanted[key])))
        raise ArgumentError(
            f"the experiment in '{folder}' was begun with another preset ({', '.join(differing)} differ); "
            "go on with the same, or choose another --output."
        )


def _run_folder(trained: Path, arm: str, seed: int) -> Path:
    return trained / f"{re.sub(r'[^a-zA-Z0-9.+-]+', '-', arm)}-seed{seed}"


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
