"""Hooks of mkdocs: a reference page for each module that exists, and formulas as MathML, which need no network."""

import ast
import html
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "support_tokens"
SPAN = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\s*\\(?P<open>[(\[])(?P<tex>.*?)\\[)\]]\s*</(?P=tag)>', re.DOTALL
)
# The converter sets names of functions like products of letters, or far from their argument.
FUNCTION = re.compile(r"\\(log|det|exp|tanh)(?![a-zA-Z_^])|\\(?:mathrm|operatorname)\{([A-Za-z]{2,})\}(?!_|\^)")


def modules() -> list[str]:
    """Modules with public names, in the order of the tree in the package's docstring, any others after it."""
    docstring = ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")), clean=False) or ""
    order = re.findall(r"^ {4}(\w+)(?:\.py|/)? {2,}\S", docstring, flags=re.MULTILINE)
    there = {
        path.stem if path.suffix else path.name
        for path in PACKAGE.iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists()) and not path.name.startswith("_")
    }
    return [name for name in order if name in there] + sorted(there - set(order))


def parts(name: str) -> list[str]:
    """The module and, of a folder, its public files."""
    inner = sorted(path.stem for path in (PACKAGE / name).glob("*.py") if not path.stem.startswith("_"))
    return [name, *(f"{name}.{part}" for part in inner)]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages of the modules below the heading Reference."""
    assert config.nav is not None
    config.nav.append({"Reference": [f"reference/{name}.md" for name in modules()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Makes the pages of the modules."""
    for name in modules():
        text = f"---\ntitle: {name}\n---\n\n" + "\n\n".join(f"::: support_tokens.{part}" for part in parts(name))
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


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
        return SPAN.sub(mathml, content)
    except ValueError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error
