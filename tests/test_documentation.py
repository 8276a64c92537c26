"""Pages keep their word: examples run, tests that are cited exist, links between files lead somewhere."""

import ast
import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", flags=re.MULTILINE | re.DOTALL)
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def examples(text: str) -> str:
    """The fenced sessions of a page, one after the other: names carry on from one to the next."""
    return "\n\n".join(body for _, _, body in FENCE.findall(text) if body.lstrip().startswith(">>> "))


def failures(text: str, name: str, report: list[str]) -> int:
    session = doctest.DocTestParser().get_doctest(examples(text), {"__name__": "page"}, name, name, 0)
    return doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(session, out=report.append).failed


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_examples_run(page: Path) -> None:
    report: list[str] = []
    assert failures(page.read_text(encoding="utf-8"), name_of(page), report) == 0, "".join(report)


def test_a_wrong_example_is_seen() -> None:
    text = "Words\n\n```pycon\n>>> one = 1\n```\n\nmore\n\n```pycon\n>>> one + 1\n3\n```\n"
    report: list[str] = []
    assert failures(text, "page", report) == 1
    assert failures(text.replace("\n3\n", "\n2\n"), "page", report) == 0


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tests_that_are_cited_exist(page: Path) -> None:
    for file, name in re.findall(r"`(tests/\w+\.py)::(\w+)`", page.read_text(encoding="utf-8")):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []
