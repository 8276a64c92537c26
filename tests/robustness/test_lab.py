"""The laboratory: a killed experiment ends in the same bytes, and rows agree, differ or are not comparable rightly."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from support_tokens.cli import main
from support_tokens.errors import ArgumentError, RunFolderError
from support_tokens.files import write_json
from support_tokens.regularizers import parse_regularizer, regularizer_config, regularizer_label
from support_tokens.report.records import RobustnessReport
from support_tokens.robustness import Bootstrap, EvaluationData, Measurement, compare
from support_tokens.robustness import evaluate as measuring
from support_tokens.robustness.lab import (
    PRESETS,
    Preset,
    contest,
    contests,
    load_preset,
    paper_rows,
    reproduce,
    reproduction,
)
from support_tokens.robustness.lab.contest import arm_kind
from support_tokens.robustness.perturbations import standard_perturbations

TEXT = "In the beginning was the margin, and the margin was small. Every token stood near another. " * 60
ARMS = ("ce", "barrier:weight=0.01", "barrier:weight=0.1", "noise:scale=0.3")
OUTPUTS = (
    "preset.json", "report.json", "report.html", "report.csv", "reproduction.json", "reproduction.md",
    "degradation.png", "path.png",
)  # fmt: skip
PLAN = {
    "layers": 1, "heads": 2, "width": 8, "context": 16, "steps": 2, "batch_size": 4, "log_every": 1,
    "evaluate_every": 2, "evaluate_windows": 2, "save_every": 1, "device": "cpu",
}  # fmt: skip


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def preset(tmp_path_factory) -> Preset:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    return Preset(
        "A test | <b>", str(text), PLAN, ARMS, (0, 1), sequences=4, sigmas=(0.5,), families=("noise", "rounding"),
        barrier="barrier:weight=0.1", path=ARMS[:3],
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(preset, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "out"
    reproduce(preset, folder, progress=False)
    return folder


def assert_same_bytes(first: Path, second: Path) -> None:
    for name in OUTPUTS:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_an_experiment_leaves_its_tables(preset, whole):
    assert set(OUTPUTS) <= {path.name for path in whole.iterdir()}
    assert len(list((whole / "runs").iterdir())) == 8 and len(list((whole / "measured").iterdir())) == 8
    log = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    assert [(row["arm"], row["seed"]) for row in log] == [(arm, seed) for seed in (0, 1) for arm in ARMS]
    record = json.loads((whole / "reproduction.json").read_text())
    assert record["kind"] == "support-tokens/reproduction" and record["schema_version"] == 1
    assert {row["status"] for row in record["rows"]} <= {"agrees", "differs", "not comparable"}
    assert len(record["rows"]) == 7 and record["contests"]
    page = (whole / "reproduction.md").read_text()
    assert "# A test \\| &lt;b>" in page and "## Beside the paper" in page and "## Structure" in page
    assert "⍽" not in page
    for line in page.splitlines():
        if line.startswith("| figure"):
            assert line.count("|") == 8


def test_killed_anywhere_it_goes_on_with_what_is_missing_and_ends_in_the_same_bytes(
    preset, whole, tmp_path, monkeypatch
):
    folder, trained, measured = tmp_path / "out", [], []
    train, measure = reproduction.train, measuring.measure

    def dying_train(plan, corpus, arm, run, **options):
        trained.append(run.name)
        if len(trained) == 3:
            # As a kill in the middle of making the folder leaves it.
            run.mkdir(parents=True, exist_ok=True)
            (run / ".versions.json.torn").write_text("{")
            raise Killed
        return train(plan, corpus, arm, run, **options)

    def dying_measure(*args, **options):
        measured.append(options["whose"])
        if len(measured) == 4:
            raise Killed
        return measure(*args, **options)

    monkeypatch.setattr(reproduction, "train", dying_train)
    monkeypatch.setattr(measuring, "measure", dying_measure)
    for _ in range(2):
        with pytest.raises(Killed):
            reproduce(preset, folder, progress=False)
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/model/model.safetensors")}
    assert len(kept) == 8
    reproduce(preset, folder, progress=False)
    assert_same_bytes(whole, folder)
    assert len(measured) == 4 + 5, "three had been measured, the fourth was lost"
    assert all(path.stat().st_mtime_ns == then for path, then in kept.items()), "nothing is trained twice"
    (folder / "report.json").unlink()
    monkeypatch.setattr(measuring, "measure", None)
    reproduce(preset, folder, progress=False)
    assert_same_bytes(whole, folder)


@pytest.mark.slow
def test_sigkill_in_the_middle(preset, whole, tmp_path):
    write_json(tmp_path / "p.json", {k: v for k, v in preset.record().items() if k != "schema_version"})
    words = [sys.executable, "-m", "support_tokens", "reproduce", "--preset", tmp_path / "p.json", "--output"]
    child = subprocess.Popen([*words, tmp_path / "out"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("out/runs/*/result.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, "it was still at work"
    assert not (tmp_path / "out/report.json").exists()
    reproduce(preset, tmp_path / "out", progress=False)
    assert_same_bytes(whole, tmp_path / "out")


def test_more_seeds_can_follow_and_another_preset_is_refused(preset, tmp_path):
    one = reproduce(preset, tmp_path / "out", seeds=1, progress=False)
    assert one.report.seeds == (0,)
    assert {row.status for row in one.rows} == {"not comparable"}
    with pytest.raises(ArgumentError, match=r"begun with another preset \(sequences differ\)"):
        reproduce(dataclasses.replace(preset, sequences=5), tmp_path / "out", progress=False)
    with pytest.raises(ArgumentError, match="seeds must be from 1 to 2"):
        reproduce(preset, tmp_path / "out", seeds=3, progress=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(RunFolderError, match="is not empty and holds no preset"):
        reproduce(preset, tmp_path / "mine", progress=False)


def test_presets_of_one_plan_share_what_is_trained(preset, whole, tmp_path):
    shared = tmp_path / "shared"
    few = dataclasses.replace(preset, arms=ARMS[1:3], barrier="", path=())
    reproduce(few, tmp_path / "few", runs=shared, progress=False)
    trained = {str(path): path.stat().st_mtime_ns for path in shared.glob("*/result.json")}
    reproduce(preset, tmp_path / "all", runs=shared, progress=False)
    assert len(list(shared.iterdir())) == 8
    assert all(Path(name).stat().st_mtime_ns == when for name, when in trained.items())
    log = [json.loads(line)["arm"] for line in (tmp_path / "all" / "log.jsonl").read_text().splitlines()]
    assert log == [ARMS[0], ARMS[3]] * 2
    assert_same_bytes(tmp_path / "all", whole)


def test_the_command_prints_the_table(preset, whole, tmp_path, monkeypatch, capsys):
    write_json(tmp_path / "p.json", {k: v for k, v in preset.record().items() if k != "schema_version"})
    monkeypatch.setattr(
        sys, "argv", ["support-tokens", "reproduce", "--preset", str(tmp_path / "p.json"), "--output", str(whole)]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert "clean cost" in printed and str(whole / "reproduction.md") in printed


@pytest.mark.parametrize("name", PRESETS)
def test_presets_of_the_package_can_be_used(name):
    preset = load_preset(name)
    assert (
        all(parse_regularizer(arm) for arm in preset.arms) and preset.barrier in preset.arms and preset.path[0] == "ce"
    )
    if name == "paper":
        assert len(preset.seeds) >= 5 and 1.0 in preset.sigmas
        weights = [getattr(parse_regularizer(arm), "weight", 0.0) for arm in preset.path]
        assert weights == sorted(weights) and weights[:2] == [0.0, 0.005] and weights[-1] == 0.5


EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PRESETS_OF_EXPERIMENTS = sorted([*EXPERIMENTS.glob("lab/*.json"), *EXPERIMENTS.glob("*/preset.json")])


@pytest.mark.parametrize("path", PRESETS_OF_EXPERIMENTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_presets_of_the_experiments_can_be_used(path):
    assert load_preset(path).arms[0] == "ce"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"arms": ()}, "must have arms and seeds"),
        ({"arms": ("ce", "ce")}, "each once"),
        ({"arms": ("cee",), "path": (), "barrier": ""}, "a regularizer must be one of ce, .*, received 'cee'"),
        ({"seeds": (1, 1)}, "each once"),
        ({"plan": {"seed": 1}}, "has no seed"),
        ({"plan": {"steps": -1}}, "steps must be"),
        ({"families": ("wind",)}, "not 'wind'"),
        ({"barrier": "barrier:weight=9"}, "is none of the arms"),
    ],
)
def test_bad_presets_are_refused(preset, change, says):
    with pytest.raises(ArgumentError, match=says):
        dataclasses.replace(preset, **change)


def test_a_preset_that_is_not_there():
    with pytest.raises(ArgumentError, match="there is no preset 'quik'; presets are quick, paper"):
        load_preset("quik")
    with pytest.raises(RunFolderError, match="cannot be read"):
        load_preset("nowhere.json")


def synthetic(clean: dict[str, float], slope: dict[str, float], seeds: int = 5) -> RobustnessReport:
    """A report of arms with given clean bits, and bits that rise by a slope under absolute and matched noise."""
    rng, chosen = np.random.default_rng(0), standard_perturbations((0.5,))
    data = EvaluationData(torch.zeros(16, 9, dtype=torch.long), characters=1)
    hard = np.linspace(-0.2, 0.2, 16)
    measured = {
        regularizer_label(parse_regularizer(arm)): [
            Measurement(
                {
                    p.name: 8 * np.log(2) * (clean[arm] + hard + slope[arm] * p.strength + rng.normal(0, 0.002, 16))
                    for p in chosen.items
                },
                1.0,
            )
            for _ in range(seeds)
        ]
        for arm in clean
    }
    return compare(measured, data, chosen, bootstrap=Bootstrap(resamples=300), split=True, config=config_of(clean))


def config_of(arms) -> dict:
    return {
        "arms": {regularizer_label(parse_regularizer(arm)): regularizer_config(parse_regularizer(arm)) for arm in arms}
    }


def status(report: RobustnessReport, preset: Preset) -> dict[str, str]:
    return {row.name: row.status for row in paper_rows(report, preset)}


def test_rows_agree_where_the_paper_lies_in_the_interval(preset):
    clean = {"ce": 2.0, "barrier:weight=0.01": 2.02, "barrier:weight=0.1": 2.028, "noise:scale=0.3": 2.0}
    # At sigma 0.5 the baseline has 5.36 bits, the barrier 5.192.
    slope = {"ce": 6.72, "barrier:weight=0.01": 6.2, "barrier:weight=0.1": 6.328, "noise:scale=0.3": 6.0}
    found = {row.name: row for row in paper_rows(synthetic(clean, slope), preset)}
    assert found["clean cost"].status == "agrees"
    assert found["clean cost"].ours.value == pytest.approx(0.014, abs=5e-4)
    assert found["baseline's degradation at sigma 0.5"].status == "agrees"
    assert found["barrier's degradation at sigma 0.5"].status == "agrees"
    assert found["difference of degradation at sigma 0.5"].status == "agrees"
    assert found["U-shaped path"].status == "agrees"
    assert found["best weight of the barrier"].ours.value == 0.01
    assert found["best weight of the barrier"].status == "differs"
    assert found["largest gain under noise"].ours.value == pytest.approx(-0.24 / 5.36, abs=5e-3)
    assert found["largest gain under noise"].status == "differs"


def test_rows_differ_where_it_does_not_and_one_seed_compares_nothing(preset):
    clean = dict.fromkeys(ARMS, 2.0)
    rising = {"ce": 1.0, "barrier:weight=0.01": 1.2, "barrier:weight=0.1": 1.4, "noise:scale=0.3": 1.0}
    found = status(synthetic(clean, rising), preset)
    assert found["clean cost"] == "differs" and found["U-shaped path"] == "differs"
    assert set(status(synthetic(clean, rising, seeds=1), preset).values()) == {"not comparable"}
    level = status(synthetic(clean, dict.fromkeys(ARMS, 1.0)), preset)
    assert level["U-shaped path"] == level["best weight of the barrier"] == "not comparable"
    assert paper_rows(synthetic(clean, rising), dataclasses.replace(preset, barrier="", path=())) == ()


def test_contests_keep_to_equal_cost_and_to_the_interval():
    clean = {"ce": 2.0, "barrier:weight=0.01": 2.01, "barrier:weight=0.1": 2.2, "noise:scale=0.3": 2.01}
    slope = {"ce": 2.0, "barrier:weight=0.01": 1.5, "barrier:weight=0.1": 0.1, "noise:scale=0.3": 1.8}
    (absolute, _) = contests(synthetic(clean, slope))
    assert (absolute.law, absolute.rival) == ("barrier, weight 0.01", "noise, scale 0.3")
    assert absolute.outcome == "law" and absolute.difference.excludes(0)
    slope["noise:scale=0.3"] = 1.2
    assert contests(synthetic(clean, slope))[0].outcome == "rival"
    slope["noise:scale=0.3"] = 1.5
    assert contests(synthetic(clean, slope))[0].outcome == "open"
    assert contests(synthetic({"ce": 2.0}, {"ce": 1.0})) == ()
    assert contests(dataclasses.replace(synthetic(clean, slope), config={})) == (), "nothing says what the arms are"


@pytest.mark.parametrize(
    ("arm", "kind"),
    [("ce", "none"), ("barrier", "law"), ("noise:scale=0.3", "rival"), ("smart:weight=0.1+barrier", "law")],
)
def test_what_an_arm_is_does_not_follow_from_its_label(arm, kind):
    assert arm_kind(regularizer_config(parse_regularizer(arm))) == kind


def test_a_control_that_states_its_kind_is_on_the_side_of_the_rivals(monkeypatch):
    monkeypatch.setattr(contest.REGULARIZERS["noise"], "kind", "control")
    assert arm_kind({"name": "noise"}) == "control"
    clean, slope = {"ce": 2.0, "barrier": 2.0, "noise": 2.0}, {"ce": 2.0, "barrier": 1.8, "noise": 1.5}
    (absolute, _) = contests(synthetic(clean, slope))
    assert (absolute.rival, absolute.outcome) == ("noise, scale 0.2", "rival")


def test_a_contest_is_chosen_on_other_sequences_than_it_is_judged_on():
    """Arms alike but for luck: what is best on the even sequences is worst on the odd ones, and a lead on its own half
    is no lead."""
    chosen, data = standard_perturbations((0.5,)), EvaluationData(torch.zeros(16, 9, dtype=torch.long), characters=1)
    noise = np.random.default_rng(0).normal(0, 0.01, (4, 16))
    luck = np.where(np.arange(16) % 2 == 0, -0.1, 0.1)
    arms = ("ce", "noise:scale=0.3", "barrier:weight=0.01", "barrier:weight=0.1")
    lead = dict(zip(arms, (0.0, 0.0, luck, -luck), strict=True))
    measured = {
        regularizer_label(parse_regularizer(arm)): [
            Measurement(
                {p.name: 16 * np.log(2) * (2 + p.strength * (1 + lead[arm]) + noise[i]) for p in chosen.items}, 1.0
            )
        ]
        for i, arm in enumerate(arms)
    }
    report = compare(measured, data, chosen, bootstrap=Bootstrap(resamples=300), split=True, config=config_of(arms))
    made = contests(report)[0]
    assert made.law == "barrier, weight 0.01" and made.difference.value > 0 and made.outcome != "law"
    assert contests(RobustnessReport.from_record(json.loads(json.dumps(report.record())))) == contests(report)
    assert contests(compare(measured, data, chosen, bootstrap=Bootstrap(resamples=300), config=config_of(arms))) == ()
    with pytest.raises(ArgumentError, match="The choice of a robustness report must be there once"):
        dataclasses.replace(report, split=dataclasses.replace(report.split, choice=report.split.choice[1:]))
    # By hand, on the odd sequences alone: the area under the line from clean to the one strength is their mean.
    rival = made.rival
    by_hand = sum(
        (measured[made.law][0].nats[p.name] - measured[rival][0].nats[p.name])[1::2].sum() / (8 * 8 * np.log(2)) / 2
        for p in (chosen.items[0], next(p for p in chosen.items if p.family == made.family))
    )
    assert made.difference.value == pytest.approx(by_hand)
