"""`support-tokens bench`: time and memory beside other regularizers."""

__all__ = ["bench"]

from pathlib import Path
from typing import Annotated

import typer

from support_tokens.cli.options import Device, writable


def bench(
    suite: Annotated[str, typer.Option(help="targets, peers, generate, or smoke (toy sizes).")] = "targets",
    output: Annotated[Path | None, typer.Option(help="Record to write.", rich_help_panel="Output")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Table to write.", rich_help_panel="Output")] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot (.svg, .png) to write.", rich_help_panel="Output")] = None,
    record: Annotated[Path | None, typer.Option(help="Earlier record, to tabulate and plot again.")] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Repetitions of each measurement.")] = 7,
    device: Device = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.")] = None,
) -> None:
    """Time the barrier beside other regularizers in one run."""
    import torch

    from support_tokens.files import write_text
    from support_tokens.models import checked_device
    from support_tokens.report.records import BenchRecord, record_table, write_plot

    checked_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    with writable(("--output", output), ("--markdown", markdown), ("--plot", plot)):
        if record is not None:
            result = BenchRecord.from_json(record)
        else:
            from support_tokens.benchmark import run_suite

            result = run_suite(suite, rounds=rounds, device=device, log=lambda line: print(f"... {line}", flush=True))
        if output is not None:
            result.to_json(output)
        text = record_table(result)
        if markdown is not None:
            write_text(markdown, text)
        if plot is not None:
            write_plot(result, plot)
    print(text)
