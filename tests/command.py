"""The command line from a test, and the smallest run folder that it can be pointed at."""

__all__ = ["failed", "make_run", "run"]

import sys

import pytest

from support_tokens.cli import main
from support_tokens.models import build_small_gpt, character_tokenizer


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Exit code of the command with these words."""
    monkeypatch.setattr(sys, "argv", ["support-tokens", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def failed(code: int, captured, *said: str) -> None:
    """Exit 1 and one sentence on stderr that says each of these."""
    assert code == 1
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("support-tokens: ")
    assert "Traceback" not in captured.err
    for part in said:
        assert part in lines[0]


def make_run(folder, *, layers: int = 3):
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz <>/")
    build_small_gpt(tokenizer, layers=layers, heads=2, width=8, context=64).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder
