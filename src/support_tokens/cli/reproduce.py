"""`support-tokens reproduce`: an experiment from its preset, resumed arm by arm, beside the paper's figures."""

__all__ = ["reproduce"]

from pathlib import Path
from typing import Annotated

import typer

from support_tokens.cli.options import interruptible


def reproduce(
    preset: Annotated[
        str, typer.Option(help="quick (minutes), paper (the paper's experiment, hours), or a JSON file.")
    ] = "quick",
    output: Annotated[Path | None, typer.Option(help="Folder to write into; by default runs/reproduce-PRESET.")] = None,
    data: Annotated[str | None, typer.Option(help="The preset's text from another place: a path or a corpus.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds to run now; others can follow.")] = None,
    runs: Annotated[
        Path | None, typer.Option(help="Folder of trained runs that presets of one plan and corpus share.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Runs at a time, each in a process of its own.")] = 1,
    shard: Annotated[
        str | None, typer.Option(help="I/N: train and measure one of N parts of the runs, for job arrays.")
    ] = None,
) -> None:
    """Train, evaluate and compare the arms of a preset; the same command again does only what is missing."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from support_tokens.report import family, interval, number
    from support_tokens.report.robustness import headline
    from support_tokens.robustness.lab import load_preset
    from support_tokens.robustness.lab import reproduce as run

    folder = Path("runs") / f"reproduce-{Path(preset).stem}" if output is None else output
    with interruptible("interrupted; the same command again continues from the last good state.", always=True):
        result = run(load_preset(preset), folder, data=data, seeds=seeds, runs=runs, workers=workers, shard=shard)
    if result is None:
        print(f"Shard {shard} is finished; after all shards, the same command without --shard makes the tables.")
        return
    console = Console()
    console.print(Text(headline(result.report), style="bold"), highlight=False)
    if result.rows:
        table = Table("figure", "paper", "here", "95 % interval", "status")
        for row in result.rows:
            digits = 4 if row.unit.startswith("share") else 3
            table.add_row(
                row.name,
                "" if row.paper is None else number(row.paper, digits),
                "" if row.ours is None else number(row.ours.value, digits),
                "" if row.ours is None else interval(row.ours, digits),
                row.status,
            )
        console.print(table, highlight=False)
    for contest in result.contests:
        ahead = {"law": contest.law, "rival": contest.rival}.get(contest.outcome, "neither")
        console.print(Text(f"{family(contest.family)}: {ahead} ahead ({contest.law} against {contest.rival})"))
    print(f"Tables: {folder / 'reproduction.md'}")
    print(f"Report: {folder / 'report.html'}")
