"""SmallGPT: one character is one token, and the files are those of stock transformers."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2LMHeadModel, set_seed

from support_tokens.errors import ArgumentError, DataError, RunFolderError
from support_tokens.models import build_small_gpt, character_tokenizer, encode, load_small_gpt, unknown_rate

TEXT = "In the beginning <unk> God created\r\n the heaven , and don ' t æ\N{SNOWMAN}\N{GRINNING FACE}"
SIZE = {"layers": 1, "heads": 2, "width": 8, "context": 16}


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60))
def test_every_character_is_one_token_and_the_table_agrees_with_the_tokenizer(text: str):
    tokenizer = character_tokenizer(TEXT)
    ids = encode(tokenizer, text)
    assert len(ids) == len(text)
    assert ids.tolist() == tokenizer(text)["input_ids"]


@given(st.lists(st.sampled_from(TEXT), max_size=60).map("".join))
def test_text_of_the_alphabet_comes_back_as_it_was(text: str):
    tokenizer = character_tokenizer(TEXT)
    assert tokenizer.decode(encode(tokenizer, text).tolist()) == text


def test_literal_names_of_special_tokens_are_ordinary_text():
    tokenizer = character_tokenizer(TEXT)
    assert tokenizer.tokenize("<unk>") == list("<unk>")
    assert unknown_rate(tokenizer, encode(tokenizer, "<unk>")) == 0.0


def test_unseen_characters_are_the_unknown_token_and_counted():
    tokenizer = character_tokenizer("abc")
    assert unknown_rate(tokenizer, encode(tokenizer, "abcd")) == 0.25


def test_order_of_the_text_does_not_change_the_ids():
    assert character_tokenizer("cab").get_vocab() == character_tokenizer("abbc").get_vocab()


def test_padding_is_the_first_token_and_masked():
    tokenizer = character_tokenizer("ab")
    batch = tokenizer(["a", "ab"], padding=True)
    assert sorted(batch["attention_mask"]) == [[1, 0], [1, 1]]
    assert tokenizer.pad_token_id == 0


def test_an_empty_text_has_no_alphabet():
    with pytest.raises(DataError, match="text must have at least one character"):
        character_tokenizer("")


def test_initial_weights_are_those_of_gpt2():
    set_seed(0)
    model = build_small_gpt(character_tokenizer(TEXT), layers=2, heads=4, width=256, context=64)
    blocks = model.transformer.h
    assert blocks[0].attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert blocks[0].mlp.c_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.02)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_gelu_is_the_function_of_gpt2():
    set_seed(0)
    model = build_small_gpt(character_tokenizer(TEXT), **SIZE).double()
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    assert torch.allclose(model.transformer.h[0].mlp.act(x), 0.5 * x * (1 + torch.tanh(inner)), atol=1e-14)


def test_heads_divide_the_width():
    with pytest.raises(ArgumentError, match="heads=3 and width=8"):
        build_small_gpt(character_tokenizer("ab"), **{**SIZE, "heads": 3})


def test_files_load_in_stock_transformers_without_this_package(tmp_path: Path):
    tokenizer = character_tokenizer(TEXT)
    model = build_small_gpt(tokenizer, **SIZE).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = encode(tokenizer, TEXT[:16])
    expected = model(ids[None]).logits[0, -1, :3].tolist()
    script = f"""
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(tmp_path)!r})
model, info = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"], info
text = {TEXT[:16]!r}
batch = tokenizer(text, return_tensors="pt")
assert tokenizer.decode(batch["input_ids"][0]) == text
assert "support_tokens" not in sys.modules
print(model(**batch).logits[0, -1, :3].tolist())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert torch.allclose(torch.tensor(eval(done.stdout)), torch.tensor(expected), atol=1e-6)


def test_load_reads_a_run_folder_and_refuses_what_is_none(tmp_path: Path):
    tokenizer = character_tokenizer(TEXT)
    model = build_small_gpt(tokenizer, **SIZE)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    loaded, read = load_small_gpt(tmp_path)
    assert isinstance(loaded, GPT2LMHeadModel)
    assert not loaded.training
    assert read.get_vocab() == tokenizer.get_vocab()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(RunFolderError, match="cannot be read"):
        load_small_gpt(tmp_path)
    with pytest.raises(RunFolderError, match=r"config\.json is missing"):
        load_small_gpt(tmp_path / "nothing")


def test_encode_refuses_a_tokenizer_of_words():
    tokenizer = character_tokenizer("ab")
    tokenizer.add_tokens(["word"])
    with pytest.raises(ArgumentError, match="must be a character tokenizer"):
        encode(tokenizer, "ab")
