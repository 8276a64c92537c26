"""Records: a kind and a version each, old files are read, and no file that does not fit gets past the schema."""

import dataclasses
import functools
import json
import operator
from pathlib import Path

import pytest

from margin_samples import layer_of, record_of, sample_record
from support_tokens.errors import RunFolderError
from support_tokens.report.records import (
    RECORD_KINDS,
    BenchmarkArm,
    BenchRecord,
    Check,
    GeneratedToken,
    Generation,
    GenerationRecord,
    MarginChanges,
    MarginRecord,
    Prediction,
    Record,
    RobustnessReport,
    compare_records,
    record_table,
    write_plot,
)
from support_tokens.report.robustness import render_html, render_text
from synthetic_reports import CE, synthetic

ROOT = Path(__file__).parents[2]
COMMITTED = sorted(
    path
    for folder in ("experiments", "benchmarks", "docs")
    for path in (ROOT / folder).rglob("*.json")
    if json.loads(path.read_text(encoding="utf-8")).get("kind") in RECORD_KINDS
    # Presets name regularizers of the commit that ran them; those that can run today are held by the lab's tests.
    if not path.name.endswith("preset.json") and path.parent.name != "lab"
)
BENCH = BenchRecord(
    "targets",
    {"processor": "x", "threads": 2},
    (BenchmarkArm("step", "plain", (1.0, 2.0), 1.0, 0.9, 1.1, 100, 1.0),),
    (Check("ratio", 1.0, "at most 2", True),),
    (Prediction("step", 1.0, 2.0),),
)
GENERATION = GenerationRecord("m", (Generation("a", 1, "b", (GeneratedToken(1, "b", {"s": None}),), "end", "Done."),))


def samples() -> list[Record]:
    record = sample_record()
    return [
        record,
        compare_records(record, sample_record("abc")),
        synthetic(ce=CE, other=(2.0, 1.0, 1.0, 1.0)),
        BENCH,
        GENERATION,
    ]


def in_json(record: Record) -> dict:
    return json.loads(json.dumps(record.record()))


@pytest.mark.parametrize("record", samples(), ids=lambda record: record.kind)
def test_a_record_comes_back_from_its_json(record, tmp_path) -> None:
    record.to_json(tmp_path / "record.json")
    assert type(record).from_json(tmp_path / "record.json") == record
    written = json.loads((tmp_path / "record.json").read_text())
    assert list(written)[:2] == ["schema_version", "kind"]
    assert RECORD_KINDS[record.kind].cls is type(record)


@pytest.mark.parametrize("record", samples(), ids=lambda record: record.kind)
def test_a_version_can_be_raised_alone_and_its_old_files_are_read(record, monkeypatch) -> None:
    known, old = RECORD_KINDS[record.kind], in_json(record)
    before = {kind: entry.version for kind, entry in RECORD_KINDS.items()}
    first = next(key for key in old if key not in ("schema_version", "kind"))
    old["formerly"] = old.pop(first)

    def upgrade(payload, version):
        assert version == known.version
        return {first if key == "formerly" else key: value for key, value in payload.items()}

    monkeypatch.setitem(
        RECORD_KINDS, record.kind, dataclasses.replace(known, version=known.version + 1, upgrade=upgrade)
    )
    assert type(record).from_record(old) == record
    assert record.record()["schema_version"] == known.version + 1
    after = {kind: entry.version for kind, entry in RECORD_KINDS.items()}
    assert after == {**before, record.kind: known.version + 1}
    assert type(record).from_record(in_json(record)) == record
    with pytest.raises(RunFolderError, match="schema_version must be 1 to"):
        type(record).from_record({**in_json(record), "schema_version": known.version + 2})


@pytest.mark.parametrize("record", [*samples(), GENERATION.generations[0]], ids=lambda record: type(record).__name__)
def test_a_notebook_shows_a_record_inertly_and_its_repr_is_short(record) -> None:
    page = record._repr_html_()
    assert page.startswith("<") and "<script" not in page  # a page in a frame is escaped
    assert page.count("<iframe") == page.count('<iframe sandbox="allow-scripts"')
    assert isinstance(record, MarginRecord | BenchRecord | GenerationRecord) or len(repr(record)) < 300


def test_names_of_version_1_are_read() -> None:
    record = sample_record(layers=(0,))
    old = in_json(record)
    old["schema_version"] = 1
    for entry in old["layers"]:
        for token in entry["tokens"]:
            for name, former in (("sanitized", "shown"), ("surprisal_nats", "surprise_nats")):
                if name in token:
                    token[former] = token.pop(name)
    assert MarginRecord.from_record(old) == record


