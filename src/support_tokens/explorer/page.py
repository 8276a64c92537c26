"""The page of the explorer: a form, and below it the margins page of a result."""

__all__ = ["ASSETS", "result_page", "start_page"]

from importlib import resources

import jinja2
from markupsafe import escape

from support_tokens.explorer.service import Explorer

_EXAMPLE = "The capital of France is Paris, and the river that runs through it is called the Seine."
_FILES = resources.files("support_tokens.explorer")
ASSETS = {name: _FILES.joinpath(name).read_text(encoding="utf-8") for name in ("explorer.css", "explorer.js")}
"""Style and script of the form, by name."""

_HEAD = '<link rel="stylesheet" href="/explorer.css"><script src="/explorer.js" defer></script>'
_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; base-uri 'none'; form-action 'none'"
)
_START = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Support tokens</title>
{_HEAD}
</head>
<body class="start">
<main>
<h1>Support tokens</h1>
<p>How far is each token from the point where attention degenerates? Type a text: its support tokens, the weak links,
are those of smallest margin. Everything is computed on this machine.</p>
%s
</main>
</body>
</html>
"""


def start_page(explorer: Explorer) -> str:
    """The form alone."""
    return _START % _form(explorer)


def result_page(explorer: Explorer, name: str, page: str) -> str:
    """The form above the page of a result.

    Args:
        explorer: Models and limits.
        name: Name of the result.
        page: HTML of `margins_html`; its policy is opened for the script, the style and the requests of the form.
    """
    for before, after in (
        (escape("default-src 'none';"), escape("default-src 'none'; connect-src 'self';")),
        (escape("script-src '"), escape("script-src 'self' '")),
        (escape("style-src '"), escape("style-src 'self' '")),
        ("</head>", f"{_HEAD}\n</head>"),
        ("<main>", f"<main>\n{_form(explorer, name)}"),
    ):
        head, found, rest = page.partition(str(before))
        assert found, f"{before} must be in the page of a record"
        page = head + str(after) + rest
    return page


def _form(explorer: Explorer, name: str | None = None) -> str:
    template = jinja2.Environment(autoescape=True).from_string(_FILES.joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(limits=explorer.limits, labels=explorer.labels, example=_EXAMPLE, name=name)
