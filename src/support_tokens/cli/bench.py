"""`support-tokens bench`: time and memory beside baselines."""

__all__ = ["bench"]

from pathlib import Path
from typing import Annotated

import typer

from support_tokens.cli.verbs import app


@app.command()
def bench(
    suite: Annotated[str, typer.Option(help="targets, peers, generate, or smoke (toy sizes).")] = "targets",
    out: Annotated[Path | None, typer.Option(help="Record to write.")] = None,
    table: Annotated[Path | None, typer.Option(help="Markdown to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture (.svg, .png) to write.")] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Earlier record: table and plot again, nothing measured."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Times each arm runs.")] = 7,
    device: Annotated[str, typer.Option(help="As torch names it.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.")] = None,
) -> None:
    """Time the barrier beside other regularizers in one run."""
    import torch

    from support_tokens.models import checked_device

    checked_device(device)  # before any folder is made
    if threads is not None:
        torch.set_num_threads(threads)
    from support_tokens.files import write_text
    from support_tokens.report.records import BenchRecord, record_table, write_plot

    for path in (out, table, plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if record is not None:
        found = BenchRecord.from_json(record)
    else:
        from support_tokens.benchmark import run_suite

        found = run_suite(suite, rounds=rounds, device=device, log=lambda line: print(f"... {line}", flush=True))
    if out is not None:
        found.to_json(out)
    text = record_table(found)
    if table is not None:
        write_text(table, text)
    if plot is not None:
        write_plot(found, plot)
    print(text)
