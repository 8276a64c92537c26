"""Tokens as people know them: byte-level vocabularies, byte fallback, special tokens, and plain ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support_tokens.analysis import token_texts
from support_tokens.models import character_tokenizer


@pytest.fixture(scope="module")
def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, with two merges that cut a character of four bytes in halves."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate(dict.fromkeys([*letters, "ðŁ", "Ġt", "<end>"]))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("ð", "Ł"), ("Ġ", "t")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def texts(tokenizer, text: str) -> list:
    return token_texts(tokenizer, tokenizer(text)["input_ids"], text)


def test_split_characters_are_made_whole(bytes_tokenizer) -> None:
    found = texts(bytes_tokenizer, "a🙂 t")
    assert [token.token for token in found] == ["a", "<0xF0><0x9F>", "<0x99>", "<0x82>", " t"]
    assert [token.shown for token in found] == [None, "🙂⟨1/3⟩", "⟨2/3⟩", "⟨3/3⟩", None]


def test_special_tokens_stand_as_they_are(bytes_tokenizer) -> None:
    assert [token.token for token in texts(bytes_tokenizer, "é<end>")] == ["<0xC3>", "<0xA9>", "<end>"]


def test_bytes_that_are_no_text_are_shown_as_bytes(bytes_tokenizer) -> None:
    ids = bytes_tokenizer("🙂é")["input_ids"]
    found = token_texts(bytes_tokenizer, [ids[1], ids[0], ids[-2]])
    assert [token.token for token in found] == ["<0x99>", "<0xF0><0x9F>", "<0xC3>"]
    assert [token.shown for token in found] == [None, None, None]


@settings(max_examples=60)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_nothing_of_a_text_is_lost(text) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    found = texts(fast, text)
    assert len(found) == len(text.encode())
    first = [token for token in found if token.shown is None or token.shown[0] != "⟨"]
    shown = [(token.shown or token.token).partition("⟨1/")[0] if token.shown else token.token for token in first]
    assert "".join(shown) == text or "⟨" in text


def test_byte_fallback_and_the_space_that_only_the_vocabulary_puts_there() -> None:
    names = ["<unk>", "▁a", "b", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>"))
    replace = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse()])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    ids = [1, 2, 1, *(names.index(f"<0x{byte:02X}>") for byte in "é".encode())]
    assert [token.token for token in token_texts(fast, ids, "ab aé")] == ["a", "b", " a", "<0xC3>", "<0xA9>"]
    assert [token.shown for token in token_texts(fast, ids, "ab aé")] == [None, None, None, "é⟨1/2⟩", "⟨2/2⟩"]
    assert token_texts(fast, ids)[0].token == " a"


def test_characters() -> None:
    tokenizer = character_tokenizer("ab ↵\n")
    assert "".join(token.token for token in texts(tokenizer, "a b\n")) == "a b\n"
    assert texts(tokenizer, "z")[0].token == "\ufffd"
