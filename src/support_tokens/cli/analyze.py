"""`support-tokens analyze`: the support tokens of a text, as records and views."""

__all__ = ["analyze"]

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from support_tokens.cli.verbs import app
from support_tokens.errors import ArgumentError, DataError

if TYPE_CHECKING:
    from support_tokens.analysis import MarginReport, Progress

_MOST_BYTES = 64 * 2**20

Output = Annotated[Path | None, typer.Option(help="File to write.", rich_help_panel="Output")]


@app.command()
def analyze(
    model: Annotated[
        str | None, typer.Option(help="A run folder, a folder of a checkpoint, or a name that transformers knows.")
    ] = None,
    gguf_file: Annotated[str | None, typer.Option(help="Name of a GGUF file in the folder of the model.")] = None,
    text: Annotated[str | None, typer.Option(help="The text itself.")] = None,
    text_file: Annotated[Path | None, typer.Option(help="A UTF-8 file with one text.")] = None,
    jsonl: Annotated[
        Path | None,
        typer.Option(help='Many texts: a line each, {"text": ...} or {"tokens": [ids]}, and "name" if wanted.'),
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="JSON of an earlier analysis: its views again, without a model.")
    ] = None,
    layers: Annotated[str, typer.Option(help="Blocks by commas or ranges: 0,1 or 0-5 or -1, or all.")] = "0",
    view: Annotated[str, typer.Option(help="noise, block, or noise,block.")] = "noise",
    k: Annotated[int, typer.Option(min=1, help="How many support tokens are marked.")] = 5,
    window: Annotated[
        int | None, typer.Option(help="Most tokens read at once; the context of the model, 1024 at most, if left out.")
    ] = None,
    overlap: Annotated[int | None, typer.Option(help="Tokens a window repeats as context; a quarter of it.")] = None,
    batch_size: Annotated[int, typer.Option(help="Windows of one forward pass.")] = 4,
    without: Annotated[
        str,
        typer.Option(help="Figures to leave out: sigma_min, gradient_share, coupling_sign, per_head, surprisal_nats."),
    ] = "",
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="As torch names it.")] = "cpu",
    json_: Annotated[Path | None, typer.Option("--json", help="Record to write.", rich_help_panel="Output")] = None,
    parquet: Output = None,
    html: Output = None,
    png: Output = None,
    svg: Output = None,
    compare: Annotated[
        Path | None, typer.Option(help="JSON of an earlier analysis: what changed since.", rich_help_panel="Compare")
    ] = None,
    compare_json: Annotated[Path | None, typer.Option(help="Comparison to write.", rich_help_panel="Compare")] = None,
    compare_html: Annotated[
        Path | None, typer.Option(help="Page of the comparison to write.", rich_help_panel="Compare")
    ] = None,
) -> None:
    """Find the support tokens of a text: exact margins of every token in the model's own attention."""
    from rich.console import Console

    from support_tokens.analysis import MarginReport
    from support_tokens.models import checked_device

    if record is None:
        checked_device(device)
    outputs = [path for path in (json_, parquet, html, png, svg, compare_json, compare_html) if path is not None]
    for path in outputs:  # now, so that no analysis is lost for want of a folder
        path.parent.mkdir(parents=True, exist_ok=True)
    if compare is None and (compare_json or compare_html):
        raise ArgumentError("--compare is required with --compare-json and --compare-html; pass an earlier JSON.")
    earlier = None if compare is None else MarginReport.from_json(compare)
    if record is not None:
        if model or text is not None or text_file or jsonl:
            raise ArgumentError("--record stands alone, without a model or a text; leave those out, or leave it out.")
        report = MarginReport.from_json(record)
    else:
        report = _analyzed(
            model, gguf_file, _texts(text, text_file, jsonl), layers, view, window, overlap, batch_size, without, dtype,
            device,
        )  # fmt: skip
    _write(report, json_, parquet, html, png, svg, k)
    console = Console()
    from support_tokens.report.tokens import margins_renderable

    if earlier is None:
        console.print(margins_renderable(report.record, k=k), highlight=False)
    else:
        _compare(earlier, report, k, compare_json, compare_html, console)
    for path in outputs:
        print(f"Wrote {path}")
    if not report.record.complete:
        # Typer ends at a KeyboardInterrupt without a word, so the sentence is said here.
        said = "what was done is written" if outputs else "what was done is shown above"
        print(f"support-tokens: interrupted; {said}, and the record says that it is not complete.", file=sys.stderr)
        raise typer.Exit(130)


