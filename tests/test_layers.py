"""The data flows one way: a module imports only what stands above it in the tree of the package's docstring."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "support_tokens"
ROOT = PACKAGE.name
SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = [path for path in SOURCES if path != PACKAGE / "__init__.py"]
MATHEMATICS = [
    "attention",
    "moments",
    "lapack",
    "inverse",
    "logdet",
    "assembly",
    "jacobian",
    "margins",
    "fused",
    "screen",
    "barrier",
    "law",
]
LONGEST = 400


def tree(docstring: str) -> list[str]:
    """Names of the modules in the order of the tree: indented lines of a name, space, and a description."""
    return re.findall(r"^ {4}(\w+)(?:\.py|/)? {2,}\S", docstring, flags=re.MULTILINE)


ORDER = tree(ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")), clean=False) or "")


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(source: str, package: tuple[str, ...] = (ROOT,)) -> Iterator[str]:
    """Absolute dotted names of all that a source imports, also in functions; `package` resolves relative ones."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join((*base, *([node.module] if node.module else [])))
            yield from ([f"{name}.{alias.name}" for alias in node.names] if name == ROOT else [name])


def imports_of(path: Path) -> set[str]:
    return set(imported(path.read_text(encoding="utf-8"), (ROOT, *path.relative_to(PACKAGE).parts[:-1])))


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def breaches(of: str, names: set[str], order: list[str]) -> list[str]:
    """Imports of a layer that do not stand above it; its own files may import each other."""
    assert of in order, f"the tree in the package's docstring does not name {of}"
    inner = {name.split(".")[1] for name in names if name.startswith(f"{ROOT}.")}
    above = order[: order.index(of)]
    return sorted(name for name in inner if name != of and name not in above)


def test_tree_names_every_module_once() -> None:
    assert len(ORDER) == len(set(ORDER))
    assert sorted(ORDER) == sorted({layer(path) for path in MODULES})


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_imports_only_what_stands_above(path: Path) -> None:
    assert breaches(layer(path), imports_of(path), ORDER) == []


@pytest.mark.parametrize("path", [p for p in MODULES if layer(p) in MATHEMATICS], ids=name_of)
def test_mathematics_needs_torch_only(path: Path) -> None:
    foreign = {name.split(".")[0] for name in imports_of(path)} - sys.stdlib_module_names - {"torch", ROOT}
    assert foreign == set()
    assert {name.split(".")[1] for name in imports_of(path) if name.startswith(ROOT)} <= {"errors", *MATHEMATICS}


def test_report_reads_results_and_never_a_model() -> None:
    names = set().union(*(imports_of(path) for path in MODULES if layer(path) == "report"))
    assert {name.split(".")[0] for name in names} & {"torch", "transformers", "datasets"} == set()


@pytest.mark.parametrize("path", [p for p in MODULES if p.name != "__main__.py"], ids=name_of)
def test_public_names_come_first(path: Path) -> None:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    assert isinstance(body[0], ast.Expr), "a module begins with its docstring"
    rest = [node for node in body[1:] if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    assert rest, "a module has public names"
    assert isinstance(rest[0], ast.Assign), "__all__ comes first after the docstring"
    assert [ast.unparse(target) for target in rest[0].targets] == ["__all__"]


@pytest.mark.parametrize("path", [*SOURCES, *sorted(Path(__file__).parent.glob("*.py"))], ids=lambda path: path.name)
def test_file_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST


def test_a_breach_is_seen() -> None:
    order = ["errors", "margins", "law", "report"]
    hidden = "def f():\n    from support_tokens.law import EmbeddingPrior\n"
    assert breaches("margins", set(imported(hidden)), order) == ["law"]
    assert breaches("margins", set(imported("from . import law")), order) == ["law"]
    assert breaches("margins", set(imported("from .law import EmbeddingPrior")), order) == ["law"]
    assert breaches("report", set(imported("from ..law import x", (ROOT, "report"))), order) == []
    assert breaches("law", set(imported("from support_tokens import Margins")), order) == ["Margins"]
    assert breaches("law", set(imported("import support_tokens.margins, torch.nn")), order) == []
