r"""What changed between two records of margins: two checkpoints on one text, or a clean and a corrupted text."""

__all__ = ["LayerChanges", "MarginChanges", "TokenChange", "compare_records"]

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Annotated, Any

from support_tokens.errors import ArgumentError
from support_tokens.report.records.base import Record, renamed
from support_tokens.report.records.tokens import RENAMED, LayerMargins, MarginRecord, TokenMargin
from support_tokens.report.schema import AT_LEAST_ONE, NON_NEGATIVE

PRACTICAL_FLOOR = 0.01
"""Nats; a change of one per cent of the determinant."""
FIRST_POSITIONS = 4
"""Tokens so early have few others to attend to and are nearly always support tokens; views mark them."""
# Log margins of models in half precision differ by about the square root of its rounding unit between two runs.
_ROUNDING = {"float16": 2.0**-5, "bfloat16": 2.0**-3.5}


@dataclass(frozen=True)
class TokenChange:
    r"""One token before and after.

    Args:
        kind: `same` token, `replaced` by another, `inserted`, or `deleted`.
        before, after: The token in each record; None where it is not there.
        difference: Log margin after minus before, nats; None where one is missing.
        sigma_min_difference: $\sigma_{\min}$ after minus before; None where one is missing.
        rank_before, rank_after: Rank among the support tokens, from 1; None where it is none of them.
    """

    kind: str
    before: TokenMargin | None
    after: TokenMargin | None
    difference: float | None
    sigma_min_difference: float | None
    rank_before: int | None
    rank_after: int | None

    def __post_init__(self) -> None:
        if self.before is None and self.after is None:
            raise ArgumentError("A change must have a token before or after, but has neither; compare again.")

    @property
    def token(self) -> TokenMargin:
        """The token after, or before where it was deleted."""
        token = self.after if self.after is not None else self.before
        assert token is not None, "a change has a token before or after"
        return token

    @property
    def first(self) -> bool:
        """Whether the token is one of the first of its text, which are nearly always support tokens."""
        return self.token.position < FIRST_POSITIONS

    @property
    def flipped(self) -> bool:
        """Whether the sign of the determinant is another."""
        return self.before is not None and self.after is not None and self.before.sign != self.after.sign


@dataclass(frozen=True)
class LayerChanges:
    """All changes of one text under one layer and view."""

    layer: int
    view: str
    text: int
    tokens: Annotated[tuple[TokenChange, ...], AT_LEAST_ONE]

    @property
    def gained(self) -> tuple[TokenChange, ...]:
        """Tokens that became support tokens, smallest margin first."""
        changed = [change for change in self.tokens if change.rank_after and not change.rank_before]
        return tuple(sorted(changed, key=lambda change: change.rank_after or 0))

    @property
    def lost(self) -> tuple[TokenChange, ...]:
        """Tokens that are support tokens no longer, smallest margin of before first."""
        changed = [change for change in self.tokens if change.rank_before and not change.rank_after]
        return tuple(sorted(changed, key=lambda change: change.rank_before or 0))


def _upgrade(record: Mapping[str, Any], version: int) -> dict[str, Any]:
    assert version == 1, f"there is no version {version}"
    return {**record, "layers": renamed(record["layers"], RENAMED)}


@dataclass(frozen=True)
class MarginChanges(Record, kind="margin_changes", version=2, upgrade=_upgrade):
    """The changes of all texts, layers and views that two records share.

    Args:
        before, after: What each record is called.
        k: How many tokens of smallest margin count as support tokens.
        layers: One entry a text, layer and view.
        notes: Sentences that a reader should know.
        floor: Changes of the log margin up to this size, nats, are practically none.
    """

    before: str
    after: str
    k: Annotated[int, AT_LEAST_ONE]
    layers: Annotated[tuple[LayerChanges, ...], AT_LEAST_ONE]
    notes: tuple[str, ...] = ()
    floor: Annotated[float, NON_NEGATIVE] = PRACTICAL_FLOOR

    def unchanged(self, change: TokenChange) -> bool:
        """Whether the log margin of a token is practically the same before and after."""
        return change.difference is not None and abs(change.difference) <= self.floor

    def __repr__(self) -> str:
        tokens = sum(len(layer.tokens) for layer in self.layers)
        return f"MarginChanges({self.before!r} to {self.after!r}, {len(self.layers)} layers, {tokens} changes)"


