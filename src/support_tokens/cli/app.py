"""The verbs as one application; a verb imports what it needs when it runs, so that help is quick."""

__all__ = ["app"]

from importlib.metadata import version
from typing import Annotated

import typer

from support_tokens.cli import analyze, bench, demo, evaluate, explore, generate, report, reproduce, train

app = typer.Typer(
    name="support-tokens",
    help="Stability margins and support tokens of causal language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"support-tokens {version('support-tokens')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


for _verb in (
    demo.demo, train.train, evaluate.evaluate, analyze.analyze, generate.generate, report.report, reproduce.reproduce,
    explore.explore, bench.bench,
):  # fmt: skip
    app.command()(_verb)
