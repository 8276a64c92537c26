"""The sweep over every causal type of transformers: a sample of it, and what its committed result says."""

from pathlib import Path

import pytest
from families.check import check
from families.table import BEGIN, END, write_table
from families.tiny import causal_types

from support_tokens.files import read_json
from support_tokens.models.architectures import TABLES, supported_families

ROOT = Path(__file__).parents[2]
TYPES = read_json(ROOT / "experiments" / "families" / "result.json")["types"]
# One for each thing a table can say that the models of `tiny_models.CASES` do not have.
SAMPLE = (
    "biogpt",
    "exaone4",
    "gptj",
    "granite_swa",
    "granitemoehybrid",
    "hunyuan_v1_dense",
    "mimo_v2_flash",
    "modernbert-decoder",
    "nanochat",
    "nemotron",
    "persimmon",
)


@pytest.mark.parametrize("model_type", SAMPLE)
def test_margins_of_a_type_are_autograds(model_type: str) -> None:
    outcome = check(model_type, law=False)
    assert outcome["status"] == "right", outcome


def test_a_type_without_a_table_is_refused_with_the_reason() -> None:
    outcome = check("mamba", law=False)
    assert outcome["status"] == "refused"
    assert "MambaForCausalLM" in outcome["reason"]


def test_every_type_of_transformers_has_an_outcome_and_none_is_wrong() -> None:
    assert set(TYPES) == set(causal_types())
    assert {name: t for name, t in TYPES.items() if t["status"] == "wrong"} == {}


def test_types_of_the_tables_are_those_that_were_found_right() -> None:
    right = {outcome["model_type"] for outcome in TYPES.values() if outcome["status"] == "right"}
    assert right == {model_type for table in TABLES for model_type in table.model_types}
    assert len([t for t in TYPES.values() if t["status"] == "right"]) >= 60


def test_names_of_families_are_unique() -> None:
    assert len(set(supported_families())) == len(supported_families()) == len(TABLES)


def test_the_guide_shows_the_committed_result(tmp_path: Path) -> None:
    guide = ROOT / "docs" / "guides" / "models.md"
    page = tmp_path / "models.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    write_table(TYPES, page)
    table = page.read_text(encoding="utf-8").removeprefix("before\n").removesuffix("\nafter\n")
    assert table in guide.read_text(encoding="utf-8")


def test_a_table_names_every_type_with_its_outcome(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}{END}", encoding="utf-8")
    outcomes = {
        "a": {"status": "right", "deviation": 2e-12},
        "b": {"status": "refused", "reason": "no | table"},
        "c": {"status": "not buildable", "reason": "too large"},
    }
    write_table(outcomes, page)
    text = page.read_text(encoding="utf-8")
    assert "| supported, and right | 1 of 3 |" in text
    assert "2e-12: `a`." in text
    assert "| `b` | no \\| table |" in text
    assert "| `c` | too large |" in text
