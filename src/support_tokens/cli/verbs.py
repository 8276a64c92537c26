"""The verbs of the command line, one function each; what a verb needs is imported when it runs."""

__all__ = ["app"]

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from support_tokens.errors import ArgumentError, RunFolderError

app = typer.Typer(
    name="support-tokens",
    help="Stability margins and support tokens of causal language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Output = Annotated[Path, typer.Option(help="Folder to write into.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an earlier result in the folder.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")]
Data = Annotated[str, typer.Option(help="kjv, python-docs, python-source, a path, or hub:NAME[:CONFIG].")]


def _with_plan(default: str) -> Callable[[Callable], Callable]:
    """Gives a verb one option for each field of the training plan, documented by the field itself."""

    def decorate(verb: Callable) -> Callable:
        from support_tokens.training import PLANS, TrainingPlan

        chosen = PLANS[default]
        own = [p for p in inspect.signature(verb).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        options = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(chosen, field.name),
                annotation=Annotated[field.type, typer.Option(help=field.metadata["help"], rich_help_panel="Plan")],
            )
            for field in dataclasses.fields(TrainingPlan)
        ]
        verb.__signature__ = inspect.Signature(own + options)  # type: ignore[attr-defined]
        verb.__annotations__ = {p.name: p.annotation for p in own + options}
        return verb

    return decorate


@app.command()
@_with_plan("demo")
def demo(
    *,
    output: Output = Path("runs/demo"),
    data: Data = "kjv",
    force: Force = False,
    resume: Resume = False,
    **plan: Any,
) -> None:
    """Train three arms of SmallGPT, try them under noise, and write a report: the main job, in minutes."""
    from support_tokens.report.robustness import print_report
    from support_tokens.robustness.lab import run_experiment
    from support_tokens.training import TrainingPlan

    arms = {name: _arm(name) for name in ("ce", "barrier", "noise")}
    report = run_experiment(output, data, TrainingPlan(**plan), arms, resume=resume, force=force)
    print_report(report)
    print(f"Report: {output / 'report.html'}")


@app.command()
@_with_plan("small")
def train(
    *,
    output: Output,
    data: Data = "kjv",
    arm: Annotated[str, typer.Option(help="An arm with its options: ce, noise, barrier:weight=0.05, ...")] = "barrier",
    force: Force = False,
    resume: Resume = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also log for TensorBoard.")] = False,
    **plan: Any,
) -> None:
    """Train SmallGPT on a text under one arm."""
    from support_tokens.training import TrainingPlan, load_corpus
    from support_tokens.training import train as run

    chosen = TrainingPlan(**plan)
    corpus = load_corpus(data, chosen.context)
    result = run(chosen, corpus, _arm(arm), output, resume=resume, force=force, tensorboard=tensorboard)
    print(result.sentence)
    print(f"Run folder: {result.folder}")


@app.command()
def evaluate(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders, or folders of models of Hugging Face; the first one is the baseline."),
    ],
    output: Annotated[Path | None, typer.Option(help="Folder for the report; the run folder if there is one.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Corpus whose test part is read; for runs, that of training if left out.")
    ] = None,
    sequences: Annotated[int, typer.Option(min=2, help="Windows of the test part.")] = 64,
    context: Annotated[int, typer.Option(min=3, help="Tokens of a window, for models; runs have their own.")] = 128,
    perturb: Annotated[
        str,
        typer.Option(help="By commas: noise, worst-case, typos, typos-by-kind, token-drop, rounding; or all."),
    ] = "noise",
    other: Annotated[list[str] | None, typer.Option(help="Another corpus to read too; may be repeated.")] = None,
    sigma: Annotated[list[float] | None, typer.Option(help="Standard deviation of noise; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of whatever is drawn.")] = 0,
    structure: Annotated[
        bool | None,
        typer.Option("--structure/--no-structure", help="Structure of embeddings and attention; yes for runs."),
    ] = None,
    device: Annotated[str, typer.Option(help="As torch names it, for models.")] = "cpu",
    csv: Annotated[Path | None, typer.Option(help="Also write the figures as CSV.")] = None,
    force: Force = False,
) -> None:
    """Evaluate runs or models on held-out text, clean and under perturbations, and write a report."""
    from support_tokens.report.robustness import print_report
    from support_tokens.robustness.lab import evaluate_models, evaluate_runs, write_report
    from support_tokens.robustness.perturbations import FAMILIES

    # A run keeps its model in a folder of its own; the configuration of a model of transformers names its type.
    models = [not (run / "model").is_dir() and _is_model(run) for run in runs]
    if any(models) and not all(models):
        raise ArgumentError(
            "runs and models cannot be compared, since runs count characters and models tokens; pass the folder "
            "'model' of each run, or evaluate them apart."
        )
    if output is None and (len(runs) > 1 or any(models)):
        raise ArgumentError(
            f"--output is required for {'models' if any(models) else f'a comparison of {len(runs)} runs'}, received "
            "none; pass a folder for the report."
        )
    folder = runs[0] if output is None else output
    written = [(folder / "report.json", "--output"), (folder / "report.html", "--output")]
    written += [] if csv is None else [(csv, "--csv")]
    for path, option in written:
        if path.exists() and not force:
            raise RunFolderError(f"'{path}' exists; choose another {option}, or pass --force to replace it.")
    families = tuple(FAMILIES) if perturb == "all" else tuple(name.strip() for name in perturb.split(",") if name)
    options: dict[str, Any] = {
        "sequences": sequences,
        "sigmas": tuple(sigma) if sigma else (0.1, 0.25, 0.5, 1.0),
        "seed": seed,
        "families": families,
        "others": tuple(other or ()),
    }
    if any(models) and data is None:
        raise ArgumentError("--data is required to evaluate models, received none; pass a corpus or a text file.")
    # Made now, so that no evaluation is lost for want of a folder; a run folder is there, or it is no run folder.
    with _made(*([] if output is None else [output]), *([] if csv is None else [csv.parent])):
        if data is not None and any(models):
            made = evaluate_models(runs, data, context=context, structure=bool(structure), device=device, **options)
        else:
            made = evaluate_runs(runs, data=data, structure=structure is not False, **options)
        page = write_report(made, folder)
        if csv is not None:
            made.to_csv(csv)
    print_report(made)
    print(f"Report: {page}")


@contextmanager
def _made(*folders: Path) -> Iterator[None]:
    """Makes folders with their parents, and takes those it made away again if the block fails and left them empty."""
    new = [path for folder in folders for path in (folder, *folder.parents) if not path.exists()]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in new:
            with suppress(OSError):  # it holds something, or went with another
                path.rmdir()
        raise


def _is_model(folder: Path) -> bool:
    """Whether a folder holds a model of transformers: its configuration names a type of model."""
    import json

    try:
        return "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


@app.command()
def report(
    source: Annotated[Path, typer.Argument(help="A report.json, or the folder that holds one.")],
    output: Annotated[Path | None, typer.Option(help="Page to write; report.html beside the JSON if left out.")] = None,
) -> None:
    """Make the page and the table of a report again from its JSON alone."""
    from support_tokens.files import write_text
    from support_tokens.report.records import RobustnessReport
    from support_tokens.report.robustness import print_report, render_html

    path = source / "report.json" if source.is_dir() else source
    made = RobustnessReport.from_json(path)
    page = path.with_name("report.html") if output is None else output
    write_text(page, render_html(made))
    print_report(made)
    print(f"Report: {page}")


def _arm(text: str):
    from support_tokens.regularizers import parse_arm

    return parse_arm(text)
