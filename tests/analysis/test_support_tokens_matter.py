"""The experiment on SmolLM2: its choice of controls, and that its result and the guide say what its rows say."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "support_tokens_matter"


@pytest.fixture(scope="module")
def experiment():
    sys.path.insert(0, str(FOLDER))
    try:
        import run
    finally:
        sys.path.remove(str(FOLDER))
    yield run
    del sys.modules["run"]


@pytest.fixture(scope="module")
def result() -> dict:
    return json.loads((FOLDER / "result.json").read_text(encoding="utf-8"))


@given(st.sets(st.integers(1, 39), min_size=1, max_size=12), st.integers(0, 5))
def test_matched_tokens_are_others_and_near(experiment, places, seed) -> None:
    support = sorted(places)
    chosen = experiment.matched(support, 40, np.random.default_rng(seed))
    assert len(set(chosen)) == len(support)
    assert not set(chosen) & (set(support) | {0})
    free = [t for t in range(1, 40) if t not in places]
    assert abs(chosen[0] - support[0]) == min(abs(t - support[0]) for t in free)


def test_the_result_follows_from_its_rows(experiment, result) -> None:
    again = experiment.summarised(result["rows"], result["config"])
    for name, found in again["differences"].items():
        assert found == pytest.approx(result["differences"][name], rel=1e-9, abs=1e-12)
    for name, found in again["costs"].items():
        assert found == pytest.approx(result["costs"][name], rel=1e-9, abs=1e-12)
    # A short text gives a passage twice, which counts once.
    assert 50 <= result["passages"] == len(result["rows"]) <= sum(result["config"]["corpora"].values())


def test_the_configuration_is_the_one_that_was_run(result) -> None:
    assert json.loads((FOLDER / "config.json").read_text(encoding="utf-8")) == result["config"]


SIDES = {
    "support/noise": "noise view",
    "support/block": "block view",
    "matched/noise": "matched",
    "matched/block": "matched",
}
ROWS = {
    "support/noise": "support tokens, noise view",
    "support/block": "support tokens, block view",
    "matched/noise": "matched by position",
    "matched/block": "matched by position",
}


def test_the_guide_gives_the_figures_of_the_result(result) -> None:
    page = (ROOT / "docs" / "guides" / "analysis.md").read_text(encoding="utf-8").replace("-", "−")
    for name, found in result["differences"].items():
        sides = " − ".join(SIDES.get(side, side) for side in name.split(" - "))
        row = f"| {sides} | {found['value']:+.3f} | {found['low']:+.3f} … {found['high']:+.3f} |"
        assert row.replace("-", "−") in page, row
    for name, found in result["costs"].items():
        assert f"| {ROWS.get(name, name)} | {found['value']:.3f} |" in page, name
