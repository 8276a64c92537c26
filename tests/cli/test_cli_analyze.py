"""`support-tokens analyze` as its user meets it."""

import json
from pathlib import Path

import pytest

from command import failed, run
from support_tokens.analysis import MarginReport
from support_tokens.models import build_small_gpt, character_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "model"
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz ABCé\n<>/")
    build_small_gpt(tokenizer, layers=3, heads=2, width=8, context=32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder.parent


def test_all_outputs(monkeypatch, capsys, tmp_path, model) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat\non <b>", encoding="utf-8")
    out = tmp_path / "deep" / "folder"
    files = {name: out / f"report.{name}" for name in ("json", "html", "parquet", "png", "svg")}
    words = [word for name, path in files.items() for word in (f"--{name}", path)]
    code = run(
        monkeypatch, "analyze", "--model", model, "--text-file", text, "--layers", "0,1", "--view", "noise", *words
    )
    captured = capsys.readouterr()
    assert code == 0, captured.err
    made = json.loads(files["json"].read_text())
    assert made["schema_version"] == 2
    assert made["model"] == str(model)
    assert [(entry["layer"], entry["view"]) for entry in made["layers"]] == [(0, "noise"), (1, "noise")]
    assert [token["position"] for token in made["layers"][0]["tokens"]] == list(range(18))
    assert made["texts"][0]["name"] == "text.txt"
    for path in files.values():
        assert path.stat().st_size > 500
        assert f"Wrote {path}" in captured.out
    assert "layer 1 · noise view" in captured.out


@pytest.mark.parametrize(
    ("words", "layers"), [("all", [0, 1, 2]), ("0-1", [0, 1]), ("-1", [2]), ("2, 0", [0, 2]), ("-2--1", [1, 2])]
)
def test_layers_by_ranges(monkeypatch, tmp_path, model, words, layers) -> None:
    out = tmp_path / "report.json"
    code = run(
        monkeypatch,
        "analyze",
        "--model",
        model,
        "--text",
        "abc",
        "--layers",
        words,
        "--view",
        "noise,block",
        "--json",
        out,
    )
    assert code == 0
    report = MarginReport.from_json(out)
    assert [entry.layer for entry in report.record.layers if entry.view == "block"] == layers


def test_many_texts_and_tokens(monkeypatch, tmp_path, model) -> None:
    lines = tmp_path / "texts.jsonl"
    rows = [{"text": "abc", "name": "one"}, {"tokens": [3, 4, 5, 6]}, {"text": "b", "name": "one"}]
    lines.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    out = tmp_path / "report.json"
    assert run(monkeypatch, "analyze", "--model", model, "--jsonl", lines, "--json", out) == 0
    report = MarginReport.from_json(out)
    assert [text.name for text in report.record.texts] == ["one", "line 3", "one (line 5)"]
    assert [len(entry.tokens) for entry in report.record.layers] == [3, 4, 1]


def test_views_again_from_the_record_alone(monkeypatch, tmp_path, model) -> None:
    record, page = tmp_path / "report.json", tmp_path / "report.html"
    words = ["analyze", "--model", model, "--text", "abc", "--json", record, "--html", page]
    assert run(monkeypatch, *words) == 0
    first = page.read_text()
    page.unlink()
    assert run(monkeypatch, "analyze", "--record", record, "--html", page) == 0
    assert page.read_text() == first


def test_compare_with_an_earlier_record(monkeypatch, capsys, tmp_path, model) -> None:
    before, page, changes = tmp_path / "before.json", tmp_path / "changes.html", tmp_path / "changes.json"
    assert run(monkeypatch, "analyze", "--model", model, "--text", "the cat sat", "--json", before) == 0
    words = ["analyze", "--model", model, "--text", "the bat sat", "--compare", before]
    assert run(monkeypatch, *words, "--compare-html", page, "--compare-json", changes, "--k", 3) == 0
    made = json.loads(changes.read_text())
    assert [change["kind"] for change in made["layers"][0]["tokens"]].count("replaced") == 1
    assert made["k"] == 3
    assert "Support tokens compared" in page.read_text()
    assert "From before to after" in capsys.readouterr().out


def test_what_was_done_is_written_when_interrupted(monkeypatch, capsys, tmp_path, model) -> None:
    from support_tokens.analysis import texts

    measure, calls = texts.measure_windows, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(texts, "measure_windows", interrupted)
    out = tmp_path / "report.json"
    code = run(monkeypatch, "analyze", "--model", model, "--text", "abc" * 30, "--batch-size", 1, "--json", out)
    captured = capsys.readouterr()
    assert code == 130
    assert "what was done is written" in captured.err
    made = MarginReport.from_json(out)
    assert not made.record.complete
    assert len(made.select().tokens) == 32


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "one of --text, --text-file and --jsonl is required, received none"),
        (["--text", "a", "--text-file", "b"], "received --text and --text-file"),
        (["--text", ""], "has no tokens"),
        (["--text-file", "missing.txt"], "there is no file 'missing.txt'"),
        (["--text", "a", "--layers", "9"], "layers must be integers from -3 to 2, received 9"),
        (["--text", "a", "--layers", "x"], "--layers must be like"),
        (["--text", "a", "--layers", ""], "one block or more"),
        (["--text", "a", "--view", "both"], "view must be"),
        (["--text", "a", "--figures", "margin"], "--figures may name sigma_min"),
        (["--text", "a", "--dtype", "float16"], "dtype must be one of"),
        (["--text", "a", "--device", "toaster"], "device must be one that torch knows"),
        (["--text", "a", "--gguf-file", "x.gguf"], "there is no file"),
        (["--text", "a", "--compare-html", "x.html"], "--compare is required"),
        (["--text", "a", "--compare", "missing.json"], "'missing.json' cannot be read"),
        (["--text", "a", "--record", "missing.json"], "--record stands alone"),
    ],
)
def test_wrong_words_are_named(monkeypatch, capsys, tmp_path, model, words, said) -> None:
    monkeypatch.chdir(tmp_path)
    code = run(monkeypatch, "analyze", "--model", model, *words)
    failed(code, capsys.readouterr(), said)


