"""`support-tokens analyze`: the support tokens of a text, as records and views."""

__all__ = ["analyze"]

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from support_tokens.cli.options import (
    MODEL,
    Device,
    Dtype,
    File,
    GgufFile,
    parse_layers,
    read_text,
    split_words,
    writable,
)
from support_tokens.errors import ArgumentError, DataError

if TYPE_CHECKING:
    from support_tokens.analysis import MarginReport, Progress


def analyze(
    model: Annotated[str | None, typer.Option(help=MODEL)] = None,
    gguf_file: GgufFile = None,
    text: Annotated[str | None, typer.Option(help="The text itself.")] = None,
    text_file: Annotated[Path | None, typer.Option(help="A UTF-8 file with one text.")] = None,
    jsonl: Annotated[
        Path | None,
        typer.Option(help='Many texts, one a line: {"text": ...} or {"tokens": [ids]}, with an optional "name".'),
    ] = None,
    record: Annotated[Path | None, typer.Option(help="JSON of an earlier analysis, to view again.")] = None,
    layers: Annotated[str, typer.Option(help="Indices and ranges of blocks: 0,1 or 0-5 or -1, or all.")] = "0",
    view: Annotated[str, typer.Option(help="noise, block, or noise,block.")] = "noise",
    k: Annotated[int, typer.Option(min=1, help="Number of support tokens to mark.")] = 5,
    window: Annotated[
        int | None, typer.Option(help="Most tokens of a forward pass; by default the model's context, at most 1024.")
    ] = None,
    overlap: Annotated[
        int | None, typer.Option(help="Tokens that a window repeats as context; by default a quarter of it.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Windows in one forward pass.")] = 4,
    figures: Annotated[
        str,
        typer.Option(
            help="Figures beside the margins: surprisal_nats (cheap), sigma_min, gradient_share, coupling_sign, "
            "per_head; or all, none."
        ),
    ] = "surprisal_nats",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    json_: Annotated[Path | None, typer.Option("--json", help="Record to write.", rich_help_panel="Output")] = None,
    parquet: File = None,
    html: File = None,
    png: File = None,
    svg: File = None,
    compare: Annotated[
        Path | None, typer.Option(help="JSON of an earlier analysis to compare with.", rich_help_panel="Compare")
    ] = None,
    compare_json: Annotated[Path | None, typer.Option(help="Comparison to write.", rich_help_panel="Compare")] = None,
    compare_html: Annotated[
        Path | None, typer.Option(help="Page of the comparison to write.", rich_help_panel="Compare")
    ] = None,
) -> None:
    """Find the support tokens of a text: exact margins of every token in the model's own attention."""
    from rich.console import Console

    from support_tokens.analysis import MarginReport
    from support_tokens.report.tokens import margins_renderable

    if record is None:
        from support_tokens.models import checked_device

        checked_device(device)
    if compare is None and (compare_json or compare_html):
        raise ArgumentError("--compare is required with --compare-json and --compare-html; pass an earlier JSON.")
    files = (
        ("--json", json_), ("--parquet", parquet), ("--html", html), ("--png", png), ("--svg", svg),
        ("--compare-json", compare_json), ("--compare-html", compare_html),
    )  # fmt: skip
    console = Console()
    texts: dict[str, str | list[int]] = {}
    empty: list[str] = []
    with writable(*files):
        earlier = None if compare is None else MarginReport.from_json(compare)
        if record is not None:
            if model or text is not None or text_file or jsonl:
                raise ArgumentError(
                    "--record stands alone, without a model or a text; leave those out, or leave it out."
                )
            report = MarginReport.from_json(record)
        else:
            texts, empty = _texts(text, text_file, jsonl)
            report = _analyzed(
                model, gguf_file, texts, layers, dtype, device, views=split_words(view), window=window,
                overlap=overlap, batch_size=batch_size, skip=_not_wanted(figures),
            )  # fmt: skip
        _write(report, json_, parquet, html, png, svg, k)
        if earlier is None:
            console.print(margins_renderable(report.record, k=k), highlight=False)
        else:
            _compare(earlier, report, k, compare_json, compare_html, console)
    written = [path for _, path in files if path is not None]
    for path in written:
        print(f"Wrote {path}")
    if not report.record.complete:
        # Typer exits at a KeyboardInterrupt without a message, so it is printed here.
        result = "what was done is written" if written else "what was done is shown above"
        print(f"support-tokens: interrupted; {result}, and the record says that it is not complete.", file=sys.stderr)
        raise typer.Exit(130)
    if empty:
        names = ", ".join(empty[:5]) + (", ..." if len(empty) > 5 else "")
        print(
            f"support-tokens: {len(empty)} of {len(empty) + len(texts)} texts had no tokens and were skipped "
            f"({names}).",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def _not_wanted(figures: str) -> tuple[str, ...]:
    """The figures that `--figures` leaves out."""
    from support_tokens.analysis import FIGURES

    names = {"all": FIGURES, "none": ()}.get(figures, split_words(figures))
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        raise ArgumentError(
            f"--figures may name {', '.join(FIGURES)}, all or none, received {unknown[0]!r}; choose of these."
        )
    return tuple(name for name in FIGURES if name not in names)


def _analyzed(model, gguf_file, texts, layers, dtype, device, **options) -> "MarginReport":
    from support_tokens.analysis import MarginReport, analyze_texts
    from support_tokens.models import decoder_blocks, load_model

    if model is None:
        raise ArgumentError("--model is required, received none; pass a run folder or a model, or --record alone.")
    loaded, tokenizer = load_model(model, gguf_file=gguf_file, dtype=dtype, device=device)
    chosen = parse_layers(layers, len(decoder_blocks(loaded)))
    with _progress() as progress:
        return MarginReport(
            analyze_texts(loaded, tokenizer, texts, chosen, name=str(model), progress=progress, **options)
        )


def _write(report: "MarginReport", json_, parquet, html, png, svg, k: int) -> None:
    from support_tokens.files import write_text
    from support_tokens.report.tokens import margins_html

    if json_ is not None:
        report.to_json(json_)
    if parquet is not None:
        report.to_parquet(parquet)
    if html is not None:
        write_text(html, margins_html(report.record, k=k))
    if png is not None:
        report.to_png(png, k=k)
    if svg is not None:
        report.to_svg(svg, k=k)


def _compare(earlier: "MarginReport", report: "MarginReport", k: int, json_, html, console) -> None:
    from support_tokens.files import write_text
    from support_tokens.report.tokens import changes_html, changes_renderable

    changes = earlier.compare(report, k=k)
    if json_ is not None:
        changes.to_json(json_)
    if html is not None:
        write_text(html, changes_html(changes))
    console.print(changes_renderable(changes), highlight=False)


def _texts(
    text: str | None, text_file: Path | None, jsonl: Path | None
) -> tuple[dict[str, str | list[int]], list[str]]:
    """Texts by name, and the names of those that are empty."""
    given = [
        name for name, value in (("--text", text), ("--text-file", text_file), ("--jsonl", jsonl)) if value is not None
    ]
    if len(given) != 1:
        raise ArgumentError(
            f"one of --text, --text-file and --jsonl is required, received {' and '.join(given) or 'none'}; pass one."
        )
    if text is not None:
        return {"text": text}, []
    if text_file is not None:
        return {text_file.name: read_text(text_file)}, []
    assert jsonl is not None, "one source is given"
    return _lines(jsonl)


def _lines(path: Path) -> tuple[dict[str, str | list[int]], list[str]]:
    texts: dict[str, str | list[int]] = {}
    empty: list[str] = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):  # not splitlines: U+2028 may be in a string
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"'{path}' is not JSON at line {number} ({error}); each line is one object.") from error
        value: Any = row.get("text", row.get("tokens")) if isinstance(row, dict) else None
        tokens = isinstance(value, list) and all(type(token) is int for token in value)
        if not tokens and not isinstance(value, str):
            raise DataError(
                f"'{path}' has no text at line {number}, where 'text' or 'tokens' (a list of ids) is required; add it."
            )
        if not value:
            empty.append(f"line {number}")
            continue
        name = str(row.get("name", f"line {number}"))
        texts[name if name not in texts else f"{name} (line {number})"] = value
    if not texts:
        raise DataError(f"'{path}' holds no text, and one line or more is required; fill it.")
    return texts, empty


@contextmanager
def _progress() -> "Iterator[Progress]":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("margins"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True))

    def update(done: int, total: int) -> None:
        if not bar.tasks:  # not before the first call, so that an error stands alone on stderr
            bar.add_task("margins", total=total)
            bar.start()
        bar.update(bar.tasks[0].id, completed=done, total=total)

    try:
        yield update
    finally:
        if bar.tasks:
            bar.stop()