def _analyzed(model, gguf_file, texts, layers, view, window, overlap, batch_size, without, dtype, device):
    from support_tokens.analysis import MarginReport, analyze_texts
    from support_tokens.models import decoder_blocks, load_model

    if model is None:
        raise ArgumentError("--model is required, received none; pass a run folder or a model, or --record alone.")
    loaded, tokenizer = load_model(model, gguf_file=gguf_file, dtype=dtype, device=device)
    with _progress() as progress:
        record = analyze_texts(
            loaded,
            tokenizer,
            texts,
            _layers(layers, len(decoder_blocks(loaded))),
            _listed(view),
            window=window,
            overlap=overlap,
            batch_size=batch_size,
            without=_listed(without),
            name=str(model),
            progress=progress,
        )
    return MarginReport(record)


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
    from support_tokens.files import write_json, write_text
    from support_tokens.report.records import changes_to_json
    from support_tokens.report.tokens import changes_html, changes_renderable

    changes = earlier.compare(report, k=k)
    if json_ is not None:
        payload = changes_to_json(changes)
        write_json(json_, {key: value for key, value in payload.items() if key != "schema_version"})
    if html is not None:
        write_text(html, changes_html(changes))
    console.print(changes_renderable(changes), highlight=False)


def _listed(words: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in words.split(",") if word.strip())


def _layers(words: str, depth: int) -> tuple[int, ...]:
    if words.strip() == "all":
        return tuple(range(depth))
    found: list[int] = []
    for word in _listed(words):
        first, dash, last = word[1:].partition("-")
        try:
            if dash:
                found += range(int(word[0] + first), int(last) + 1)
            else:
                found.append(int(word))
        except ValueError as error:
            raise ArgumentError(f"--layers must be like 0,1 or 0-5 or all, received {words!r}; name blocks.") from error
    return tuple(found)


def _texts(text: str | None, text_file: Path | None, jsonl: Path | None) -> dict[str, str | list[int]]:
    given = [
        name for name, value in (("--text", text), ("--text-file", text_file), ("--jsonl", jsonl)) if value is not None
    ]
    if len(given) != 1:
        raise ArgumentError(
            f"one of --text, --text-file and --jsonl is required, received {' and '.join(given) or 'none'}; pass one."
        )
    if text is not None:
        return {"text": text}
    if text_file is not None:
        return {text_file.name: _read(text_file)}
    assert jsonl is not None, "one source is given"
    return _lines(jsonl)


def _lines(path: Path) -> dict[str, str | list[int]]:
    texts: dict[str, str | list[int]] = {}
    for number, line in enumerate(_read(path).split("\n"), start=1):  # U+2028 may stand in a string
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
        name = str(row.get("name", f"line {number}"))
        texts[name if name not in texts else f"{name} (line {number})"] = value
    if not texts:
        raise DataError(f"'{path}' holds no text, and one line or more is required; fill it.")
    return texts


def _read(path: Path) -> str:
    if not path.is_file():
        raise DataError(f"there is no file '{path}'; check the path.")
    if path.stat().st_size > _MOST_BYTES:
        raise DataError(f"'{path}' is larger than {_MOST_BYTES // 2**20} MiB, the most for one analysis; split it.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"'{path}' is not UTF-8 (byte {error.start}); save it as UTF-8.") from error


@contextmanager
def _progress() -> "Iterator[Progress]":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("margins"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True))

    def update(done: int, total: int) -> None:
        if not bar.tasks:  # the first call: what is wrong was said before it, in one sentence alone
            bar.add_task("margins", total=total)
            bar.start()
        bar.update(bar.tasks[0].id, completed=done, total=total)

    try:
        yield update
    finally:
        if bar.tasks:
            bar.stop()
