"""`support-tokens generate` as its user meets it."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from command import failed, run
from support_tokens.cli import generate
from support_tokens.models import build_small_gpt, character_tokenizer
from support_tokens.report.records import GeneratedToken, Generation, GenerationRecord


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "model"
    torch.manual_seed(0)
    tokenizer = character_tokenizer("abcdefgh [/]\x1b\n")
    build_small_gpt(tokenizer, layers=2, heads=2, width=8, context=32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder.parent


def test_text_is_streamed_and_its_signals_are_written(monkeypatch, capsys, tmp_path, model) -> None:
    out = tmp_path / "deep" / "g.json"
    words = ("--max-new-tokens", 6, "--layers", "0,1", "--stop-above", "TokenEntropy=99", "--json", out)
    code = run(monkeypatch, "generate", "--model", model, "--prompt", "a [b]", "--prompt", "[/red] c", *words)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    record = GenerationRecord.from_json(out)
    assert (record.model, record.settings["layers"], record.settings["sample"]) == (str(model), [0, 1], False)
    assert record.settings["stop_above"] == {"TokenEntropy": 99.0}
    for made in record.generations:
        assert len(made.tokens) == 6
        assert made.prompt + made.text.replace("\x1b", "␛") in captured.out
        assert "The model has no end token" in made.sentence
        assert "TokenEntropy never rose above 99" in captured.out
        assert "NegativeLogMargin (layer=1)" in made.tokens[0].signals
    assert json.loads(out.read_text())["kind"] == "generation"
    assert "\x1b" not in captured.out  # neither what the model writes nor a colour where there is none


def test_draws_are_those_of_their_seed(monkeypatch, tmp_path, model) -> None:
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        words = ("--sample", "--margin-rule", "temperature:pivot=1,slope=0.5", "--top-p", 0.9, "--seed", seed)
        assert run(
            monkeypatch, "generate", "--model", model, "--prompt", "ab", "--max-new-tokens", 12, *words,
            "--json", tmp_path / name,
        ) == 0  # fmt: skip
        texts.append(GenerationRecord.from_json(tmp_path / name).generations[0].text)
    assert texts[0] == texts[1] != texts[2]


def test_a_prompt_comes_from_a_file_and_a_text_may_abstain(monkeypatch, capsys, tmp_path, model) -> None:
    (tmp_path / "p.txt").write_text("abc", encoding="utf-8")
    words = ("--max-new-tokens", 4, "--stop-above", "TokenEntropy=0", "--json", tmp_path / "g.json")
    assert run(monkeypatch, "generate", "--model", model, "--prompt-file", tmp_path / "p.txt", *words) == 0
    (made,) = GenerationRecord.from_json(tmp_path / "g.json").generations
    assert (made.finish_reason, made.text, made.prompt) == ("abstained", "", "abc")
    assert "abstained before token 1: TokenEntropy was" in " ".join(capsys.readouterr().out.split())


def test_an_interrupt_keeps_what_was_written(monkeypatch, capsys, tmp_path, model) -> None:
    def interrupted(self, row, token) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate._Stream, "token", interrupted)
    words = ("--prompt", "a", "--prompt", "b", "--max-new-tokens", 4, "--json", tmp_path / "g.json")
    assert run(monkeypatch, "generate", "--model", model, *words) == 130
    (made,) = GenerationRecord.from_json(tmp_path / "g.json").generations
    assert (made.finish_reason, len(made.tokens)) == ("interrupted", 1)
    assert "interrupted; what was written is kept" in capsys.readouterr().err


def test_a_table_and_a_page_hold_the_signals_of_every_token(monkeypatch, capsys, tmp_path, model) -> None:
    words = (
        "--prompt",
        "ab",
        "--max-new-tokens",
        3,
        "--table",
        "--html",
        tmp_path / "g.html",
        "--json",
        tmp_path / "g",
    )
    assert run(monkeypatch, "generate", "--model", model, *words) == 0
    (made,) = GenerationRecord.from_json(tmp_path / "g").generations
    printed, page = capsys.readouterr().out, (tmp_path / "g.html").read_text(encoding="utf-8")
    for token in made.tokens:
        assert f"{token.signals['TokenEntropy']:.3f}" in printed
        assert f'title="TokenEntropy {token.signals["TokenEntropy"]:.3f}"' in page
    assert "<script" not in page


def test_tokens_are_coloured_by_entropy_on_a_fixed_scale_with_a_legend(monkeypatch, capsys, model) -> None:
    from rich.console import Console

    monkeypatch.setattr(
        "rich.console.Console", lambda: Console(force_terminal=True, color_system="256", no_color=False)
    )
    stream = generate._Stream("", "TokenEntropy")
    for entropy in (0.1, 3.9):  # nats, of a scale from 0 to 4
        stream.token(
            0, GeneratedToken(1, f"<{entropy}>", {"TokenEntropy": entropy, "NegativeLogMargin (layer=0)": 9.0})
        )
    stream.end(Generation("", 1, "<0.1><3.9>", (), "length", "Done."), False)
    printed = capsys.readouterr().out
    assert "\x1b[1;31m<3.9>" in printed  # bold red
    assert "\x1b[1;31m<0.1>" not in printed
    assert "TokenEntropy 0.000" in printed and "4.000" in printed


def test_a_chat_goes_through_the_template_of_the_model(monkeypatch, capsys, tmp_path, model) -> None:
    words = ("--prompt", "ab", "--chat", "--max-new-tokens", 2)
    code = run(monkeypatch, "generate", "--model", model, *words)
    failed(code, capsys.readouterr(), "--chat requires a chat template", "leave --chat out")
    folder = tmp_path / "chat"
    shutil.copytree(model / "model", folder)
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}/{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    assert run(monkeypatch, "generate", "--model", folder, *words, "--json", tmp_path / "g.json") == 0
    (made,) = GenerationRecord.from_json(tmp_path / "g.json").generations
    assert (made.prompt, made.prompt_tokens) == ("[ab]/", 5)


@pytest.mark.parametrize(
    "words", [("--layers", "5"), ("--stop-above", "Entropy=1"), ("--view", "both"), ("--seed", 2**70)]
)
def test_a_mistake_is_told_before_the_prompt_is_echoed(monkeypatch, capsys, model, words) -> None:
    code = run(monkeypatch, "generate", "--model", model, "--prompt", "abc", *words)
    captured = capsys.readouterr()
    failed(code, captured)
    assert captured.out == ""


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ((), "one of --prompt and --prompt-file is required, received none"),
        (("--prompt", "a", "--prompt-file", "b"), "received both"),
        (("--prompt", ""), "prompt 0 must have at least one token"),
        (("--prompt", "a", "--prompt", "a" * 30), "received 30 tokens"),
        (("--prompt", "a", "--temperature", 2), "--temperature needs --sample"),
        (("--prompt", "a", "--sample", "--margin-rule", "heat"), "--margin-rule must be temperature or min-p"),
        (("--prompt", "a", "--sample", "--margin-rule", "min-p:slope"), "--margin-rule must be temperature or min-p"),
        (("--prompt", "a", "--sample", "--margin-rule", "min-p:slope=-1"), "slope >= 0"),
        (("--prompt", "a", "--stop-above", "TokenEntropy"), "--stop-above must be SIGNAL=VALUE"),
        (("--prompt", "a", "--stop-above", "Entropy=1"), "signals may name"),
        (("--prompt", "a", "--layers", "5"), "layers must be"),
        (("--prompt", "a", "--stop-above", "TokenEntropy=1", "--stop-above", "TokenEntropy=2"), "name a signal once"),
        (("--prompt", "a", "--signals", ""), "--signals must name one signal or more"),
        (("--prompt", "a", "--signals", "Entropy"), "signals may name"),
        (("--prompt", "a", "--color", "Margin"), "--color must be one of the signals, TokenEntropy"),
        (("--prompt", "a", "--signals", "TokenEntropy", "--color", "NegativeLogMargin"), "add it to them"),
        (("--prompt", "a", "--json", "."), "--json must be a file to write"),
        (("--prompt", "a", "--html", "."), "--html must be a file to write"),
        (("--prompt", "a", "--json", "x", "--html", "x"), "must name different files"),
        (("--prompt", "\udcff"), "half a surrogate pair"),
        (("--prompt-file", "none-such.txt"), "there is no file"),
    ],
)
def test_what_does_not_fit_is_one_sentence(monkeypatch, capsys, model, words, match) -> None:
    code = run(monkeypatch, "generate", "--model", model, "--max-new-tokens", 8, *words)
    failed(code, capsys.readouterr(), match)
