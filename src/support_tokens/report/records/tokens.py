r"""Margins of the tokens of texts as plain records: what an analysis writes, and all that its views read.

The JSON of one text is `{"schema_version": 2, "kind": "token_margins", "model": ..., "layers": [{"layer": 0, "view":
"noise", "tokens": ...}]}` with more keys beside these. Several texts share one list of layers: each entry names its
text by `text`, an index into `texts`.
"""

__all__ = ["AnalyzedText", "LayerMargins", "MarginRecord", "TokenMargin", "Window"]

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from support_tokens.errors import ArgumentError
from support_tokens.report.records.base import Record, renamed
from support_tokens.report.schema import AT_LEAST_ONE, NON_NEGATIVE

RENAMED = {"shown": "sanitized", "surprise_nats": "surprisal_nats"}
"""Names that tokens had in version 1."""


@dataclass(frozen=True)
class TokenMargin:
    r"""One token under one layer and view.

    Args:
        position: Place in the text, from 0.
        id: Its id in the vocabulary; None in reports of earlier versions, which did not keep it.
        token: Its text; a byte that is only part of a character is written `<0xF0>`.
        sign: Sign of $\det J_t$; 0 where $J_t$ is singular.
        log_abs_det: $\log|\det J_t|$, nats; None where $J_t$ is singular.
        sigma_min: $\sigma_{\min}(J_t)$, the distance to the nearest singular matrix; None if not asked for.
        valid: Whether this is a real token.
        rankable: Whether its margin may be ranked; False where it is 0 by structure.
        sanitized: How the token is displayed where it is part of a character, None where `token` is enough.
        surprisal_nats: $-\log p(\text{token} \mid \text{what stands before it in its window})$; None without context.
        gradient_share: $\lVert J_t^{-T} \rVert_F / \sum_s \lVert J_s^{-T} \rVert_F$ over the ranked tokens of the text:
            the part of the barrier's gradient $\partial(-\sum_s \log|\det J_s|)/\partial J$ that is this token's.
        coupling_sign: Sign of the eigenvalue of largest modulus of the symmetric part of $\partial\mu_t/\partial x_t$
            ($\Sigma_t A$ under the paper's law): 1 attractive, -1 repulsive.
        per_head: $\log|\det(I \mp D_t^h)|$ of each head alone, nats. A diagnostic: their sum is not the log margin.
    """

    position: Annotated[int, NON_NEGATIVE]
    id: int | None
    token: str
    sign: int
    log_abs_det: float | None
    sigma_min: Annotated[float, NON_NEGATIVE] | None = None
    valid: bool = True
    rankable: bool = True
    sanitized: str | None = None
    surprisal_nats: float | None = None
    gradient_share: float | None = None
    coupling_sign: int | None = None
    per_head: tuple[float, ...] | None = None

    @property
    def margin(self) -> float:
        """The log margin as a number: minus infinity where $J_t$ is singular."""
        return -math.inf if self.log_abs_det is None else self.log_abs_det

    @property
    def ranked(self) -> bool:
        """Whether the token can be a support token."""
        return self.valid and self.rankable


