"""`support-tokens report`: the page and the table of a report, from its JSON."""

__all__ = ["report"]

from pathlib import Path
from typing import Annotated

import typer

from support_tokens.cli.options import writable


def report(
    source: Annotated[Path, typer.Argument(help="A report.json, or the folder that holds one.")],
    output: Annotated[Path | None, typer.Option(help="Page to write; by default report.html beside the JSON.")] = None,
) -> None:
    """Write the page of a report again, and print its table, from the JSON alone."""
    from support_tokens.files import write_text
    from support_tokens.report.records import RobustnessReport
    from support_tokens.report.robustness import print_report, render_html

    path = source / "report.json" if source.is_dir() else source
    page = path.with_name("report.html") if output is None else output
    with writable(("--output", output)):
        record = RobustnessReport.from_json(path)
        write_text(page, render_html(record))
    print_report(record)
    print(f"Report: {page}")
