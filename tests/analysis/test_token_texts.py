"""Text of each token under every kind of vocabulary, of special tokens, and of ids beyond the tokenizer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
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


CORPUS = ["the cat sat on the mat and the dog sat on the log", "hello, world: this is a small text of words!"] * 20


def metaspace(model, trainer, **options) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(**options), decoders.Metaspace(**options)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def word_pieces() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]", "[CLS]", "[SEP]"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def suffixes() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=["<unk>"], end_of_word_suffix="</w>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def byte_level(prefix: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


SPECIAL = {"special_tokens": ["<unk>"]}
KINDS = {
    "unigram": lambda: metaspace(
        models.Unigram(), trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", **SPECIAL)
    ),
    "sentencepiece bpe": lambda: metaspace(
        models.BPE(unk_token="<unk>"), trainers.BpeTrainer(vocab_size=80, **SPECIAL)
    ),
    "another mark": lambda: metaspace(
        models.BPE(unk_token="<unk>"), trainers.BpeTrainer(vocab_size=80, **SPECIAL), replacement="_"
    ),
    "word pieces": word_pieces,
    "suffixes": suffixes,
    "byte level": lambda: byte_level(False),
    "byte level with a prefix": lambda: byte_level(True),
    "characters": lambda: character_tokenizer("".join(CORPUS)),
}
SPECIAL_NAMES = ("[CLS]", "[SEP]")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("from_text", [True, False])
def test_tokens_of_every_kind_of_vocabulary_join_to_the_text(kind: str, from_text: bool) -> None:
    text, tokenizer = "the cat sat on the log", KINDS[kind]()
    ids = tokenizer(text)["input_ids"]
    pieces = [token.token for token in token_texts(tokenizer, ids, text if from_text else None)]
    joined = "".join(piece for piece in pieces if piece not in SPECIAL_NAMES)
    assert (joined if from_text and kind != "suffixes" else joined.strip()) == text


def test_word_pieces_keep_the_spaces_of_the_text() -> None:
    tokenizer, text = word_pieces(), "hello, world: on\tthe  mat!"
    pieces = [token.token for token in token_texts(tokenizer, tokenizer(text)["input_ids"], text)]
    assert pieces[0] == "[CLS]"
    assert "".join(pieces[1:-1]) == text


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_beyond_the_tokenizer_is_shown_as_such(kind: str) -> None:
    tokenizer = KINDS[kind]()
    ids = [*tokenizer("the cat")["input_ids"], len(tokenizer) + 2]
    assert token_texts(tokenizer, ids)[-1].token == f"<id {len(tokenizer) + 2}>"


def test_characters() -> None:
    tokenizer = character_tokenizer("ab ↵\n")
    assert "".join(token.token for token in texts(tokenizer, "a b\n")) == "a b\n"
    assert texts(tokenizer, "z")[0].token == "\ufffd"