@dataclass(frozen=True)
class LayerMargins:
    """Margins along one text under one layer and view; `text` is the index of the text in its record."""

    layer: int
    view: str
    tokens: Annotated[tuple[TokenMargin, ...], AT_LEAST_ONE]
    text: Annotated[int, NON_NEGATIVE] = 0

    def __post_init__(self) -> None:
        if [token.position for token in self.tokens] != list(range(len(self.tokens))):
            raise ArgumentError(
                f"Tokens of a text must have the positions 0 to {len(self.tokens) - 1} in this order, but those of "
                f"layer {self.layer} do not; analyze the text again."
            )

    @classmethod
    def of_columns(
        cls,
        tokens: Sequence[str],
        log_abs_det: Sequence[float],
        sign: Sequence[int],
        rankable: Sequence[bool] | None = None,
        *,
        ids: Sequence[int] | None = None,
        layer: int = 0,
        view: str = "noise",
    ) -> "LayerMargins":
        r"""Margins along a text out of one list a figure.

        Args:
            tokens: The text of each token.
            log_abs_det: $\log|\det J_t|$ of each token, in nats; minus infinity where $J_t$ is singular.
            sign: Sign of $\det J_t$ of each token.
            rankable: Which tokens may be ranked; None: all.
            ids: Ids in the vocabulary; None: unknown.
            layer: Block.
            view: `noise` or `block`.

        Raises:
            ArgumentError: Lengths that differ.

        Example:
            >>> LayerMargins.of_columns("ab", [0.5, float("-inf")], [1, 0]).tokens[1].log_abs_det is None
            True
        """
        n = len(tokens)
        columns = (log_abs_det, sign, [True] * n if rankable is None else rankable, [None] * n if ids is None else ids)
        if {len(column) for column in columns} != {n}:
            raise ArgumentError(
                f"Margins along a text must be one log margin, sign, rankable and id a token, received {n} tokens and "
                f"{[len(column) for column in columns]}."
            )
        margins = (
            TokenMargin(t, id_, tokens[t], int(s), float(m) if math.isfinite(m) else None, rankable=bool(r))
            for t, (m, s, r, id_) in enumerate(zip(*columns, strict=True))
        )
        return cls(layer, view, tuple(margins))

    @property
    def ranked(self) -> list[TokenMargin]:
        """The tokens that can be support tokens, in their order."""
        return [token for token in self.tokens if token.ranked]

    def support_tokens(self, k: int) -> tuple[TokenMargin, ...]:
        """The k ranked tokens of smallest log margin, smallest first and the earlier one where equal.

        Example:
            >>> tokens = tuple(TokenMargin(i, i, "abc"[i], 1, m) for i, m in enumerate((0.5, -1.0, 0.0)))
            >>> [token.position for token in LayerMargins(0, "noise", tokens).support_tokens(2)]
            [1, 2]
        """
        if k < 1:
            raise ArgumentError(f"k must be at least 1, received {k}; ask for one support token or more.")
        return tuple(sorted(self.ranked, key=lambda token: (token.margin, token.position))[:k])


@dataclass(frozen=True)
class Window:
    """One forward pass over tokens `start` to `stop` of a text; figures are taken from `first` on.

    What stands before `first` is context that an earlier window has reported.
    """

    start: int
    first: int
    stop: int


@dataclass(frozen=True)
class AnalyzedText:
    """A text as it was read: its name and characters, the number of its tokens, and the windows that covered them."""

    name: str
    text: str
    tokens: int
    windows: tuple[Window, ...] = ()


def _upgrade(record: Mapping[str, Any], version: int) -> dict[str, Any]:
    assert version == 1, f"there is no version {version}"
    return {**record, "layers": renamed(record["layers"], RENAMED)}


@dataclass(frozen=True)
class MarginRecord(Record, kind="token_margins", version=2, upgrade=_upgrade):
    r"""The result of an analysis.

    Args:
        model: Name of the model.
        layers: One entry a text, layer and view, in that order.
        texts: The texts; entries of `layers` name them by index.
        window: Most tokens of one forward pass.
        overlap: Tokens of context that each window after the first repeats.
        dtype: Precision of the figures.
        complete: False where the analysis was interrupted and tokens are missing at the end.
        notes: Sentences that a reader of the figures should know.
        versions: Versions of what computed them.
    """

    model: str
    layers: Annotated[tuple[LayerMargins, ...], AT_LEAST_ONE]
    texts: tuple[AnalyzedText, ...] = ()
    window: int | None = None
    overlap: int | None = None
    dtype: str | None = None
    complete: bool = True
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.layers:
            raise ArgumentError("A record of margins holds one layer or more, but it has none; analyze a text first.")
        wrong = [entry.text for entry in self.layers if not 0 <= entry.text < max(1, len(self.texts))]
        if wrong:
            raise ArgumentError(
                f"Entries of layers must name one of the {len(self.texts)} texts, but one names {wrong[0]}; "
                "the record is not whole."
            )
        lengths: dict[int, int] = {}
        for entry in self.layers:
            if lengths.setdefault(entry.text, len(entry.tokens)) != len(entry.tokens):
                raise ArgumentError(
                    f"All layers of text {entry.text} must hold the same tokens, but layer {entry.layer} has "
                    f"{len(entry.tokens)} and another has {lengths[entry.text]}; analyze it again."
                )

    def select(self, layer: int | None = None, view: str | None = None, text: int = 0) -> LayerMargins:
        """The entry of a text, layer and view; the first of the record where layer or view is None.

        Raises:
            ArgumentError: There is none.
        """
        for entry in self.layers:
            if entry.text == text and layer in (None, entry.layer) and view in (None, entry.view):
                return entry
        there = sorted({(entry.text, entry.layer, entry.view) for entry in self.layers})[:12]
        raise ArgumentError(
            f"The record has no margins of layer {layer}, view {view!r}, text {text}; it has (text, layer, view) "
            f"{there}, so choose one of these."
        )

    def name_of(self, text: int) -> str:
        """The name of a text."""
        return self.texts[text].name if self.texts else "text"
