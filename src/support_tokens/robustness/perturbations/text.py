r"""Perturbations of the text: typos with the clean text as target, and text of another corpus."""

__all__ = ["DomainShift", "Typos", "misspell", "reached_by_typos"]

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.robustness.perturbations.base import Batch, Read, Spelling, check_seed, check_share
from support_tokens.robustness.perturbations.embeddings import stream

Operation = Literal["mixed", "replace", "drop", "insert", "swap"]
_EDITS = ("replace", "drop", "insert", "swap")


@dataclass(frozen=True)
class Typos:
    r"""Typos in the text that is read; the clean text is still predicted.

    Each character but the first of a sequence is hit with probability `share` and then replaced by another, dropped,
    followed by an inserted one, or swapped with its right neighbour (`mixed`: one of the four, evenly). Other
    characters come from the same sequence, so they are as frequent as in the text. All random numbers of a character
    are drawn whether it is hit or not, so a character hit at one share is hit in the same way at every larger one.

    A model is scored on the **clean token $c_j$ given the corrupted text before it**, wherever that is defined: not if
    a swap has already shown a part of $c_j$, nor if the token before $c_j$ was dropped and its place is taken (there
    the dropped token is predicted). An inserted or replaced character is never a target. The scored tokens depend on
    the draws alone, so they are the same for all arms, and bits are per clean character of the scored tokens. The
    corrupted text is cut to the length of the clean one, or padded if it is shorter.

    Tokens that are single characters are edited directly. If the batch has a `spelling`, the text of a token is edited
    and tokenized again by itself, so every clean token keeps a place where it is predicted. Tokens that do not spell
    back to themselves, such as parts of a character, are kept; `reached_by_typos` says how many characters are not.

    Args:
        share: Probability that a character is hit, above 0 and at most 1.
        operation: `mixed`, `replace`, `drop`, `insert` or `swap`.
        seed: Seed of the draws.

    Raises:
        ArgumentError: `share` is out of range, `operation` is unknown, or `seed` is negative.

    Example:
        >>> Typos(0.05).name, Typos(0.01, "swap").name
        ('typos 5 %', 'typos (swap) 1 %')
    """

    share: float
    operation: Operation = "mixed"
    seed: int = 0
    kind: ClassVar[str] = "typos"

    def __post_init__(self) -> None:
        check_share(self.share, "typos")
        check_seed(self.seed, "typos")
        if self.operation not in get_args(Operation):
            raise ArgumentError(
                f"The operation of typos must be one of {', '.join(get_args(Operation))}, received {self.operation!r}; "
                "pass one of them."
            )

    @property
    def name(self) -> str:
        """`typos[ (OPERATION)] SHARE %`."""
        return f"typos{'' if self.operation == 'mixed' else f' ({self.operation})'} {100 * self.share:g} %"

    @property
    def family(self) -> str:
        """One curve an operation."""
        return f"{self.kind}/{self.operation}"

    @property
    def strength(self) -> float:
        """The share."""
        return float(self.share)

    @property
    def axis(self) -> str:
        """The share."""
        return "share of characters hit"

    def record(self) -> dict[str, Any]:
        """Kind, share, operation and seed."""
        return {"kind": self.kind, **asdict(self)}

    @contextmanager
    def applied(self, model: nn.Module, rms: float) -> Iterator[Read]:
        """Corrupts the batch; the model is not changed."""
        del model, rms
        yield self._corrupted

    def _corrupted(self, batch: Batch) -> Batch:
        rows = [self._row(batch, row) for row in range(len(batch.indices))]
        ids, mask, labels, units = (torch.stack(part) for part in zip(*rows, strict=True))
        return replace(batch, input_ids=ids, attention_mask=mask, labels=labels, units=units)

    def _row(self, batch: Batch, row: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        length, prefix = batch.input_ids.shape[1], batch.prefix
        tokens = batch.input_ids[row, prefix : int(batch.attention_mask[row].sum())].tolist()
        pieces, origins = misspell(
            tokens, self.share, self.operation, stream(self.seed, batch.indices[row], 2), batch.spelling
        )
        clean_units = torch.ones_like(batch.input_ids[row]) if batch.units is None else batch.units[row]
        # Padded by a token of the text, since transformers warns of a pad token that no mask covers.
        ids = torch.full((length,), tokens[0], dtype=torch.long)
        ids[:prefix] = batch.input_ids[row, :prefix]
        labels, units = (torch.zeros(length, dtype=torch.long) for _ in range(2))
        labels[:] = -100
        place = prefix
        for token, (piece, asked) in enumerate(zip(pieces, origins, strict=True), start=prefix):
            if place >= length:
                break
            if asked and int(labels[place]) == -100:
                labels[place], units[place] = batch.labels[row, token], clean_units[token]
            kept = piece[: length - place]
            ids[place : place + len(kept)] = torch.tensor(kept, dtype=torch.long)
            place += len(kept)
        mask = (torch.arange(length) < place).to(batch.attention_mask)
        return ids.to(batch.input_ids), mask, labels, units


def misspell(
    tokens: Sequence[int],
    share: float,
    operation: str,
    draws: np.random.Generator,
    spelling: Spelling | None = None,
) -> tuple[list[list[int]], list[bool]]:
    r"""The corrupted form of each token, and whether the token can be predicted before its form.

    Args:
        tokens: A clean sequence, without padding.
        share: Probability that a character is hit.
        operation: As in `Typos`.
        draws: Random numbers of this sequence.
        spelling: Texts of the tokens; None: each is one character.

    Returns:
        For each token the ids that take its place, none if it is dropped; and False if the text before it shows a part
        of it.

    Example:
        >>> misspell([5, 6, 7], 1.0, "drop", np.random.default_rng(0))
        ([[5], [], []], [True, True, True])
        >>> misspell([5, 6, 7], 1.0, "swap", np.random.default_rng(0))
        ([[5], [7], [6]], [True, True, False])
    """
    symbols = [_symbols(token, spelling) for token in tokens]
    owner = [place for place, own in enumerate(symbols) for _ in own]
    flat: list[Any] = [symbol for own in symbols for symbol in own]
    pool = [
        symbol
        for own, token in zip(symbols, tokens, strict=True)
        if own != [token] or spelling is None
        for symbol in own
    ]
    hit, which = draws.random(len(flat)), draws.integers(4, size=len(flat))
    others = draws.integers(max(len(pool), 1), size=len(flat))
    forms: list[list[Any]] = [[] for _ in tokens]
    asked = [True] * len(tokens)
    place = 0
    while place < len(flat):
        symbol, whose = flat[place], owner[place]
        edit = _EDITS[which[place]] if operation == "mixed" else operation
        editable = place > 0 and (spelling is None or isinstance(symbol, str))
        if not (editable and hit[place] < share):
            forms[whose].append(symbol)
        elif edit == "replace":
            forms[whose].append(_another(symbol, pool, int(others[place])))
        elif edit == "insert":
            forms[whose] += [symbol, pool[others[place]]]
        elif edit == "swap" and place + 1 < len(flat) and (spelling is None or isinstance(flat[place + 1], str)):
            forms[whose].append(flat[place + 1])
            forms[owner[place + 1]].append(symbol)
            asked[owner[place + 1]] &= owner[place + 1] == whose
            place += 1
        elif edit == "swap":
            forms[whose].append(symbol)  # the last character has no neighbour
        place += 1
    return [
        [token] if form == own else form if spelling is None else _respelled(form, spelling)
        for token, own, form in zip(tokens, symbols, forms, strict=True)
    ], asked


def reached_by_typos(tokens: Sequence[int], spelling: Spelling) -> float:
    """Fraction of the characters of a text that typos can hit: those of tokens that spell back to themselves.

    Args:
        tokens: The text, without special tokens.
        spelling: Texts of the tokens.
    """
    counts = {token: count * max(1, len(spelling.text(token))) for token, count in Counter(tokens).items()}
    reached = sum(count for token, count in counts.items() if spelling.tokens(spelling.text(token)) == [token])
    return reached / sum(counts.values())


def _symbols(token: int, spelling: Spelling | None) -> list[Any]:
    """The characters of a token, or the token itself if it cannot be edited."""
    if spelling is None:
        return [token]
    text = spelling.text(token)
    return list(text) if text and spelling.tokens(text) == [token] else [token]


def _respelled(form: list[Any], spelling: Spelling) -> list[int]:
    text = "".join(form)
    return spelling.tokens(text) if text else []


def _another(symbol: Any, pool: list[Any], start: int) -> Any:
    """The first of the pool that is not `symbol`, cyclically from `start`; the symbol itself if there is no other."""
    turned = pool[start:] + pool[:start]
    return next((other for other in turned if other != symbol), symbol)


@dataclass(frozen=True)
class DomainShift:
    r"""Domain shift: the model reads the held-out text of another corpus.

    Sequence n of the data is replaced by sequence n of the other text, and figures are per character (or token) of the
    other text. The ratio to clean says how much harder that text is for the model.

    Args:
        corpus: Name of the other corpus.
        checksum: SHA-256 of its token ids, as `of` computes it.
        input_ids: `(N, T)` token ids, with the same special tokens in front as the data; None in a set that was read
            from JSON, which cannot be applied.
        units: `(N, T)` characters of each token; None: one.

    Example:
        >>> DomainShift.of("python-docs", torch.zeros(2, 4, dtype=torch.long)).name
        'text of python-docs'
    """

    corpus: str
    checksum: str
    input_ids: Tensor | None = field(default=None, compare=False, repr=False)
    units: Tensor | None = field(default=None, compare=False, repr=False)
    kind: ClassVar[str] = "other_text"

    @classmethod
    def of(cls, corpus: str, input_ids: Tensor, units: Tensor | None = None) -> "DomainShift":
        """The perturbation with these token ids."""
        ids = input_ids.long().cpu().contiguous()
        return cls(corpus, sha256(str(tuple(ids.shape)).encode() + ids.numpy().tobytes()).hexdigest(), ids, units)

    @property
    def name(self) -> str:
        """`text of CORPUS`."""
        return f"text of {self.corpus}"

    @property
    def family(self) -> str:
        """One curve a corpus."""
        return f"{self.kind}/{self.corpus}"

    @property
    def strength(self) -> float:
        """1."""
        return 1.0

    @property
    def axis(self) -> str:
        """0 is the own text, 1 the other."""
        return "0: own text, 1: other text"

    def record(self) -> dict[str, Any]:
        """Kind, corpus and checksum of the ids."""
        return {"kind": self.kind, "corpus": self.corpus, "checksum": self.checksum}

    @contextmanager
    def applied(self, model: nn.Module, rms: float) -> Iterator[Read]:
        """Replaces the sequences of the data by those of the other text."""
        del model, rms
        ids = self.input_ids
        if ids is None:
            raise ArgumentError(
                f"The text of '{self.corpus}' is required to apply the perturbation, received its checksum only; "
                "use DomainShift.of(corpus, input_ids)."
            )

        def read(batch: Batch) -> Batch:
            if int(batch.indices.max()) >= len(ids):
                raise ArgumentError(
                    f"The text of '{self.corpus}' must have as many sequences as the evaluation data, received "
                    f"{len(ids)}; evaluate on fewer sequences."
                )
            rows = ids[batch.indices]
            units = None if self.units is None else self.units[batch.indices]
            labels = rows.clone()
            labels[:, : batch.prefix + 1] = -100
            return replace(batch, input_ids=rows, attention_mask=torch.ones_like(rows), labels=labels, units=units)

        yield read
