"""Our signals against those that lm-polygraph computed of the same model and text, kept as JSON."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = json.loads((ROOT / "tests" / "cases" / "lm_polygraph.json").read_text(encoding="utf-8"))


def test_our_values_are_those_of_lm_polygraph() -> None:
    found = runpy.run_path(str(ROOT / "scripts" / "check_against_lm_polygraph.py"))["ours"]()
    assert found["ids"] == KEPT["ids"]
    assert found["ours"].keys() == KEPT["theirs"].keys()
    for name, values in KEPT["theirs"].items():
        assert found["ours"][name] == pytest.approx(values, rel=1e-5, abs=1e-5), name
