r"""Text of each token, with characters that are split over several tokens put together."""

__all__ = ["TokenText", "token_texts"]

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText(NamedTuple):
    """The text of a token, bytes of a split character as `<0xF0>`; and how it is displayed, if differently."""

    token: str
    shown: str | None


def token_texts(tokenizer: Any, ids: Sequence[int], text: str | None = None) -> list[TokenText]:
    r"""The text that each token stands for.

    Byte-level vocabularies (GPT-2, Llama 3, Qwen) and byte fallback (Llama 2, Gemma) split characters into bytes. The
    first part of such a character is shown as `🙂⟨1/2⟩`, the others as `⟨2/2⟩`. An id that the tokenizer does not know,
    as in a padded embedding matrix, is shown as `<id 50300>`.

    Args:
        tokenizer: A tokenizer of transformers.
        ids: Token ids in the order of the text.
        text: The text they came from; spaces that only the vocabulary adds are then left out.

    Example:
        >>> from support_tokens.models import character_tokenizer
        >>> token_texts(character_tokenizer("ab c"), [3, 2])
        [TokenText(token='a', shown=None), TokenText(token=' ', shown=None)]
    """
    style, mark = _style(tokenizer)
    pieces = [_piece(tokenizer, index, style, mark) for index in ids]
    if style == "wordpiece":
        pieces = _spaced(tokenizer, list(ids), pieces, text)
    if text is not None and pieces and pieces[0].startswith(b" ") and not text.startswith(" "):
        pieces[0] = pieces[0][1:]
    return _made_whole(pieces)


def _piece(tokenizer: Any, index: int, style: str, mark: str) -> bytes:
    added = getattr(tokenizer, "added_tokens_decoder", {}).get(index)
    name = str(added) if added is not None else _name(tokenizer, index)
    if name is None:
        return f"<id {index}>".encode()
    if added is None:
        if style == "bytes" and all(letter in _letters() for letter in name):
            return bytes(_letters()[letter] for letter in name)
        if style == "fallback" and (match := _BYTE.fullmatch(name)):
            return bytes([int(match[1], 16)])
        if style in ("fallback", "spaces"):
            name = name.replace(mark, " ")
        elif style == "wordpiece":
            name = name.removeprefix(mark) if name.startswith(mark) else f" {name}"
        elif style != "bytes" or name not in _letters():
            name = tokenizer.decode([index], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return name.encode("utf-8", "surrogatepass")


def _name(tokenizer: Any, index: int) -> str | None:
    try:
        return tokenizer.convert_ids_to_tokens([index])[0]
    except (IndexError, KeyError, OverflowError, TypeError):  # each kind of tokenizer has its own error
        return None


def _style(tokenizer: Any) -> tuple[str, str]:
    """How the vocabulary writes text, and its mark for a space or, in WordPiece, for the inside of a word."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return ("spaces", "\u2581") if hasattr(tokenizer, "sp_model") else ("plain", "")
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    kinds = {one["type"]: one for one in (decoder, *decoder.get("decoders", ()))}
    if "ByteLevel" in kinds:
        return "bytes", ""
    if "ByteFallback" in kinds:
        return "fallback", "\u2581"
    if "Metaspace" in kinds:
        return "spaces", kinds["Metaspace"]["replacement"]
    if "Replace" in kinds and kinds["Replace"].get("content") == " ":
        return "spaces", kinds["Replace"]["pattern"].get("String", "\u2581")
    if "BPEDecoder" in kinds:
        return "spaces", kinds["BPEDecoder"]["suffix"]
    return ("wordpiece", kinds["WordPiece"]["prefix"]) if "WordPiece" in kinds else ("plain", "")


def _spaced(tokenizer: Any, ids: list[int], pieces: list[bytes], text: str | None) -> list[bytes]:
    """Pieces of WordPiece with the spaces of the text, or of its own rule where the text is not known."""
    encoded = None if text is None else tokenizer(text, return_offsets_mapping=True, verbose=False)
    if encoded is None or encoded["input_ids"][: len(ids)] != ids:
        return [pieces[0].removeprefix(b" "), *pieces[1:]] if pieces else pieces
    spaced, end = [], 0
    for piece, (start, stop) in zip(pieces, encoded["offset_mapping"], strict=False):
        if stop > start:
            piece, end = text[end:start].encode("utf-8", "surrogatepass") + piece.removeprefix(b" "), stop  # type: ignore[index]
        spaced.append(piece)
    return spaced


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
