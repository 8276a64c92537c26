"""The repository as a whole: pins that match the declared ranges, one way to check, nothing of anyone's machine."""

import ast
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import support_tokens

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split()]
PINNED = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in PINS}
SOURCES = sorted((ROOT / "src").rglob("*.py"))
FOLDERS = [".ci", "benchmarks", "docs", "experiments", "src", "tests", "tools"]
TEXT = {
    ".cfg",
    ".css",
    ".csv",
    ".html",
    ".json",
    ".jsonl",
    ".md",
    ".py",
    ".sh",
    ".svg",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
}
PLACES = re.compile("|".join(rf"(?<![\w.]){re.escape(str(place))}/" for place in (ROOT, Path.home())))


def files() -> list[Path]:
    inner = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    return sorted(path for path in [*ROOT.glob("*"), *inner] if path.is_file() and path.suffix in {*TEXT, ""})


def declared() -> list[Requirement]:
    project = PYPROJECT["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    groups = [line for lines in PYPROJECT["dependency-groups"].values() for line in lines]
    return [Requirement(line) for line in [*project["dependencies"], *extras, *groups]]


@pytest.mark.parametrize("requirement", [r for r in declared() if r.name != "support-tokens"], ids=str)
def test_pin_lies_in_the_declared_range(requirement: Requirement) -> None:
    assert requirement.specifier, "a dependency states the least version that is known to work"
    assert requirement.specifier.contains(PINNED[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("pin", PINS, ids=str)
def test_pin_is_exact_and_of_no_machine(pin: Requirement) -> None:
    assert re.fullmatch(r"==[\w.]+", str(pin.specifier)), "no build tag, no path, no range"
    assert pin.url is None
    assert not pin.name.lower().startswith(("nvidia", "cuda", "support"))


def test_package_needs_torch_only() -> None:
    assert [Requirement(line).name for line in PYPROJECT["project"]["dependencies"]] == ["torch"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_what_a_source_imports_is_declared(path: Path) -> None:
    project = PYPROJECT["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    names = {Requirement(line).name.replace("-", "_") for line in lines} | sys.stdlib_module_names
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= names, ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            assert node.module.split(".")[0] in names, ast.unparse(node)


def test_continuous_integration_runs_what_everyone_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^exec make test\b", script.read_text(encoding="utf-8"), flags=re.MULTILINE)
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^test: lint types tests docs\b", rules, flags=re.MULTILINE)


def test_no_file_tells_of_a_machine() -> None:
    assert PLACES.search(f"file://{Path.home()}/notes")
    found = {}
    for path in files():
        for match in PLACES.finditer(path.read_text(encoding="utf-8")):
            found[str(path.relative_to(ROOT))] = match[0]
    assert found == {}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_source_loads_no_code_and_hides_no_error(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            assert not names & {"pickle", "dill", "cloudpickle", "marshal", "shelve"}, ast.unparse(node)
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in {"torch.load", "eval", "exec"}, ast.unparse(node)
        if isinstance(node, ast.ExceptHandler):
            silent = all(isinstance(inner, ast.Pass) for inner in node.body)
            broad = node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"}
            assert not (silent and broad), f"line {node.lineno}"


def test_public_names_are_there() -> None:
    assert sorted(set(support_tokens.__all__)) == sorted(support_tokens.__all__)
    assert [name for name in support_tokens.__all__ if not hasattr(support_tokens, name)] == []