def test_a_report_of_version_1_is_read() -> None:
    report = synthetic(seeds=2, ce=CE, other=(2.0, 1.0, 1.0, 1.0))
    old = in_json(report)
    old["schema_version"] = 1
    for difference in (*old["differences"], *old["area_differences"]):
        difference |= {"of": difference.pop("condition"), "against": difference.pop("reference")}
    for histogram in old["margins"]:
        for counts in histogram["arms"]:
            counts["negative_share"] = counts.pop("negative_fraction")
    old["sentence"] = {
        "source": "model",
        "layer": 0,
        "view": "noise",
        "arms": [
            {
                "arm": record.model,
                "tokens": [token.token for token in record.layers[0].tokens],
                "log_abs_det": [token.log_abs_det for token in record.layers[0].tokens],
                "sign": [token.sign for token in record.layers[0].tokens],
                "valid": [token.rankable for token in record.layers[0].tokens],
                "support": [],
            }
            for record in report.sentence
        ],
    }
    old["config"] |= {"of": 1, "against": 2}
    again = RobustnessReport.from_record(old)
    assert again == dataclasses.replace(report, config={**report.config, "of": 1, "against": 2})
    del old["sentence"]["arms"][0]["tokens"]
    with pytest.raises(RunFolderError, match="the record of version 1 cannot be read"):
        RobustnessReport.from_record(old)


def test_committed_results_are_there() -> None:
    assert {json.loads(path.read_text(encoding="utf-8"))["kind"] for path in COMMITTED} >= {
        "support-tokens/robustness", "benchmark"
    }  # fmt: skip


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: str(path.relative_to(ROOT)))
def test_committed_results_are_of_the_present_version_and_can_be_shown(path) -> None:
    payload = json.loads(path.read_text(encoding="utf-8"))
    known = RECORD_KINDS[payload["kind"]]
    assert payload["schema_version"] == known.version
    record = known.cls.from_json(path)
    if isinstance(record, RobustnessReport):
        assert record.arms[0].label in render_text(record, width=200)
        # Thirteen arms under 34 perturbations take half a minute to draw; the figures are those of the smaller ones.
        assert len(record.arms) > 5 or "Verdict" in render_html(record)
    elif isinstance(record, BenchRecord):
        assert record.arms[0].name in record_table(record)


def paths_of(value, path=()):
    """Paths to all values of a JSON object, through the first item of each list."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths_of(item, (*path, key))


@pytest.mark.parametrize("record", samples(), ids=lambda record: record.kind)
@pytest.mark.parametrize("value", [[], {}, 0, -1, 10**400, None, "\ud800", True, 1e308], ids=repr)
def test_whatever_a_file_holds_is_read_or_refused_in_one_sentence(record, value) -> None:
    payload = in_json(record)
    for path in list(paths_of(payload)):
        if not path or path[0] in ("config", "versions"):
            continue
        place = functools.reduce(operator.getitem, path[:-1], payload)
        kept, place[path[-1]] = place[path[-1]], value
        message = ""
        try:
            type(record).from_record(payload, source="file")
        except RunFolderError as error:
            message = str(error)
        place[path[-1]] = kept
        assert not message or ("\n" not in message and message.startswith("file: ") and message.endswith("."))


@pytest.mark.parametrize(
    ("record", "change", "says"),
    [
        (synthetic(ce=CE), lambda r: r.update(arms=[]), "arms must be of a length that is at least 1, not []"),
        (synthetic(ce=CE), lambda r: r.update(seeds=[]), "seeds must be of a length that is at least 1, not []"),
        (synthetic(ce=CE), lambda r: r["results"][0]["bits"].update(value=0), "must be above 0, received 0.0"),
        (synthetic(ce=CE), lambda r: r["results"].append(r["results"][0]), "is missing or too many"),
        (synthetic(ce=CE), lambda r: r["bootstrap"].update(confidence=2), "at least 0 and at most 1, not 2"),
        (record_of(layer_of("ab")), lambda r: r["layers"][0].update(tokens=[]), "length that is at least 1, not []"),
        (
            record_of(layer_of("ab"), layer_of("ab", layer=1)),
            lambda r: r["layers"][1]["tokens"].pop(),
            "All layers of text 0 must hold the same tokens, but layer 1 has 1 and another has 2",
        ),
        (
            record_of(layer_of("ab")),
            lambda r: r["layers"][0]["tokens"].reverse(),
            "must have the positions 0 to 1 in this order",
        ),
        (BENCH, lambda r: r.update(arms=[]), "arms must be of a length that is at least 1, not []"),
        (BENCH, lambda r: r["arms"][0].update(seconds=[]), "arms[0].seconds must be of a length that is at least 1"),
        (BENCH, lambda r: r["arms"][0].update(ratio=0), "arms[0].ratio must be above 0, not 0"),
        (BENCH, lambda r: r["predictions"][0].update(measured=0), "predictions[0].measured must be above 0, not 0"),
        (BENCH, lambda r: r["arms"][0].update(low=1e400), "arms[0].low must be a finite number, not inf"),
    ],
)
def test_empty_lists_zeros_and_other_lengths_are_refused(record, change, says) -> None:
    payload = in_json(record)
    change(payload)
    with pytest.raises(RunFolderError) as error:
        type(record).from_record(payload, source="file")
    assert says in str(error.value)


def test_a_benchmark_with_nothing_to_draw_is_drawn(tmp_path) -> None:
    write_plot(BENCH, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")


def test_deep_nesting_is_refused(tmp_path) -> None:
    path = tmp_path / "deep.json"
    path.write_text('{"schema_version": 1, "kind": "token_margins", "layers": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(RunFolderError):
        MarginRecord.from_json(path)
    with pytest.raises(RunFolderError):
        MarginChanges.from_json(path)
