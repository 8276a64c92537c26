r"""Margins of the tokens of texts as plain records: what an analysis writes, and all that its views read.

The JSON of one text is `{"schema_version": 1, "model": ..., "layers": [{"layer": 0, "view": "noise", "tokens": ...}]}`
with more keys beside these. Several texts share one list of layers: each entry says which text it is of (`text`, an
index into `texts`).
"""

__all__ = [
    "AnalyzedText",
    "LayerMargins",
    "MarginRecord",
    "TokenMargin",
    "Window",
    "record_from_json",
    "record_to_json",
]

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from support_tokens.errors import ArgumentError, RunFolderError
from support_tokens.report.schema import decode, encode

_RENAMED = {"surprise_nats": "surprisal_nats"}
KIND = "token_margins"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class TokenMargin:
    r"""One token under one layer and view.

    Args:
        position: Place in the text, from 0.
        id: Its id in the vocabulary.
        token: Its text; a byte that is only part of a character is written `<0xF0>`.
        sign: Sign of $\det J_t$; 0 where $J_t$ is singular.
        log_abs_det: $\log|\det J_t|$, nats.
        sigma_min: $\sigma_{\min}(J_t)$, the distance to the nearest singular matrix; None if not asked for.
        valid: Whether this is a real token.
        rankable: Whether its margin may be ranked; False where it is 0 by structure.
        shown: How the token is shown where it is part of a character, None where `token` says it all.
        surprisal_nats: $-\log p(\text{token} \mid \text{what stands before it in its window})$; None without context.
        gradient_share: $\lVert J_t^{-T} \rVert_F / \sum_s \lVert J_s^{-T} \rVert_F$ over the ranked tokens of the text:
            the part of the barrier's gradient $\partial(-\sum_s \log|\det J_s|)/\partial J$ that is this token's.
        coupling_sign: Sign of the eigenvalue of largest modulus of the symmetric part of $\partial\mu_t/\partial x_t$
            ($\Sigma_t A$ under the paper's law): 1 attractive, -1 repulsive.
        per_head: $\log|\det(I \mp D_t^h)|$ of each head alone, nats. A diagnostic: their sum is not the log margin.
    """

    position: int
    id: int
    token: str
    sign: int
    log_abs_det: float
    sigma_min: float | None = None
    valid: bool = True
    rankable: bool = True
    shown: str | None = None
    surprisal_nats: float | None = None
    gradient_share: float | None = None
    coupling_sign: int | None = None
    per_head: tuple[float, ...] | None = None


@dataclass(frozen=True)
class LayerMargins:
    """All tokens of one text under one layer and view."""

    layer: int
    view: str
    tokens: tuple[TokenMargin, ...]
    text: int = 0

    def support_tokens(self, k: int) -> tuple[TokenMargin, ...]:
        """The k ranked tokens of smallest log margin, smallest first and the earlier one where equal.

        Example:
            >>> tokens = tuple(TokenMargin(i, i, "abc"[i], 1, m) for i, m in enumerate((0.5, -1.0, 0.0)))
            >>> [token.position for token in LayerMargins(0, "noise", tokens).support_tokens(2)]
            [1, 2]
        """
        if k < 1:
            raise ArgumentError(f"k must be at least 1, received {k}; ask for one support token or more.")
        ranked = [token for token in self.tokens if token.valid and token.rankable]
        return tuple(sorted(ranked, key=lambda token: (token.log_abs_det, token.position))[:k])


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


@dataclass(frozen=True)
class MarginRecord:
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
    layers: tuple[LayerMargins, ...]
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


def record_to_json(record: MarginRecord) -> dict[str, Any]:
    """The record as a plain JSON object, `schema_version` first.

    Raises:
        RunFolderError: A figure is not finite.

    Example:
        >>> made = record_to_json(MarginRecord("m", (LayerMargins(0, "noise", (TokenMargin(0, 5, "a", 1, 0.5),)),)))
        >>> made["schema_version"], made["layers"][0]["tokens"][0]["log_abs_det"]
        (1, 0.5)
    """
    return {"schema_version": SCHEMA_VERSION, "kind": KIND, **encode(record)}


def record_from_json(payload: Any, *, whose: str = "the record") -> MarginRecord:
    """The record that a JSON object holds; every key beyond the contract's may be missing.

    Args:
        payload: What `record_to_json` made, or its like.
        whose: Named in errors, usually the path of the file.

    Raises:
        RunFolderError: Another kind or version, a missing field, a value of a wrong type.

    Example:
        >>> token = {
        ...     "position": 0,
        ...     "id": 5,
        ...     "token": "a",
        ...     "sign": 1,
        ...     "log_abs_det": 0.5,
        ...     "sigma_min": 1.0,
        ...     "valid": True,
        ... }
        >>> layer = {"layer": 0, "view": "noise", "tokens": [token]}
        >>> record_from_json({"schema_version": 1, "model": "m", "layers": [layer]}).layers[0].tokens[0].token
        'a'
    """
    if not isinstance(payload, Mapping):
        raise RunFolderError(f"{whose}: an object of margins is required, received a {type(payload).__name__}.")
    payload = payload if "kind" in payload else {"kind": KIND, **payload}
    payload = _with_current_names(payload)
    return decode(MarginRecord, payload, whose=whose, kind=KIND, schema_version=SCHEMA_VERSION)


def _with_current_names(value: Any) -> Any:
    """A payload in which fields that earlier releases wrote have their present names."""
    if isinstance(value, Mapping):
        return {_RENAMED.get(name, name): _with_current_names(entry) for name, entry in value.items()}
    return [_with_current_names(entry) for entry in value] if isinstance(value, list) else value
