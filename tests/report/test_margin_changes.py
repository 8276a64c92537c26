"""What changed between two records: alignment, differences, and who became or ceased to be a support token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support_tokens.errors import ArgumentError, RunFolderError
from support_tokens.report.records import (
    AnalyzedText,
    LayerMargins,
    MarginChanges,
    MarginRecord,
    TokenMargin,
    compare_records,
)
from support_tokens.report.tokens.page_data import changes_data


def record(text: str, margins=None, model="m", layer=0, **options) -> MarginRecord:
    margins = margins if margins is not None else [float(ord(letter)) for letter in text]
    tokens = tuple(
        TokenMargin(i, ord(letter), letter, 1 if margin >= 0 else -1, margin, sigma_min=abs(margin))
        for i, (letter, margin) in enumerate(zip(text, margins, strict=True))
    )
    return MarginRecord(
        model, (LayerMargins(layer, "noise", tokens),), (AnalyzedText(text, text, len(text)),), **options
    )


def kinds(before: str, after: str) -> list[tuple[str, str | None, str | None]]:
    (entry,) = compare_records(record(before), record(after)).layers
    return [(c.kind, c.before and c.before.token, c.after and c.after.token) for c in entry.tokens]


def test_same_text_of_two_checkpoints() -> None:
    changes = compare_records(record("abc", [-1.0, 2.0, 3.0], "old"), record("abc", [1.0, 2.0, -3.5], "new"), k=1)
    assert (changes.before, changes.after, changes.k) == ("old", "new", 1)
    (entry,) = changes.layers
    assert [c.difference for c in entry.tokens] == [2.0, 0.0, -6.5]
    assert [c.sigma_min_difference for c in entry.tokens] == [0.0, 0.0, 0.5]
    assert [c.flipped for c in entry.tokens] == [True, False, True]
    assert [c.after.token for c in entry.gained] == ["c"]
    assert [c.before.token for c in entry.lost] == ["a"]


def test_corrupted_texts_are_aligned() -> None:
    assert kinds("abcd", "abXd") == [("same", "a", "a"), ("same", "b", "b"), ("replaced", "c", "X"), ("same", "d", "d")]
    assert kinds("abd", "abcd")[2:] == [("inserted", None, "c"), ("same", "d", "d")]
    assert kinds("abcd", "abd")[2:] == [("deleted", "c", None), ("same", "d", "d")]
    assert kinds("ac", "aXYc")[1:3] == [("inserted", None, "X"), ("inserted", None, "Y")]
    names = compare_records(record("ab"), record("ac"))
    assert (names.before, names.after) == ("ab", "ac")


@given(st.text("abc", min_size=1, max_size=30), st.text("abc", min_size=1, max_size=30))
def test_every_token_of_both_is_there_once_in_order(before, after) -> None:
    (entry,) = compare_records(record(before), record(after), k=3).layers
    assert "".join(c.before.token for c in entry.tokens if c.before) == before
    assert "".join(c.after.token for c in entry.tokens if c.after) == after
    for change in entry.tokens:
        assert (change.difference is None) == (change.before is None or change.after is None)
    assert len([c for c in entry.tokens if c.rank_after]) == min(3, len(after))
    assert len(entry.gained) - len(entry.lost) == min(3, len(after)) - min(3, len(before))


def test_records_that_share_nothing_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"one has layer 0 \(noise\) and the other layer 3 \(noise\)"):
        compare_records(record("a"), record("a", layer=3))


def test_what_may_account_for_a_difference_is_said() -> None:
    changes = compare_records(record("a", window=8), record("a", window=9))
    assert changes.notes == ("The records differ in window (8 and 9), which may account for part of a difference.",)


def test_changes_come_back_from_json() -> None:
    changes = compare_records(record("abc"), record("axbc"))
    assert MarginChanges.from_record(changes.record()) == changes
    with pytest.raises(RunFolderError, match="kind must be 'margin_changes', received 'token_margins'"):
        MarginChanges.from_record({"schema_version": 1, "kind": "token_margins"})
    with pytest.raises(RunFolderError, match="received 'list'"):
        MarginChanges.from_record([])


def test_a_change_below_the_floor_is_called_unchanged_and_has_no_colour() -> None:
    before, after = record("abcdef", [1.0] * 6), record("abcdef", [1.0, 1.01 - 1e-9, 0.98, 1.5, 0.0, 1.02])
    changes = compare_records(before, after)
    assert changes.floor == 0.01
    assert [changes.unchanged(change) for change in changes.layers[0].tokens] == [True] * 2 + [False] * 4
    panel = changes_data(changes)["panels"][0]
    # Grew: bands below 3; shrank: bands above. The largest change is 1, so 0.5 is in the second third of the scale.
    assert panel["bands"]["difference"] == "334162"
    assert [change.first for change in changes.layers[0].tokens] == [True] * 4 + [False] * 2


def test_each_layer_has_a_scale_of_its_own() -> None:
    tokens = "abcdef"
    layers = lambda *scales: MarginRecord(  # noqa: E731
        "m",
        tuple(
            LayerMargins.of_columns(tokens, [scale * t for t in range(6)], [1] * 6, layer=layer)
            for layer, scale in enumerate(scales)
        ),
    )
    panels = changes_data(compare_records(layers(0.0, 0.0), layers(1.0, 100.0)))["panels"]
    assert panels[0]["map"][1:] == panels[1]["map"][1:] and panels[0]["mapLimits"] != panels[1]["mapLimits"]


def test_half_precision_raises_the_floor() -> None:
    assert compare_records(record("a", dtype="bfloat16"), record("a", dtype="float32")).floor > 0.05
