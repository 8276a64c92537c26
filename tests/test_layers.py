"""The rooms of the package: imports run one way, no circles, and what a room does not list in `__all__` is its own."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "src" / "support_tokens"
ROOT = PACKAGE.name
SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = [path for path in SOURCES if path != PACKAGE / "__init__.py"]
USERS = [path for name in ("tests", "experiments", "benchmarks") for path in (TESTS.parent / name).rglob("*.py")]

# From bottom to top. A room imports rooms of lower levels only.
LEVELS = (
    {"errors", "_lazy"},
    {"files"},
    {"margins"},
    {"law", "models", "report"},
    {"regularizers"},
    {"training", "analysis", "generation"},
    {"robustness", "explorer", "benchmark"},
    {"cli"},
    {"__main__"},
)
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
TORCH_ONLY = {"errors", "_lazy", "files", "margins", "law"}
LONGEST = 400

Import = tuple[str, tuple[str, ...]]
"""Dotted module of a `from` import, or of an `import`, and the names taken from it."""


def module_of(path: Path) -> str:
    parts = (ROOT, *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def imported(source: str, package: tuple[str, ...] = (ROOT,), *, typing: bool = True) -> Iterator[Import]:
    """All imports of a source, also those inside functions; `package` resolves relative ones."""
    tree = ast.parse(source)
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if not typing and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join((*base, *([node.module] if node.module else [])))
            yield name, tuple(alias.name for alias in node.names)


def imports_of(path: Path, *, typing: bool = True) -> set[Import]:
    inside = path.is_relative_to(PACKAGE)
    package = (ROOT, *path.relative_to(PACKAGE).parts[:-1]) if inside else (ROOT,)
    return set(imported(path.read_text(encoding="utf-8"), package, typing=typing))


def breaches(room: str, imports: Iterable[Import], level: Mapping[str, int]) -> list[str]:
    """Imports of a room that are not of a lower level; its own files may import each other."""
    reached = {
        f"{module}.{name}" if module == ROOT else module for module, names in imports for name in (names or ("",))
    }
    others = {name for name in reached if name.startswith(f"{ROOT}.") and room_of(name) != room}
    return sorted(name for name in others if level.get(room_of(name), len(level)) >= level[room])


def resolved(module: str, name: str) -> str:
    """The module that an import of `name` from `module` loads: a submodule of that name, or `module` itself."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return f"{module}.{name}" if (path / name).is_dir() or (path / f"{name}.py").is_file() else module


def public_names(package: str) -> list[str]:
    tree = ast.parse((PACKAGE.joinpath(*package.split(".")[1:]) / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def intrusions(room: str, imports: Iterable[Import]) -> list[str]:
    """Imports of a name that the other room's packages do not list as public."""
    found = []
    for module, names in imports:
        if not module.startswith(f"{ROOT}.") or room_of(module) in {room, "errors", "files", "_lazy"}:
            continue
        if not PACKAGE.joinpath(*module.split(".")[1:]).is_dir():
            found.append(module)
            continue
        found += [f"{module}.{name}" for name in names if name not in public_names(module)]
    return sorted(found)


def test_every_module_stands_in_a_room() -> None:
    assert {room_of(module_of(path)) for path in MODULES} == set(LEVEL)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_run_one_way(path: Path) -> None:
    assert breaches(room_of(module_of(path)), imports_of(path), LEVEL) == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_room_is_entered_by_its_public_names(path: Path) -> None:
    assert intrusions(room_of(module_of(path)), imports_of(path)) == []


@pytest.mark.parametrize("path", [path for path in USERS if "tests" not in path.parts], ids=lambda path: path.name)
def test_experiments_use_public_names(path: Path) -> None:
    assert intrusions("", imports_of(path)) == []


def test_no_circle_between_modules() -> None:
    known = {module_of(path) for path in SOURCES}
    graph = {
        module_of(path): {
            target
            for module, names in imports_of(path, typing=False)
            if module.startswith(ROOT)
            for target in ({resolved(module, name) for name in names} or {module})
            if target in known and target != module_of(path)
        }
        for path in SOURCES
        # A package's own listing imports its modules; a module that imported its package back would be a circle.
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("path", [p for p in MODULES if room_of(module_of(p)) in TORCH_ONLY], ids=name_of)
def test_mathematics_needs_torch_only(path: Path) -> None:
    foreign = {module.split(".")[0] for module, _ in imports_of(path)} - sys.stdlib_module_names - {"torch", ROOT}
    assert foreign == set()


def test_report_reads_records_and_never_a_model() -> None:
    names = set().union(*(imports_of(path) for path in MODULES if room_of(module_of(path)) == "report"))
    assert {module.split(".")[0] for module, _ in names} & {"torch", "transformers", "datasets"} == set()


@pytest.mark.parametrize("statement", ["import support_tokens", "import support_tokens.report.records"])
def test_light_imports_load_no_heavy_package(statement: str) -> None:
    heavy = "{'transformers', 'datasets', 'accelerate', 'matplotlib', 'pandas', 'starlette', 'typer'}"
    script = f"import sys; {statement}; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name == "__init__.py" and p.parent != PACKAGE], ids=name_of)
def test_a_lazy_name_is_no_module_of_its_package(path: Path) -> None:
    """Importing a module binds its name on the package, which would hide a lazily exported function of that name."""
    if "lazy_exports" not in path.read_text(encoding="utf-8"):
        return
    modules = {p.stem for p in path.parent.iterdir()}
    assert modules & set(public_names(module_of(path))) == set()


@pytest.mark.parametrize("path", [p for p in MODULES if p.name != "__main__.py"], ids=name_of)
def test_public_names_come_first(path: Path) -> None:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    assert isinstance(body[0], ast.Expr), "a module begins with its docstring"
    rest = [node for node in body[1:] if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    assert rest, "a module has public names"
    assert isinstance(rest[0], ast.Assign), "__all__ comes first after the docstring"
    assert [ast.unparse(target) for target in rest[0].targets] == ["__all__"]


def test_class_names_are_unique() -> None:
    homes: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name_of(path))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


@pytest.mark.parametrize("path", [*SOURCES, *sorted(TESTS.rglob("*.py"))], ids=lambda path: path.name)
def test_file_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST


def test_a_breach_is_seen() -> None:
    level = {"errors": 0, "margins": 1, "law": 2, "report": 2}
    hidden = "def f():\n    from support_tokens.law import EmbeddingPrior\n"
    assert breaches("margins", set(imported(hidden)), level) == ["support_tokens.law"]
    assert breaches("margins", set(imported("from . import law")), level) == ["support_tokens.law"]
    assert breaches("margins", set(imported("from .law import EmbeddingPrior")), level) == ["support_tokens.law"]
    assert breaches("report", set(imported("from ..law import x", (ROOT, "report"))), level) == ["support_tokens.law"]
    assert breaches("law", set(imported("from support_tokens import Margins")), level) == ["support_tokens.Margins"]
    assert breaches("law", set(imported("import support_tokens.margins, torch.nn")), level) == []


def test_an_intrusion_is_seen() -> None:
    assert intrusions("law", [("support_tokens.margins.state", ("AttentionState",))]) == [
        "support_tokens.margins.state"
    ]
    assert intrusions("law", [("support_tokens.margins", ("_hidden",))]) == ["support_tokens.margins._hidden"]
    assert intrusions("law", [("support_tokens.margins", ("Margins",))]) == []
    assert intrusions("margins", [("support_tokens.margins.state", ("AttentionState",))]) == []
