"""One run of `model.generate`: what stands before and after the choice of each token, and what has been written."""

__all__ = ["Run"]

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from support_tokens.errors import ArgumentError
from support_tokens.generation.prompts import Encoded
from support_tokens.generation.rules import Rule
from support_tokens.generation.signals.observer import Observer
from support_tokens.generation.signals.table import Signal, token_values
from support_tokens.report.records import GeneratedToken, Generation

# Ids of the prompt that are decoded before what was written, since some vocabularies drop a space that begins a text.
_BEFORE = 4
_INCOMPLETE = "\ufffd"


@dataclass
class _GenerationRow:
    """One text so far."""

    before: list[int]
    ids: list[int] = field(default_factory=list)
    text: str = ""
    tokens: list[GeneratedToken] = field(default_factory=list)
    largest: dict[str, tuple[float, int]] = field(default_factory=dict)
    reason: str = ""
    stopped_by: str = ""


class Run:
    """A batch of texts while they are written.

    Args:
        observer: Watches the model.
        signals: What each token is told with.
        tokenizer: Of the model.
        prompts: As the model reads them.
        ends: Ids that end a text.
        most: Most tokens written.
        limits: Largest allowed values by name of a signal, with or without its layer.
        adapt: Rule on the margin of the first layer, or None.
        on_token: Told the row and each token.

    Raises:
        ArgumentError: A limit is no number, or names a layer that is not watched.
    """

    def __init__(
        self,
        observer: Observer,
        signals: Sequence[Signal],
        tokenizer: Any,
        prompts: Encoded,
        ends: frozenset[int],
        most: int,
        limits: Mapping[str, float],
        adapt: Rule | None,
        on_token: Callable[[int, GeneratedToken], None] | None,
    ) -> None:
        self._observer, self._signals, self._tokenizer, self._prompts = observer, signals, tokenizer, prompts
        self._ends, self._most, self._adapt, self._on_token = ends, most, adapt, on_token
        self._limits = _by_full_name(limits, signals, observer.layers)
        self._mask = prompts.mask
        self._padded = not bool(prompts.mask.all())
        self._raw = torch.empty(0)  # logits of the last pass, `(B, V)`
        self._sound = torch.empty(0)  # rows from which a token can be chosen, `(B,)`
        self._rows = [_GenerationRow(self._end_of(row)) for row in prompts.rows]

    @property
    def begun(self) -> bool:
        """Whether any text has a token."""
        return any(row.ids for row in self._rows)

    @property
    def _given(self) -> Tensor | None:
        # Without padding every key is real, and nothing has to be masked.
        return self._mask if self._padded else None

    def before(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Keeps the logits of the last pass, and adapts them: as a processor of logits is called."""
        self._raw = scores
        sound = scores.amax(-1, keepdim=True).isfinite()  # NaN, an infinity above all, and no token at all: none is
        if self._adapt is not None:
            margins = next(iter(self._observer.margins(self._given).values()))[:, 0]  # of the first layer
            scores = self._adapt(scores, margins)
            sound = sound & scores.amax(-1, keepdim=True).isfinite()  # a margin may be no number where logits are
        self._sound = sound[:, 0]
        return torch.where(sound, scores, 0.0)

    def after(self, input_ids: Tensor, _scores: Any) -> Tensor:
        """Reads what was just written: as a criterion of stopping is called; True for each text that has ended."""
        found = self._observer.read(self._raw.unsqueeze(1), input_ids[:, -1:], self._given)
        values = {name: value[:, 0].tolist() for name, value in token_values(self._signals, found).items()}
        self._mask = torch.cat((self._mask, torch.ones_like(self._mask[:, :1])), dim=1)
        sound = self._sound.tolist()
        for place, (row, token) in enumerate(zip(self._rows, input_ids[:, -1].tolist(), strict=True)):
            if not row.reason:
                own = {name: value[place] for name, value in values.items()}
                self._write(place, row, token, own, sound[place])
        return torch.tensor([bool(row.reason) for row in self._rows], device=input_ids.device)

    def _write(self, place: int, row: _GenerationRow, token: int, values: dict[str, float], sound: bool) -> None:
        if not sound:
            row.reason = "nonfinite"
            return
        for name, limit in self._limits.items():
            if not values[name] <= limit:  # NaN is no number below a threshold
                said = "where a number is required" if math.isnan(values[name]) else f"above {limit:g}"
                row.reason, row.stopped_by = "abstained", f"{name} was {values[name]:.4g}, {said}"
                return
            if values[name] > row.largest.get(name, (-math.inf, 0))[0]:
                row.largest[name] = values[name], len(row.ids) + 1
        row.ids.append(token)
        text = self._text(row)
        piece = "" if text.endswith(_INCOMPLETE) else text[len(row.text) :]
        row.text = row.text if text.endswith(_INCOMPLETE) else text
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        row.tokens.append(GeneratedToken(token, piece, finite))
        if token in self._ends:
            row.reason = "end"
        elif len(row.ids) == self._most:
            row.reason = "length"
        if self._on_token is not None:
            self._on_token(place, row.tokens[-1])

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _end_of(self, prompt: tuple[int, ...]) -> list[int]:
        """Its last ids, from the beginning of a character on."""
        count = _BEFORE
        while count < len(prompt) and self._decode(prompt[-count:]).startswith(_INCOMPLETE):
            count += 1
        return list(prompt[-count:])

    def _text(self, row: _GenerationRow) -> str:
        before, text = self._decode(row.before), self._decode(row.before + row.ids)
        # A character that the prompt leaves incomplete is completed by what follows, and belongs to that.
        return text[len(before if text.startswith(before) else before.rstrip(_INCOMPLETE)) :]

    def generations(self) -> list[Generation]:
        """What has been written so far; texts that had not ended count as interrupted."""
        return [
            Generation(
                self._prompts.texts[place],
                len(self._prompts.rows[place]),
                self._text(row),
                tuple(row.tokens),
                row.reason or "interrupted",
                self._sentence(row),
            )
            for place, row in enumerate(self._rows)
        ]

    def _sentence(self, row: _GenerationRow) -> str:
        count = len(row.ids)
        parts = [
            {
                "end": f"It ended at the end token, after {count} tokens.",
                "length": f"It stopped after {count} tokens, the most that were asked for.",
                "abstained": f"It abstained before token {count + 1}: {row.stopped_by}.",
                "nonfinite": f"It stopped before token {count + 1}, whose logits are no finite numbers; "
                "load it in float32 and check its weights.",
            }.get(row.reason, f"It was interrupted after {count} tokens, which are kept.")
        ]
        if row.reason == "length" and not self._ends:
            parts.append("The model names no end token, so that nothing else could end it.")
        if row.reason != "abstained":
            for name, limit in self._limits.items():
                largest = row.largest.get(name)
                said = "was never seen" if largest is None else f"was at most {largest[0]:.4g}, at token {largest[1]}"
                parts.append(f"{name} never rose above {limit:g}: it {said}.")
        return " ".join(parts)


def _by_full_name(limits: Mapping[str, float], signals: Sequence[Signal], layers: Sequence[int]) -> dict[str, float]:
    names = [
        name
        for signal in signals
        for name in (
            [signal.name] if signal.scope == "text" else [f"{signal.name} (layer={layer})" for layer in layers]
        )
    ]
    found: dict[str, float] = {}
    for asked, limit in limits.items():
        mine = [name for name in names if name == asked or name.startswith(f"{asked} (layer=")]
        if not mine or not isinstance(limit, Real) or math.isnan(limit):
            raise ArgumentError(
                f"stop_above must give a number to one of {', '.join(names)}, received {asked!r}: {limit}; choose one."
            )
        found.update(dict.fromkeys(mine, float(limit)))
    return found
