"""`support-tokens explore`: a local page on which texts are analyzed."""

__all__ = ["explore"]

from pathlib import Path
from typing import Annotated

import typer

from support_tokens.cli.options import GgufFile
from support_tokens.errors import ArgumentError


def explore(
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model as for analyze; may be repeated. By default all that --runs and --models hold."),
    ] = None,
    gguf_file: GgufFile = None,
    runs: Annotated[Path, typer.Option(help="Folder to search for finished runs.")] = Path("runs"),
    models: Annotated[Path, typer.Option(help="Folder to search for checkpoints, adapters and GGUF files.")] = Path(
        "models"
    ),
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but 127.0.0.1 admits other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 7860,
    characters: Annotated[int, typer.Option(min=1, help="Most characters of a text.")] = 2000,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a text.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Most layers at once.")] = 4,
    per_minute: Annotated[int, typer.Option(min=1, help="Most texts of one visitor a minute.")] = 20,
) -> None:
    """Open a local page: type a text, choose model, layers and view, see and download its margins."""
    from support_tokens.explorer import Explorer, Limits, ModelChoice, find_models, serve_explorer

    if gguf_file is not None and len(model or ()) != 1:
        raise ArgumentError(f"--gguf-file goes with one --model, received {len(model or ())}; name its folder.")
    sources = [ModelChoice(name, name, gguf_file) for name in model] if model else find_models(runs, models)
    explorer = Explorer(sources, Limits(characters, tokens, layers, per_minute))
    serve_explorer(explorer, host=host, port=port, ready=lambda address: print(f"Open {address} (Ctrl-C stops it)"))
