r"""Tokens as people know them: the text of each, with characters that are split over several tokens made whole."""

__all__ = ["TokenText", "token_texts"]

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText(NamedTuple):
    """The text of a token, bytes of a split character as `<0xF0>`; and how it is shown, where that is not the same."""

    token: str
    shown: str | None


def token_texts(tokenizer: Any, ids: Sequence[int], text: str | None = None) -> list[TokenText]:
    r"""What each token stands for.

    Byte-level vocabularies (GPT-2, Llama 3, Qwen) and byte fallback (Llama 2, Gemma) cut characters into bytes. The
    first part of such a character is shown as `🙂⟨1/2⟩`, the others as `⟨2/2⟩`.

    Args:
        tokenizer: A tokenizer of transformers.
        ids: Token ids in the order of the text.
        text: The text they came from; a leading space that only the vocabulary puts there is then left out.

    Example:
        >>> from support_tokens.models import character_tokenizer
        >>> token_texts(character_tokenizer("ab c"), [3, 2])
        [TokenText(token='a', shown=None), TokenText(token=' ', shown=None)]
    """
    pieces = _bytes_of(tokenizer, ids)
    if text is not None and pieces and pieces[0].startswith(b" ") and not text.startswith(" "):
        pieces[0] = pieces[0][1:]
    return _made_whole(pieces)


def _bytes_of(tokenizer: Any, ids: Sequence[int]) -> list[bytes]:
    added = {index: str(token) for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    names: list[str] = tokenizer.convert_ids_to_tokens(list(ids))
    style = _style(tokenizer)
    found = []
    for index, name in zip(ids, names, strict=True):
        if index in added:
            found.append(added[index].encode("utf-8", "surrogatepass"))
        elif style == "bytes" and all(letter in _letters() for letter in name):
            found.append(bytes(_letters()[letter] for letter in name))
        elif style == "fallback" and (match := _BYTE.fullmatch(name)):
            found.append(bytes([int(match[1], 16)]))
        elif style == "fallback":
            found.append(name.replace("▁", " ").encode("utf-8", "surrogatepass"))
        else:
            said = tokenizer.decode([index], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            found.append(said.encode("utf-8", "surrogatepass"))
    return found


def _style(tokenizer: Any) -> str:
    """How the vocabulary writes text: by letters for bytes, with bytes as a fallback, or as it is."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return "plain"
    said = json.dumps(json.loads(backend.to_str()).get("decoder"))
    return "bytes" if '"ByteLevel"' in said else "fallback" if '"ByteFallback"' in said else "plain"


@lru_cache(maxsize=1)
def _letters() -> dict[str, int]:
    """The letter that byte-level vocabularies write for each byte: itself if printable, one from U+0100 on if not."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _made_whole(pieces: Sequence[bytes]) -> list[TokenText]:
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    tokens: list[list[str]] = [[] for _ in pieces]
    shown: list[list[str]] = [[] for _ in pieces]
    place = 0
    for begin, character in _characters(b"".join(pieces)):
        end = begin + len(character)
        while ends[place + 1] <= begin:
            place += 1
        whose = [place]
        while ends[whose[-1] + 1] < end:
            whose.append(whose[-1] + 1)
        whose = [w for w in whose if ends[w + 1] > ends[w]]
        letter = _decoded(character)
        for part, w in enumerate(whose, start=1):
            own = character[max(0, ends[w] - begin) : ends[w + 1] - begin]
            whole = letter is not None and len(whose) == 1
            tokens[w].append(letter if whole else "".join(f"<0x{byte:02X}>" for byte in own))  # type: ignore[arg-type]
            if whole or letter is None:
                shown[w].append(tokens[w][-1])
            else:
                shown[w].append(f"{letter if part == 1 else ''}⟨{part}/{len(whose)}⟩")
    return [
        TokenText("".join(token), "".join(seen) if seen != token else None)
        for token, seen in zip(tokens, shown, strict=True)
    ]


def _characters(data: bytes):
    """Where each character begins, and its bytes; a byte that belongs to none stands alone."""
    begin = 0
    while begin < len(data):
        lead = data[begin]
        length = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        character = data[begin : begin + length]
        if _decoded(character) is None:
            character = data[begin : begin + 1]
        yield begin, character
        begin += len(character)


def _decoded(character: bytes) -> str | None:
    try:
        return character.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
