"""`support-tokens evaluate`: runs or models on held-out text, clean and perturbed."""

__all__ = ["evaluate"]

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from support_tokens.cli.options import Device, Force, split_words, writable
from support_tokens.errors import ArgumentError


def evaluate(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, or models as for analyze; the first is the baseline.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="Folder for the report; by default the run folder, if there is one only.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Corpus whose test part is read; by default that of training.")
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(min=2, help="Windows of the test part; by default 64 for runs, 32 for models.")
    ] = None,
    context: Annotated[int, typer.Option(min=3, help="Tokens of a window, for models; runs have their own.")] = 128,
    perturb: Annotated[
        str,
        typer.Option(help="Comma-separated: noise, worst-case, typos, typos-by-kind, token-drop, rounding; or all."),
    ] = "noise",
    shift_corpus: Annotated[
        list[str] | None, typer.Option(help="Another corpus to evaluate on; may be repeated.")
    ] = None,
    sigma: Annotated[
        list[float] | None,
        typer.Option(help="Standard deviation of noise; may be repeated; by default 4 for runs, 2 for models."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0,
    structure: Annotated[
        bool | None,
        typer.Option("--structure/--no-structure", help="Structure of embeddings and attention; on for runs."),
    ] = None,
    device: Device = "cpu",
    csv: Annotated[Path | None, typer.Option(help="Also write the figures as CSV.")] = None,
    force: Force = False,
) -> None:
    """Evaluate runs or models on held-out text, clean and under perturbations, and write a report."""
    from support_tokens.report.robustness import print_report
    from support_tokens.robustness.lab import evaluate_models, evaluate_runs, write_report
    from support_tokens.robustness.perturbations import FAMILIES

    models = [_is_model(run) for run in runs]
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
    if any(models) and data is None:
        raise ArgumentError("--data is required to evaluate models, received none; pass a corpus or a text file.")
    options: dict[str, Any] = {
        "seed": seed,
        "families": tuple(FAMILIES) if perturb == "all" else split_words(perturb),
        "others": tuple(shift_corpus or ()),
    }
    options |= {} if sequences is None else {"sequences": sequences}
    options |= {"sigmas": tuple(sigma)} if sigma else {}
    folder = runs[0] if output is None else output
    # A run folder is not made: it is there, or it is no run folder.
    pages = [("--output", folder / name) for name in ("report.json", "report.html") if output or folder.is_dir()]
    with writable(*pages, ("--csv", csv), keep=not force):
        if data is not None and any(models):
            report = evaluate_models(runs, data, context=context, structure=bool(structure), device=device, **options)
        else:
            report = evaluate_runs(runs, data=data, structure=structure is not False, **options)
        page = write_report(report, folder)
        if csv is not None:
            report.to_csv(csv)
    print_report(report)
    print(f"Report: {page}")


def _is_model(path: Path) -> bool:
    """Whether a path names a model and not a run: by its files, or as `owner/name` on the hub."""
    if not path.exists():
        return len(path.parts) == 2 and not path.parent.exists()
    if (path / "model").is_dir():
        return False  # a run keeps its model in a folder of its own
    if path.suffix == ".gguf" or (path / "adapter_config.json").is_file() or any(path.glob("*.gguf")):
        return True
    try:
        return "model_type" in json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