def compare_records(
    before: MarginRecord, after: MarginRecord, *, k: int = 5, names: tuple[str, str] | None = None
) -> MarginChanges:
    r"""Differences per token between two records, texts taken in their order.

    Tokens are aligned by their text: a longest common run first, then what stands left and right of it. Stretches of
    equal length between what is common are taken token by token as replaced.

    Args:
        before: The first record.
        after: The second, of another checkpoint or of other texts.
        k: How many tokens of smallest margin count as support tokens.
        names: What to call them; None: the model, or the texts where the model is the same.

    Raises:
        ArgumentError: The records share no text, layer and view, or k is below 1.

    Example:
        >>> make = lambda *margins: MarginRecord(
        ...     "m",
        ...     (LayerMargins(0, "noise", tuple(TokenMargin(i, i, "abc"[i], 1, m) for i, m in enumerate(margins))),),
        ... )
        >>> (made,) = compare_records(make(0.0, -1.0, 1.0), make(0.0, 1.0, -2.0), k=1).layers
        >>> [change.difference for change in made.tokens], made.gained[0].after.token, made.lost[0].before.token
        ([0.0, 2.0, -3.0], 'c', 'b')
    """
    known = {(entry.text, entry.layer, entry.view): entry for entry in before.layers}
    shared = [(known[of], entry) for entry in after.layers if (of := (entry.text, entry.layer, entry.view)) in known]
    if not shared:
        raise ArgumentError(
            f"The records must share a text, layer and view, but one has {_kinds(before)} and the other {_kinds(after)}"
            "; analyze both with the same --layers and --view."
        )
    layers = tuple(_changes(old, new, k) for old, new in shared)
    left, right = names or _names(before, after)
    floor = max(PRACTICAL_FLOOR, *(_ROUNDING.get(record.dtype or "", 0.0) for record in (before, after)))
    return MarginChanges(left, right, k, layers, _notes(before, after, len(shared)), floor)


def _changes(old: LayerMargins, new: LayerMargins, k: int) -> LayerChanges:
    ranks_before = {token.position: rank for rank, token in enumerate(old.support_tokens(k), start=1)}
    ranks_after = {token.position: rank for rank, token in enumerate(new.support_tokens(k), start=1)}
    changes = []
    for kind, before, after in _aligned(old.tokens, new.tokens):
        changes.append(
            TokenChange(
                kind,
                before,
                after,
                _minus(after and after.log_abs_det, before and before.log_abs_det),
                _minus(after and after.sigma_min, before and before.sigma_min),
                ranks_before.get(before.position) if before is not None else None,
                ranks_after.get(after.position) if after is not None else None,
            )
        )
    return LayerChanges(new.layer, new.view, new.text, tuple(changes))


def _minus(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before


def _aligned(
    old: Sequence[TokenMargin], new: Sequence[TokenMargin]
) -> Iterator[tuple[str, TokenMargin | None, TokenMargin | None]]:
    matcher = SequenceMatcher(None, [t.token for t in old], [t.token for t in new], autojunk=False)
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        if kind == "equal" or i_end - i == j_end - j:
            yield from (
                ("same" if kind == "equal" else "replaced", *pair)
                for pair in zip(old[i:i_end], new[j:j_end], strict=True)
            )
        else:
            yield from (("deleted", token, None) for token in old[i:i_end])
            yield from (("inserted", None, token) for token in new[j:j_end])


def _names(before: MarginRecord, after: MarginRecord) -> tuple[str, str]:
    if before.model != after.model:
        return before.model, after.model
    left, right = before.name_of(0), after.name_of(0)
    return (left, right) if left != right else ("before", "after")


def _notes(before: MarginRecord, after: MarginRecord, shared: int) -> tuple[str, ...]:
    notes = []
    if shared < max(len(before.layers), len(after.layers)):
        notes.append(f"{shared} entries are in both records; others are left out.")
    for name in ("window", "overlap", "dtype"):
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            notes.append(f"The records differ in {name} ({old} and {new}), which may account for part of a difference.")
    return tuple(notes)


def _kinds(record: MarginRecord) -> str:
    found = sorted({(entry.layer, entry.view) for entry in record.layers})
    return ", ".join(f"layer {layer} ({view})" for layer, view in found[:6])
