"""`support-tokens bench`: time and memory beside peers, and plans for models that are not here."""

__all__ = ["bench"]

from pathlib import Path
from typing import Annotated

import typer

from support_tokens.cli.verbs import app
from support_tokens.errors import ArgumentError

Planned = "Plan"
Measured = "Measure"


@app.command()
def bench(
    suite: Annotated[
        str, typer.Option(help="targets, peers, generate, or smoke (toy sizes).", rich_help_panel=Measured)
    ] = "targets",
    out: Annotated[Path | None, typer.Option(help="Record to write.", rich_help_panel=Measured)] = None,
    table: Annotated[Path | None, typer.Option(help="Markdown to write.", rich_help_panel=Measured)] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture (.svg, .png) to write.", rich_help_panel=Measured)] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Earlier record: table and plot again, nothing measured.", rich_help_panel=Measured),
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Times each arm runs.", rich_help_panel=Measured)] = 7,
    device: Annotated[str, typer.Option(help="As torch names it.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.")] = None,
    plan: Annotated[
        str | None,
        typer.Option(help="small-gpt, smollm2-135m, 8b, 70b, or a config.json: predict only.", rich_help_panel=Planned),
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.", rich_help_panel=Planned)] = 8192,
    batch: Annotated[int, typer.Option(min=1, help="Sequences over all devices.", rich_help_panel=Planned)] = 1,
    positions: Annotated[int | None, typer.Option(min=1, help="Of each sequence.", rich_help_panel=Planned)] = None,
    source: Annotated[str, typer.Option(help="model or prior.", rich_help_panel=Planned)] = "model",
    devices: Annotated[int, typer.Option(min=1, help="Devices that share the batch.", rich_help_panel=Planned)] = 1,
    product: Annotated[
        float | None,
        typer.Option(help="Teraflop/s of products there; measured here if left out.", rich_help_panel=Planned),
    ] = None,
    elimination: Annotated[
        float | None, typer.Option(help="Teraflop/s of float32 elimination there.", rich_help_panel=Planned)
    ] = None,
    memory: Annotated[float | None, typer.Option(help="Gigabytes/s there.", rich_help_panel=Planned)] = None,
) -> None:
    """Time the barrier beside its peers in one run, or plan its cost for a model that is not here."""
    import torch

    from support_tokens.models import checked_device

    checked_device(device)  # before any folder is made
    if threads is not None:
        torch.set_num_threads(threads)
    if plan is not None:
        given = (("--out", out), ("--table", table), ("--plot", plot), ("--record", record))
        asked = [name for name, value in given if value is not None]
        if asked:
            raise ArgumentError(
                f"--plan prints a prediction and writes no file, received {' and '.join(asked)} with it; leave "
                "that out, or leave --plan out to measure."
            )
        _plan(plan, batch, length, source, positions, devices, device, (product, elimination, memory))
        return
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


def _plan(
    config: str, batch: int, length: int, source: str, positions: int | None, devices: int, device: str, given: tuple
) -> None:
    from support_tokens.benchmark import Roofline, plan_step, shape_of

    shape = shape_of(config)
    if any(rate is not None for rate in given):
        if not all(rate is not None and rate > 0 for rate in given):
            raise ArgumentError(
                "--product, --elimination and --memory are required together; pass three rates above 0."
            )
        product, elimination, memory = given
        roofline = Roofline(product * 1e12, {shape.side: elimination * 1e12}, memory * 1e9)
        origin = "given rates"
    else:
        from support_tokens.benchmark import measure_roofline

        roofline, origin = measure_roofline(device), "rates measured on this machine"
    found = plan_step(shape, roofline, batch=batch, length=length, source=source, positions=positions, devices=devices)
    for name, counts, seconds in (
        ("plain step", found.plain, found.plain_seconds),
        ("barrier", found.barrier, found.barrier_seconds),
    ):
        print(
            f"{name:<11} {counts.product:.3g} operations in products, {counts.elimination:.3g} in eliminations of side "
            f"{counts.side}, {counts.moved:.3g} bytes moved, {counts.memory / 1e9:.3g} GB held: {seconds:.3g} s"
        )
    print(
        f"time x {found.time_ratio:.3f}, memory x {found.memory_ratio:.3f} on each of {devices} devices; predicted "
        f"from {origin}, not measured"
    )