@pytest.mark.parametrize("content", ["{", "[1]", '{"name": 3}', '{"tokens": ["a"]}', '{"text": null}', " "])
def test_lines_that_are_no_texts_are_named(monkeypatch, capsys, tmp_path, model, content) -> None:
    lines = tmp_path / "texts.jsonl"
    lines.write_text(content)
    failed(run(monkeypatch, "analyze", "--model", model, "--jsonl", lines), capsys.readouterr(), str(lines))


def test_a_folder_without_a_model_and_none_at_all(monkeypatch, capsys, tmp_path) -> None:
    failed(run(monkeypatch, "analyze", "--model", tmp_path, "--text", "a"), capsys.readouterr(), "holds no model")
    failed(run(monkeypatch, "analyze", "--text", "a"), capsys.readouterr(), "--model is required")


def test_text_that_is_not_utf8(monkeypatch, capsys, tmp_path, model) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("Grüße".encode("latin-1"))
    failed(run(monkeypatch, "analyze", "--model", model, "--text-file", path), capsys.readouterr(), "is not UTF-8")


def test_a_byte_order_mark_is_no_token(monkeypatch, tmp_path, model) -> None:
    path, out = tmp_path / "text.txt", tmp_path / "report.json"
    path.write_bytes(b"\xef\xbb\xbfabc")
    assert run(monkeypatch, "analyze", "--model", model, "--text-file", path, "--json", out) == 0
    assert [token.token for token in MarginReport.from_json(out).select().tokens] == ["a", "b", "c"]


@pytest.mark.parametrize("row", [{"text": ""}, {"tokens": []}])
def test_an_empty_text_is_skipped_and_said_and_the_others_are_analyzed(
    monkeypatch, capsys, tmp_path, model, row
) -> None:
    lines, out = tmp_path / "texts.jsonl", tmp_path / "report.json"
    lines.write_text("\n".join(map(json.dumps, [{"text": "abc"}, row, {"text": "ab"}])))
    code = run(monkeypatch, "analyze", "--model", model, "--jsonl", lines, "--json", out)
    assert code == 1
    assert "support-tokens: 1 of 3 texts had no tokens and were skipped (line 2)." in capsys.readouterr().err
    assert [text.name for text in MarginReport.from_json(out).record.texts] == ["line 1", "line 3"]


@pytest.mark.parametrize(
    ("words", "there"),
    [
        ((), {"surprisal_nats"}),
        (("--figures", "none"), set()),
        (("--figures", "sigma_min, per_head"), {"sigma_min", "per_head"}),
        (("--figures", "all"), {"surprisal_nats", "sigma_min", "gradient_share", "coupling_sign", "per_head"}),
    ],
)
def test_figures_are_cheap_unless_they_are_asked_for(monkeypatch, tmp_path, model, words, there) -> None:
    out = tmp_path / "report.json"
    assert run(monkeypatch, "analyze", "--model", model, "--text", "abc", *words, "--json", out) == 0
    token = MarginReport.from_json(out).select().tokens[2]
    names = ("surprisal_nats", "sigma_min", "gradient_share", "coupling_sign", "per_head")
    assert {name for name in names if getattr(token, name) is not None} == there


@pytest.mark.parametrize("kind", ["json", "html", "png", "parquet", "compare-html"])
def test_a_folder_in_place_of_a_file_is_told_before_any_work(monkeypatch, capsys, tmp_path, kind) -> None:
    words = ["--model", "no/such/model", "--text", "abc", f"--{kind}", tmp_path]
    words += ["--compare", "none.json"] if kind == "compare-html" else []
    failed(run(monkeypatch, "analyze", *words), capsys.readouterr(), f"--{kind} must be a file to write")


def test_a_separator_of_lines_within_a_text_ends_no_line(monkeypatch, tmp_path, model) -> None:
    lines, out = tmp_path / "texts.jsonl", tmp_path / "report.json"
    rows = [{"text": "a\u2028b\u0085c"}, {"text": "ab"}]
    lines.write_bytes("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode("utf-8"))
    assert run(monkeypatch, "analyze", "--model", model, "--jsonl", lines, "--json", out) == 0
    assert [len(entry.tokens) for entry in MarginReport.from_json(out).record.layers] == [5, 2]
