"""Arms under perturbations: figures against a plain loop, pairing, padding, batching, and the JSON that is left."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from support_tokens.errors import ArgumentError, RunFolderError
from support_tokens.models import hook_embeddings
from support_tokens.report.records import ArmMargins, LayerMargins, RobustnessReport, histograms, sentence
from support_tokens.robustness import (
    ArmDetails,
    Bootstrap,
    EvaluationData,
    Measurement,
    compare,
    evaluate_robustness,
    measure,
)
from support_tokens.robustness.perturbations import Clean, EmbeddingNoise, PerturbationSet, standard_noise

QUICK = Bootstrap(resamples=200)
NOISE = PerturbationSet((EmbeddingNoise(0.5), EmbeddingNoise(1.0), EmbeddingNoise(0.5, "matched")))


def small(seed: int = 0, scale: float = 1.0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=16, initializer_range=0.3)
    )
    with torch.no_grad():
        model.transformer.wpe.weight *= scale
    return model


def ids(n: int = 6, length: int = 10) -> torch.Tensor:
    return torch.randint(0, 11, (n, length), generator=torch.Generator().manual_seed(1))


def plain_nats(model, sequence: torch.Tensor, noise: torch.Tensor | None = None) -> float:
    """Sum of -log p over all tokens but the first, one sequence at a time, without any code of the package."""
    x = model.transformer.wte(sequence[None]) + model.transformer.wpe(torch.arange(len(sequence)))
    if noise is not None:
        x = x + noise
    x = x - model.transformer.wpe(torch.arange(len(sequence)))  # the model adds positions itself
    log_p = model(inputs_embeds=x).logits[0].double().log_softmax(-1)
    return -sum(float(log_p[t - 1, sequence[t]]) for t in range(1, len(sequence)))


@torch.no_grad()
def test_figures_equal_a_plain_loop():
    model, data = small().eval(), ids()
    measured = measure(model, EvaluationData(data), NOISE)
    x = model.transformer.wte(data) + model.transformer.wpe(torch.arange(data.shape[1]))
    rms = float(x.double().pow(2).mean().sqrt())
    assert measured.embedding_rms == pytest.approx(rms, rel=1e-6)
    noise = standard_noise(0, range(len(data)), data.shape[1], 8)
    for name, deviation in (("clean", 0.0), ("noise 0.5", 0.5), ("noise 0.5 x RMS", 0.5 * rms)):
        expected = [plain_nats(model, row, deviation * noise[i : i + 1]) for i, row in enumerate(data)]
        np.testing.assert_allclose(measured.nats[name], expected, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 4])
def test_batch_size_changes_nothing(size):
    data = EvaluationData(ids())
    whole, parts = (measure(small(), data, NOISE, batch_size=s) for s in (6, size))
    for name in whole.nats:
        np.testing.assert_allclose(whole.nats[name], parts.nats[name], rtol=1e-5)


def test_padding_never_counts():
    data, short = ids(4), ids(4)[:, :7]
    mask = torch.ones_like(data)
    mask[1:, 7:] = 0
    padded = EvaluationData(data.masked_fill(mask == 0, 3), mask)
    other = EvaluationData(data.masked_fill(mask == 0, 9), mask)
    measured, again, alone = (measure(small(), d, NOISE) for d in (padded, other, EvaluationData(short)))
    assert padded.predicted.tolist() == [9, 6, 6, 6]
    assert padded.record() == other.record()
    assert measured.embedding_rms == pytest.approx(again.embedding_rms, rel=1e-12)
    for name in ("clean", "noise 0.5"):
        np.testing.assert_allclose(measured.nats[name], again.nats[name], rtol=1e-5)
        np.testing.assert_allclose(measured.nats[name][1:], alone.nats[name][1:], rtol=1e-5)


def test_bits_are_nats_over_ln2_and_characters():
    data = ids()
    characters = torch.randint(1, 5, data.shape, generator=torch.Generator().manual_seed(2))
    by_token = evaluate_robustness({"a": small()}, data, NOISE, bootstrap=QUICK)
    by_character = evaluate_robustness(
        {"a": small()}, EvaluationData(data, characters=characters), NOISE, bootstrap=QUICK
    )
    nats = measure(small(), EvaluationData(data), NOISE).nats["clean"].sum()
    assert by_token.result("a", "clean").bits.value == pytest.approx(nats / math.log(2) / (6 * 9))
    assert by_character.result("a", "clean").bits.value == pytest.approx(
        nats / math.log(2) / int(characters[:, 1:].sum())
    )
    assert (by_token.unit, by_token.measure, by_character.measure) == ("token", "bits per token", "BPC")
    ratios = [r.result("a", "noise 1").degradation.value for r in (by_token, by_character)]
    assert ratios[0] == pytest.approx(ratios[1])


def made(clean, *perturbed, rms: float = 1.0) -> Measurement:
    names = [p.name for p in NOISE.items]
    return Measurement(dict(zip(names, map(np.asarray, (clean, *perturbed)), strict=True)), rms)


def test_compare_on_figures_done_by_hand():
    ln2 = math.log(2)
    base = made([9 * ln2] * 6, [18 * ln2] * 6, [36 * ln2] * 6, [18 * ln2] * 6, rms=2.0)
    arm = made([9 * ln2] * 6, [13.5 * ln2] * 6, [18 * ln2] * 6, [27 * ln2] * 6, rms=6.0)
    report = compare({"base": [base], "arm": [arm]}, EvaluationData(ids()), NOISE, bootstrap=QUICK)
    assert report.result("base", "noise 1").bits.value == pytest.approx(4)
    assert report.result("base", "noise 1").degradation.value == pytest.approx(4)
    areas = {(a.arm, a.family): a.degradation.value for a in report.areas}
    # Trapezoids over sigma 0, 0.5, 1 through 1, 2, 4 and 1, 1.5, 2, divided by the width.
    assert areas["base", "embedding_noise/absolute"] == pytest.approx(0.5 * 1.5 + 0.5 * 3)
    assert areas["arm", "embedding_noise/absolute"] == pytest.approx(0.5 * 1.25 + 0.5 * 1.75)
    assert areas["arm", "embedding_noise/matched"] == pytest.approx(2)
    assert report.difference("arm", "noise 1").bits.value == pytest.approx(-2)
    assert report.difference("base", "noise 1") is None
    assert report.arm("arm").rms_ratio == pytest.approx(3)


def test_differences_are_paired_over_sequences():
    rng = np.random.default_rng(0)
    hard = rng.uniform(5, 50, size=6)
    base, arm = made(hard, hard, hard, hard), made(hard + 0.1, hard + 0.1, hard + 0.1, hard + 0.1)
    report = compare({"base": [base], "arm": [arm]}, EvaluationData(ids()), NOISE)
    assert report.difference("arm", "clean").bits.excludes(0)
    assert not report.result("arm", "clean").bits.excludes(report.result("base", "clean").bits.value)


def test_differences_are_paired_over_seeds():
    rng = np.random.default_rng(0)
    hard = rng.uniform(20, 30, size=6)
    lucky = rng.uniform(0, 20, size=5)
    base = [made(*[hard + shift] * 4) for shift in lucky]
    arm = [made(*[hard + shift + 0.5 + 0.01 * i] * 4) for i, shift in enumerate(lucky)]
    report = compare({"base": base, "arm": arm}, EvaluationData(ids()), NOISE, seeds=[3, 4, 5, 6, 7])
    assert report.bootstrap.over == ("sequences", "seeds") and report.seeds == (3, 4, 5, 6, 7)
    assert report.difference("arm", "clean").bits.excludes(0)
    assert report.result("arm", "clean").bits_by_seed == pytest.approx(
        [m.nats["clean"].sum() / math.log(2) / 54 for m in arm]
    )


def test_one_seed_says_so():
    report = evaluate_robustness({"a": small()}, ids(), NOISE, bootstrap=QUICK)
    assert report.bootstrap.over == ("sequences",)
    assert "seed" not in report.status  # the models were not trained here
    trained = evaluate_robustness({"a": small()}, ids(), NOISE, bootstrap=QUICK, config={"plan": {}})
    assert "one seed, so no claim about training" in trained.status


def test_arms_meet_the_same_noise_and_an_arm_equals_itself():
    report = evaluate_robustness({"a": small(), "b": small()}, ids(), NOISE, bootstrap=QUICK)
    for difference in (*report.differences, *report.area_differences):
        assert (difference.bits.value, difference.bits.low, difference.bits.high) == (0, 0, 0)


def test_the_same_call_gives_the_same_bytes():
    first, again = (
        json.dumps(evaluate_robustness({"a": small(), "b": small(1)}, ids(), NOISE, bootstrap=QUICK).record())
        for _ in range(2)
    )
    assert first == again


def test_modes_and_hooks_are_restored():
    model = small().train()
    model.transformer.h[1].eval()
    modes = [m.training for m in model.modules()]
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    evaluate_robustness({"a": model}, ids(), NOISE, bootstrap=QUICK)
    handle = hook_embeddings(model, lambda x: x * math.nan)
    with pytest.raises(ArgumentError, match="loss of arm 'a' under 'clean' must be finite, received nan on sequence 0"):
        evaluate_robustness({"a": model}, ids(), NOISE, bootstrap=QUICK)
    handle.remove()
    assert [m.training for m in model.modules()] == modes
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(p.grad is None for p in model.parameters())


def test_progress_counts_every_batch():
    seen = []
    evaluate_robustness(
        {"a": small(), "b": small(1)}, ids(), NOISE, batch_size=4, bootstrap=QUICK, progress=lambda *p: seen.append(p)
    )
    assert [done for done, _, _ in seen] == list(range(1, 17)) and {total for _, total, _ in seen} == {16}
    assert seen[0][2] == "a: clean" and seen[-1][2] == "b: noise 0.5 x RMS"


def test_models_of_a_lazy_sequence_are_loaded_one_at_a_time():
    class Lazy:
        loaded = 0

        def __len__(self):
            return 2

        def __getitem__(self, seed):
            self.loaded += 1
            return small(seed)

    lazy = Lazy()
    report = evaluate_robustness({"a": lazy}, ids(), NOISE, bootstrap=QUICK)
    assert lazy.loaded == 2 and len(report.arms[0].embedding_rms) == 2


@pytest.mark.parametrize(
    ("arms", "options", "says"),
    [
        ({}, {}, "At least one arm is required"),
        (
            {"a": [small()], "b": [small(), small()]},
            {},
            "same number of seeds, at least one, received {'a': 1, 'b': 2}",
        ),
        ({"a": []}, {}, "at least one, received {'a': 0}"),
        ({"a": small()}, {"baseline": "ce"}, "An arm must be one of 'a', received 'ce'"),
        ({"a": small()}, {"details": {"x": ArmDetails()}}, "received 'x'"),
        ({"a": small()}, {"seeds": [1, 2]}, "must be 1 different numbers, one a model of each arm, received [1, 2]"),
        ({"a": small()}, {"batch_size": 0}, "batch_size must be at least 1, received 0"),
    ],
)
def test_bad_arms_are_refused(arms, options, says):
    with pytest.raises(ArgumentError) as error:
        evaluate_robustness(arms, ids(), NOISE, **{"bootstrap": QUICK, **options})
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((torch.zeros(3, dtype=torch.long),), "received shape (3,)"),
        ((torch.zeros(3, 1, dtype=torch.long),), "received shape (3, 1)"),
        ((torch.zeros(2, 4),), "type torch.float32"),
        (
            (torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 4)),
            "attention_mask of evaluation data must have the shape",
        ),
        ((torch.zeros(1, 3, dtype=torch.long), torch.tensor([[0, 1, 1]])), "padding on the right"),
        ((torch.zeros(1, 3, dtype=torch.long), torch.tensor([[1, 0, 0]])), "Sequence 0 of the evaluation data"),
    ],
)
def test_bad_data_is_refused(arguments, says):
    with pytest.raises(ArgumentError) as error:
        EvaluationData(*arguments)
    assert says in str(error.value)


def test_ids_beyond_the_vocabulary_are_refused():
    with pytest.raises(ArgumentError, match=r"for arm 'a' must be in 0 ... 10, received 0 ... 11"):
        evaluate_robustness({"a": small()}, torch.tensor([[0, 11]]), NOISE, bootstrap=QUICK)


def test_histograms_share_edges_and_count_everything():
    rng = np.random.default_rng(0)
    margins = {
        "a": ArmMargins([*rng.normal(size=400), -50.0, -math.inf], [1] * 401 + [0]),
        "b": ArmMargins(rng.normal(3, 1, size=400), np.where(np.arange(400) < 40, -1, 1)),
        "c": ArmMargins([0.5], [1], source="prior"),
        "d": None,
    }
    model, prior = histograms(margins)
    assert (model.source, prior.source) == ("model", "prior") and [c.arm for c in prior.arms] == ["c"]
    for counts in model.arms:
        assert sum(counts.counts) + counts.below + counts.above + counts.singular == counts.n
    assert model.arms[0].singular == 1 and model.arms[0].minimum == -50.0 and model.arms[0].below >= 1
    assert model.arms[1].negative_fraction == pytest.approx(0.1) and sum(model.arms[1].negative_counts) <= 40
    assert model.edges[0] <= 0 <= model.edges[-1]


def test_support_tokens_are_the_smallest_valid_margins():
    text = LayerMargins.of_columns(
        list("abcdef"), [-9.0, -9.0, -1.0, 2.0, -math.inf, -1.0], [1, 1, -1, 1, 0, 1], [False, False, *[True] * 4]
    )
    (record,) = sentence({"a": ArmMargins([], [], text=text)})
    assert [token.position for token in record.layers[0].support_tokens(3)] == [4, 2, 5]
    assert record.layers[0].tokens[4].log_abs_det is None
    assert sentence({"a": None}) == ()
    with pytest.raises(ArgumentError, match="one log margin, sign, rankable and id a token"):
        LayerMargins.of_columns(["a"], [0.0, 1.0], [1])


@pytest.fixture(scope="module")
def report() -> RobustnessReport:
    text = LayerMargins.of_columns("ab", [0.0, -math.inf], [1, 0])
    details = {"b": ArmDetails("Barrier", "with <b>", 2.5, ArmMargins([0.1, 0.2], [1, -1], text=text))}
    return evaluate_robustness(
        {"a": [small(), small(1)], "b": [small(2), small(3)]},
        ids(),
        NOISE,
        details=details,
        bootstrap=QUICK,
        config={"steps": 3, "nested": {"lambda": [0.1, None]}},
    )


def test_json_keeps_everything(report, tmp_path):
    path = tmp_path / "report.json"
    report.to_json(path)
    assert RobustnessReport.from_json(path) == report
    record = json.loads(path.read_text())
    assert record["schema_version"] == 2 and record["kind"] == "support-tokens/robustness"
    assert record["perturbation_checksum"] == NOISE.checksum
    assert {"torch", "transformers", "python"} <= set(record["versions"])


def test_table_has_a_row_for_each_seed_and_one_for_all(report, tmp_path):
    frame = report.to_dataframe()
    assert len(frame) == 2 * 4 * 3
    overall = frame[frame.seed == "all"].set_index(["arm", "perturbation"])
    each = frame[frame.seed != "all"].groupby(["arm", "perturbation"]).bits.mean()
    np.testing.assert_allclose(overall.bits.loc[each.index].astype(float), each)
    report.to_csv(tmp_path / "report.csv")
    lines = (tmp_path / "report.csv").read_text().splitlines()
    assert len(lines) == 25 and lines[0].startswith(
        "arm,perturbation,family,strength,unit,n_sequences,n_tokens,seed,n_seeds"
    )


def broken(report, change) -> str:
    record = json.loads(json.dumps(report.record()))
    change(record)
    return json.dumps(record)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.update(schema_version=3), "schema_version must be 1 to 2, received 3"),
        (
            lambda r: r.update(kind="something"),
            "kind must be 'support-tokens/robustness', received 'something'",
        ),
        (lambda r: r.pop("arms"), "arms is missing"),
        (
            lambda r: r["arms"][1].update(embedding_rms=["1"]),
            "arms[1].embedding_rms[0] must be a finite number, not '1'",
        ),
        (
            lambda r: r["results"][0]["bits"].update(value=True),
            "results[0].bits.value must be a finite number, not True",
        ),
        (lambda r: r["results"][0].update(bits=3), "results[0].bits must be an object, not 3"),
        (lambda r: r["data"].update(sequences=2.5), "data.sequences must be a whole number, not 2.5"),
        (lambda r: r.update(seeds="0"), "seeds must be a list, not '0'"),
        (
            lambda r: r["sentence"][0]["layers"][0]["tokens"][0].update(valid=1),
            "sentence[0].layers[0].tokens[0].valid must be a truth value, not 1",
        ),
        (lambda r: r["results"].pop(), "('b', 'noise 0.5 x RMS') is missing or too many"),
        (lambda r: r.update(baseline="z"), "one of its arms, not 'z'"),
        (lambda r: r["areas"].pop(), "areas of a robustness report must be there once"),
        (lambda r: r["differences"][0].update(condition="z"), "differences of a robustness report must be there once"),
        (lambda r: r["area_differences"].clear(), "area_differences of a robustness report must be there once"),
        (lambda r: r["results"][0].update(bits_by_seed=[1.0]), "one figure for each of its 2 seeds"),
        (lambda r: r["margins"][0]["arms"][0].update(arm="z"), "must be of its arms, not of {'z'}"),
        (lambda r: r["margins"][0].update(edges=[0.0]), "A histogram of 1 edges"),
        (lambda r: r["sentence"][0]["layers"][0]["tokens"].pop(0), "must have the positions 0 to 0"),
        (lambda r: r["perturbations"].reverse(), "first perturbation of a robustness report must be the clean one"),
    ],
)
def test_other_json_is_refused_in_one_sentence(report, tmp_path, change, says):
    path = tmp_path / "report.json"
    path.write_text(broken(report, change))
    with pytest.raises(RunFolderError) as error:
        RobustnessReport.from_json(path)
    assert says in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_what_is_no_json_is_refused(report, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report.record())[:-100])
    with pytest.raises(RunFolderError, match="not valid JSON"):
        RobustnessReport.from_json(path)
    with pytest.raises(RunFolderError, match="cannot be read"):
        RobustnessReport.from_json(tmp_path / "missing.json")
    with pytest.raises(RunFolderError):
        report.to_json(tmp_path / "missing" / "report.json")


def test_clean_alone_is_a_report():
    report = evaluate_robustness({"a": small()}, ids(), [Clean()], bootstrap=QUICK)
    assert report.areas == () and len(report.results) == 1
