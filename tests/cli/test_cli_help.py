"""Help: quick, of every verb, with one name for one option."""

import subprocess
import sys

import pytest
import typer

from command import run

VERBS = ("demo", "train", "evaluate", "analyze", "generate", "report", "reproduce", "explore", "bench")
HEAVY = {"torch", "transformers", "numpy", "datasets", "pandas", "matplotlib", "starlette", "uvicorn"}


def helped(*words: str) -> tuple[str, list[str]]:
    """What a fresh process prints, and the heavy packages that it imported for it."""
    script = f"""
import sys
from support_tokens.cli import main
sys.argv = ["support-tokens", *{words!r}]
try: main()
finally: print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, done.stderr.strip().splitlines()


@pytest.mark.parametrize("words", [(), *((verb,) for verb in VERBS)], ids=lambda words: " ".join(words) or "root")
def test_help_imports_no_heavy_package(words) -> None:
    printed, imported = helped(*words, "--help")
    assert "Usage: " in printed
    assert imported == ["[]"]


def test_help_lists_every_verb() -> None:
    printed, _ = helped("--help")
    assert [verb for verb in VERBS if f" {verb} " not in printed] == []


def test_version_is_that_of_the_distribution(monkeypatch, capsys) -> None:
    from importlib.metadata import version

    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"support-tokens {version('support-tokens')}\n"


def options() -> dict[str, dict[str, str]]:
    """The help of each option of each verb."""
    from support_tokens.cli import app as application

    group = typer.main.get_command(application.app)
    return {
        name: {option: parameter.help or "" for parameter in command.params for option in parameter.opts}
        for name, command in group.commands.items()
    }


def test_the_verbs_are_these() -> None:
    assert set(options()) == set(VERBS)


def test_an_option_of_several_verbs_has_one_name() -> None:
    former = {"--out", "--other", "--without", "--adapt", "--output-folder", "--gguf"}
    assert {name: former & set(known) for name, known in options().items() if former & set(known)} == {}
    assert [
        name
        for name, known in options().items()
        if name not in ("analyze", "generate", "explore") and "--output" not in known
    ] == []


def test_every_option_says_what_it_does() -> None:
    silent = [f"{name} {option}" for name, known in options().items() for option, text in known.items() if not text]
    assert silent == []
