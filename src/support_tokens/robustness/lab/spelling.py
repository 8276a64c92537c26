"""Text of each token of a tokenizer and tokens of a text, as they are in the middle of a text."""

__all__ = ["TokenizerSpelling", "special_prefix"]

from functools import lru_cache

from transformers import PreTrainedTokenizerBase

# A token is decoded and a text is tokenized after one of these, since many tokenizers strip or add a space, or join
# pieces of a word, at the beginning of a text. One of them neither merges with the text nor changes how it is split.
_ANCHORS = (".", "\n", "a", "x", "1", "")


class TokenizerSpelling:
    """Texts of tokens and tokens of texts, for typos.

    Spaces in front of a token and pieces of words are kept under byte-level, SentencePiece and WordPiece vocabularies.

    Args:
        tokenizer: Any tokenizer of transformers.

    Example:
        >>> from support_tokens.models import character_tokenizer
        >>> spelling = TokenizerSpelling(character_tokenizer("abba"))
        >>> spelling.text(2), spelling.tokens("ab")
        ('a', [2, 3])
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._anchors = [(anchor, ids, self._decode(ids)) for anchor in _ANCHORS for ids in [self._encode(anchor)]]
        # Kept, since a text has few different tokens beside its length, and each call of a tokenizer takes a while.
        self.text = lru_cache(None)(self._text)
        self._kept = lru_cache(None)(self._tokens)

    def tokens(self, text: str) -> list[int]:
        """The shortest tokenization of the text after one of the anchors, without special tokens."""
        return list(self._kept(text))

    def _text(self, token: int) -> str:
        texts = []
        for _, ids, decoded in self._anchors:
            whole = self._decode([*ids, token])
            if whole.startswith(decoded):
                texts.append(whole.removeprefix(decoded))
        return next((text for text in texts if text and self.tokens(text) == [token]), texts[0] if texts else "")

    def _tokens(self, text: str) -> tuple[int, ...]:
        found = []
        for anchor, ids, decoded in self._anchors:
            whole = self._encode(anchor + text)
            if whole[: len(ids)] == ids and self._decode(whole) == decoded + text:
                found.append(tuple(whole[len(ids) :]))
        return min(found, key=len) if found else tuple(self._encode(text))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def special_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that the tokenizer puts in front of every text, such as BOS; empty if there are none."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return whole[:start]
