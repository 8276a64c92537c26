"""Hooks of mkdocs: a reference page for each room, pages and notebooks made at build time, formulas as MathML."""

import ast
import html
import json
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from support_tokens.report.records import MarginRecord
from support_tokens.report.tokens import margins_html

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "support_tokens"
RECORD = ROOT / "docs" / "records" / "smollm2.json"
# On the site, pages that can be used take the place of these pictures, which GitHub shows.
FRAMES = {"images/margins-wide.png": "margins.html", "fold.svg": "fold.html"}
SPAN = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\s*\\(?P<open>[(\[])(?P<tex>.*?)\\[)\]]\s*</(?P=tag)>', re.DOTALL
)
# The converter sets names of functions like products of letters, or far from their argument.
FUNCTION = re.compile(r"\\(log|det|exp|tanh)(?![a-zA-Z_^])|\\(?:mathrm|operatorname)\{([A-Za-z]{2,})\}(?!_|\^)")


def packages(room: str) -> list[Path]:
    """The `__init__` files of a room that list public names, the room's own first."""
    inits = sorted((PACKAGE / room).rglob("__init__.py"), key=lambda path: (len(path.parts), path))
    return [path for path in inits if exported(path)]


def exported(path: Path) -> list[str]:
    """The names in `__all__` of a module, without importing it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def sources(path: Path) -> dict[str, str]:
    """Where an `__init__` imports each name from: a function may have the name of its module."""
    imports = [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)
    ]
    return {alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}


def rooms() -> list[str]:
    """Rooms in the order of the tree in the docstring of the package; errors stand at the end."""
    docstring = ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))) or ""
    names = re.findall(r"^(\w+)/? {2,}\S", docstring, flags=re.MULTILINE)
    return [name for name in names if (PACKAGE / name).is_dir()] + ["errors"]


def reference(room: str) -> str:
    """Markdown of one room: the sentence of each package, then its public names, each of them once."""
    lines = [f"# {room}"]
    paths = packages(room) if (PACKAGE / room).is_dir() else [PACKAGE / f"{room}.py"]
    seen: set[str] = set()
    for path in paths[1:]:
        seen.update(exported(path))
    for number, path in enumerate(paths):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines += [f"## {module}" if number else "", docstring]
        names = [name for name in exported(path) if number or name not in seen]
        found = sources(path)
        lines += [
            f"::: {found.get(name, f'{module}.{name}')}\n    options:\n      heading_level: {3 if number else 2}"
            for name in names
        ]
    return "\n\n".join(line for line in lines if line) + "\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts a page for each room below the heading Reference."""
    assert config.nav is not None
    pages = next(entry["Reference"] for entry in config.nav if isinstance(entry, dict) and "Reference" in entry)
    pages += [{room: f"reference/{room}.md"} for room in rooms()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Generates the pages of the rooms, the page of margins of the home page, and a notebook of each tutorial."""
    for room in rooms():
        files.append(File.generated(config, f"reference/{room}.md", content=reference(room)))
    record = MarginRecord.from_json(RECORD)
    files.append(File.generated(config, "margins.html", content=margins_html(record, title="SmolLM2-135M-Instruct")))
    for path in sorted((ROOT / "docs" / "tutorials").glob("*.md")):
        content = json.dumps(notebook(path.read_text(encoding="utf-8")))
        files.append(File.generated(config, f"tutorials/{path.stem}.ipynb", content=content))
    return files


def notebook(page: str) -> dict:
    """A tutorial as a Jupyter notebook: Python blocks become cells, the text blocks below them their output."""
    cells = []
    for part in re.split(r"^(```(?:python|text)\n.*?^```\n)", page, flags=re.MULTILINE | re.DOTALL):
        block = re.fullmatch(r"```(python|text)\n(.*)```\n", part, flags=re.DOTALL)
        if block is None and part.strip():
            cells.append({"cell_type": "markdown", "metadata": {}, "source": part.strip()})
        elif block and block[1] == "python":
            cells.append(
                {"cell_type": "code", "metadata": {}, "execution_count": None, "source": block[2], "outputs": []}
            )
        elif block:
            cells[-1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": block[2]}]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}


def on_page_markdown(markdown: str, **_: object) -> str:
    """Puts pages that can be used in the place of their pictures."""

    def frame(match: re.Match[str]) -> str:
        page = FRAMES.get(match["file"])
        source = f'<iframe class="page" src="{page}" title="{match["alt"]}" loading="lazy"></iframe>'
        return f"{source}\n\n[Open it by itself]({page})" if page else match[0]

    return re.sub(r"^!\[(?P<alt>[^\]]*)\]\((?P<file>[^)]*)\)$", frame, markdown, flags=re.MULTILINE)


def mathml(match: re.Match[str]) -> str:
    """One formula as MathML, with its source as the text that a reader without MathML sees on hovering."""
    tex = " ".join(html.unescape(match["tex"]).split())
    said = FUNCTION.sub(lambda name: rf"\text{{{name[1] or name[2]}}}\,", tex).replace("\\ ", r"\;")
    block = match["open"] == "["
    try:
        formula = convert(said, display="block" if block else "inline")
    except Exception as error:
        raise ValueError(f"a formula cannot be set as MathML ({error!r}): {tex}") from error
    if "\\" in formula:
        raise ValueError(f"a formula has a command that MathML knows no sign for: {tex}")
    return f'<{match["tag"]} class="formula" title="{html.escape(tex)}">{formula}</{match["tag"]}>'


def on_page_content(content: str, page: Page, **_: object) -> str:
    """Sets the formulas of a page; one that cannot be set stops the build."""
    try:
        return SPAN.sub(mathml, content).replace("<code>tests/", '<code class="long">tests/')
    except ValueError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error
