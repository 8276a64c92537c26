"""State of one run of `model.generate`: a logits processor, a stopping criterion, and the texts so far."""

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

# Number of prompt ids decoded together with new ones, since some vocabularies drop a leading space.
_BEFORE = 4
_INCOMPLETE = "\ufffd"


@dataclass
class _GenerationRow:
    """One text in progress."""

    before: list[int]
    ids: list[int] = field(default_factory=list)
    text: str = ""
    tokens: list[GeneratedToken] = field(default_factory=list)
    largest: dict[str, tuple[float, int]] = field(default_factory=dict)
    reason: str = ""
    stopped_by: str = ""


class Run:
    """A batch of texts in progress.

    Args:
        observer: Reads the forward passes of the model.
        signals: Signals recorded with each token.
        tokenizer: Tokenizer of the model.
        prompts: The tokenized prompts.
        ends: Ids of end tokens.
        most: Maximum number of new tokens.
        limits: Largest allowed values by name of a signal, with or without its layer.
        margin_rule: Rule on the margin of the first layer, or None.
        on_token: Called with the index of the text and each new token.

    Raises:
        ArgumentError: A limit is not a number, or names a layer that is not read.
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
        margin_rule: Rule | None,
        on_token: Callable[[int, GeneratedToken], None] | None,
    ) -> None:
        self._observer, self._signals, self._tokenizer, self._prompts = observer, signals, tokenizer, prompts
        self._ends, self._most, self._margin_rule, self._on_token = ends, most, margin_rule, on_token
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
        # Without padding no mask is needed.
        return self._mask if self._padded else None

    def before(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits processor: keeps the logits of the last pass and applies the rule to them."""
        self._raw = scores
        sound = scores.amax(-1, keepdim=True).isfinite()  # False for NaN, +inf, and no token at all
        if self._margin_rule is not None:
            margins = next(iter(self._observer.margins(self._given).values()))[:, 0]  # of the first layer
            scores = self._margin_rule(scores, margins)
            sound = sound & scores.amax(-1, keepdim=True).isfinite()  # the margin may be NaN where logits are finite
        self._sound = sound[:, 0]
        return torch.where(sound, scores, 0.0)

    def after(self, input_ids: Tensor, _scores: Any) -> Tensor:
        """Stopping criterion: records the new token of each text; True for each text that has ended."""
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
            if not values[name] <= limit:  # written so that NaN stops too
                reason = "where a number is required" if math.isnan(values[name]) else f"above {limit:g}"
                row.reason, row.stopped_by = "abstained", f"{name} was {values[name]:.4g}, {reason}"
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
        """The last ids of a prompt, starting at a whole character."""
        count = _BEFORE
        while count < len(prompt) and self._decode(prompt[-count:]).startswith(_INCOMPLETE):
            count += 1
        return list(prompt[-count:])

    def _text(self, row: _GenerationRow) -> str:
        before, text = self._decode(row.before), self._decode(row.before + row.ids)
        # A character split between prompt and continuation belongs to the continuation.
        return text[len(before if text.startswith(before) else before.rstrip(_INCOMPLETE)) :]

    def generations(self) -> list[Generation]:
        """The texts so far; those that have not ended are marked as interrupted."""
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
                "length": f"It stopped after {count} tokens, the maximum asked for.",
                "abstained": f"It abstained before token {count + 1}: {row.stopped_by}.",
                "nonfinite": f"It stopped before token {count + 1}, whose logits are not finite; "
                "load the model in float32 and check its weights.",
            }.get(row.reason, f"It was interrupted after {count} tokens.")
        ]
        if row.reason == "length" and not self._ends:
            parts.append("The model has no end token.")
        if row.reason != "abstained":
            for name, limit in self._limits.items():
                largest = row.largest.get(name)
                value = "was never seen" if largest is None else f"was at most {largest[0]:.4g}, at token {largest[1]}"
                parts.append(f"{name} never rose above {limit:g}: it {value}.")
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
