"""Documentation: code on pages runs and prints what the page shows, links and cited tests exist, the prose is plain."""

import ast
import contextlib
import doctest
import io
import re
import shlex
import traceback
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from support_tokens.cli import app as application

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<comment> *<!-- (?:not run|run by).*?-->\n)?(?P<indent> *)```(?P<language>\w*)[^\n]*\n"
    r"(?P<body>.*?)^(?P=indent)```\n?",
    flags=re.MULTILINE | re.DOTALL,
)
WIDEST = 88  # characters of code that fit into the column of the site; `docs/ruff.toml` formats to it
# Words of an earlier dialect; say who does what, with the terms of PyTorch, Hugging Face and scikit-learn.
DIALECT = re.compile(
    r"\b(whoever|whatever|nobody|nowhere|thereof|wherever|likeliest|mended?|flattering|citizen|peers?|rivals?|"
    r"in place of|of its own accord|without a word|is none|no more than that|as people know|at hand|beforehand|"
    r"asks for|stands? (?:in|beside)|holds? (?:what|that)|lies? in|told (?:in|by)|a (?:token|step|head|matrix) takes|"
    r"found out|whose own|made anew|to be had)\b",
    flags=re.IGNORECASE,
)
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


class Step(NamedTuple):
    """A block of code of a page, and the output that the page shows below it."""

    line: int
    code: str
    shown: str


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def steps(text: str) -> list[Step]:
    """The Python blocks of a page in order. `<!-- not run: reason -->` or `<!-- run by TEST -->` above one skips it."""
    fences = list(FENCE.finditer(text))
    result = []
    for fence, after in zip_longest(fences, fences[1:]):
        if fence["language"] != "python" or fence["comment"]:
            continue
        adjacent = after is not None and not text[fence.end() : after.start()].strip()
        shown = after["body"] if after is not None and adjacent and after["language"] == "text" else ""
        result.append(Step(text.count("\n", 0, fence.start("body")) + 1, fence["body"], shown))
    return result


def failure(text: str, name: str) -> str:
    """What is wrong with the first block that fails; names carry on from one block to the next."""
    names: dict = {"__name__": "page"}
    for line, code, shown in steps(text):
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * (line - 1) + code, name, "exec"), names)
        except Exception:
            return traceback.format_exc()
        if not doctest.OutputChecker().check_output(shown, printed.getvalue(), FLAGS):
            return f"{name}:{line}: the page shows\n{shown}\nand the code prints\n{printed.getvalue()}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_runs_and_prints_what_is_shown(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "docs").symlink_to(ROOT / "docs")  # pages run in a clone, and leave nothing in it
    monkeypatch.chdir(tmp_path)
    wrong = failure(page.read_text(encoding="utf-8"), name_of(page))
    assert not wrong, wrong


def test_wrong_output_and_errors_are_seen() -> None:
    text = "Words\n\n```python\none = 1\n```\n\nmore\n\n```python\nprint(one + 1)\n```\n\n```text\n3\n```\n"
    assert "page:10: the page shows\n3" in failure(text, "page")
    assert failure(text.replace("\n3\n", "\n2\n"), "page") == ""
    assert "the page shows" in failure(text.replace("text", "console"), "page"), "output must be shown"
    assert "NameError" in failure(text.replace("one = 1", "two = 1"), "page")
    skipped = text.replace("```python\nprint", "<!-- not run: needs a GPU -->\n```python\nprint")
    assert failure(skipped, "page") == ""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_fits_the_column_and_has_no_prompts(page: Path) -> None:
    lines = [line for fence in FENCE.finditer(page.read_text(encoding="utf-8")) for line in fence["body"].splitlines()]
    assert [line for line in lines if len(line) > WIDEST or line.lstrip().startswith((">>> ", "$ "))] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "log.md"], ids=name_of)
def test_prose_is_plain(page: Path) -> None:
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    assert [match[0] for match in DIALECT.finditer(prose)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pictures_have_a_text(page: Path) -> None:
    texts = re.findall(r"!\[([^\]]*)\]\(", page.read_text(encoding="utf-8"))
    assert [text for text in texts if len(text.split()) < 4] == []


def commands(text: str) -> list[list[str]]:
    """The words of each `support-tokens` command in the bash blocks of a page."""
    blocks = [fence["body"] for fence in FENCE.finditer(text) if fence["language"] == "bash"]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines if "support-tokens " in line]
    return [line[1:] for line in words if line and line[0].endswith("support-tokens")]


def unknown_options(text: str) -> list[str]:
    verbs = typer.main.get_command(application.app).commands  # type: ignore[attr-defined]
    known = {verb: {"--help", *(name for p in verbs[verb].params for name in p.opts)} for verb in verbs}
    return [
        f"{verb} {word}"
        for verb, *words in commands(text)
        for word in words
        if word.startswith("--") and word.partition("=")[0] not in known.get(verb, set())
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_of_commands_exist(page: Path) -> None:
    assert unknown_options(page.read_text(encoding="utf-8")) == []


def test_unknown_options_are_seen() -> None:
    text = "```bash\nsupport-tokens train --arm ce \\\n    --colour red\n```\n"
    assert unknown_options(text) == ["train --colour"]
    assert commands(text) == [["train", "--arm", "ce", "--colour", "red"]]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tests_that_are_cited_exist(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8")):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8"))
    made = {f"reference/{path.name}.md" for path in (ROOT / "src" / "support_tokens").iterdir()} | {
        f"{page.stem}.ipynb"
    }
    missing = [link for link in links if link.removeprefix("../") not in made and not (page.parent / link).exists()]
    assert missing == []
