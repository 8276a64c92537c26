"""Evaluation from folders: runs under every family, models in bits per token, and nothing done twice."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from command import run as command
from support_tokens.errors import ArgumentError, RunFolderError
from support_tokens.regularizers import Barrier, CrossEntropy
from support_tokens.robustness import EvaluationData, cache
from support_tokens.robustness import evaluate as measuring
from support_tokens.robustness.lab import TokenizerSpelling, evaluate_models, evaluate_runs
from support_tokens.robustness.measure import expected_seconds
from support_tokens.robustness.perturbations import (
    FAMILIES,
    AdversarialNoise,
    DomainShift,
    EmbeddingNoise,
    PerturbationSet,
    TokenDrop,
    Typos,
    standard_perturbations,
)
from support_tokens.training import TrainingPlan, load_corpus, train

PLAN = TrainingPlan(
    layers=1, heads=2, width=8, context=16, steps=2, batch_size=4, log_every=1, evaluate_every=2, evaluate_windows=2,
    save_every=2, device="cpu",
)  # fmt: skip
TEXT = "In the beginning was the margin, and the margin was small. Every token stood near another. " * 60


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    (folder / "other.txt").write_text(TEXT[::-1], encoding="utf-8")
    corpus = load_corpus(str(folder / "text.txt"))
    for name, arm in (("ce", CrossEntropy()), ("barrier", Barrier())):
        train(PLAN, corpus, arm, folder / name, progress=False)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([TEXT], vocab_size=320, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer)
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = GPT2Config(
            n_layer=1, n_head=2, n_embd=8, vocab_size=len(tokenizer), n_positions=32, bos_token_id=None,
            eos_token_id=None,
        )  # fmt: skip
        GPT2LMHeadModel(config).save_pretrained(folder / f"model{seed}")
        tokenizer.save_pretrained(folder / f"model{seed}")
    return folder


def test_runs_under_every_family_are_measured_once_and_have_a_structure(place, tmp_path, monkeypatch):
    options = {
        "sequences": 4, "sigmas": (0.5,), "families": tuple(FAMILIES), "others": (str(place / "other.txt"),),
        "cache": tmp_path / "measured", "progress": False, "timings": False,
    }  # fmt: skip
    folders = [place / "ce", place / "barrier"]
    first = evaluate_runs(folders, **options)
    assert len(list((tmp_path / "measured").iterdir())) == 2
    assert {p.family.split("/")[0] for p in first.perturbations} == {
        "clean", "embedding_noise", "worst_case", "typos", "token_drop", "weight_rounding", "other_text",
    }  # fmt: skip
    assert all(r.calibration is not None and 0 <= r.calibration.value <= 1 for r in first.results)
    assert first.difference("barrier, weight 0.02", "clean").calibration is not None
    assert [s.setting for s in first.structure] == [
        "before training", "before training", "after training", "after training",
        "after training, embeddings of the baseline's size",
    ]  # fmt: skip
    assert all(arm.seconds is None for arm in first.arms)
    assert first.config["unknown_characters_elsewhere"] == {str(place / "other.txt"): 0.0}

    def again(*_args, **_options):
        raise AssertionError("measured twice")

    monkeypatch.setattr(measuring, "measure", again)
    assert json.dumps(evaluate_runs(folders, **options).record()) == json.dumps(first.record())
    columns = first.to_dataframe().columns
    assert {"calibration", "calibration_low", "calibration_difference"} <= set(columns)


def test_another_weight_or_another_source_is_another_measurement(monkeypatch):
    data, chosen = EvaluationData(torch.zeros(1, 3, dtype=torch.long)), standard_perturbations((0.5,))
    module = torch.nn.Module()
    module.gain = torch.nn.Parameter(torch.tensor(1.0))
    path = lambda *what: cache.measurement_path(Path(), module, *what)  # noqa: E731
    paths = [path(data, chosen, 4)]
    with torch.no_grad():
        module.gain += 1e-7
    paths.append(path(data, chosen, 4))
    assert path(data, chosen, 4) == paths[-1]
    paths.append(path(data, chosen, 5))
    paths.append(path(data, standard_perturbations((0.5,), seed=1), 4))
    paths.append(path(EvaluationData(torch.ones(1, 3, dtype=torch.long)), chosen, 4))
    monkeypatch.setattr(cache, "_code", lambda: "an edited source")
    paths.append(path(data, chosen, 4))
    assert len(set(paths)) == 6


@pytest.mark.parametrize("source", ["measure.py", "perturbations/text.py", "perturbations/new.py"])
def test_any_edit_of_what_measures_is_another_code(tmp_path, monkeypatch, source):
    room = Path(cache.__file__).parent
    shutil.copytree(room, tmp_path / "room", ignore=shutil.ignore_patterns("__pycache__"))
    before = cache._code.__wrapped__()
    monkeypatch.setattr(cache.resources, "files", lambda _name: tmp_path / "room")
    assert cache._code.__wrapped__() == before
    with open(tmp_path / "room" / source, "a") as file:
        file.write("# edited\n")
    assert cache._code.__wrapped__() != before


def test_a_measurement_that_is_torn_is_named(place, tmp_path):
    options = {"sequences": 4, "sigmas": (0.5,), "structure": False, "cache": tmp_path, "progress": False}
    evaluate_runs([place / "ce"], **options)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:100])
    with pytest.raises(RunFolderError, match="is no measurement"):
        evaluate_runs([place / "ce"], **options)


def test_before_training_all_arms_are_one(place):
    report = evaluate_runs([place / "ce", place / "barrier"], sequences=4, sigmas=(0.5,), progress=False)
    begun = [s for s in report.structure if s.setting == "before training"]
    assert begun[0].log_margin_mean == begun[1].log_margin_mean
    scaled = report.structure[-1]
    own = next(s for s in report.structure if (s.arm, s.setting) == (scaled.arm, "after training"))
    assert scaled.effective_rank == pytest.approx(own.effective_rank, rel=1e-5)


def test_models_of_one_tokenizer_are_compared_in_bits_per_token(place, tmp_path, monkeypatch, capsys):
    out, folders = tmp_path / "out", [place / "model0", place / "model1"]
    words = ["evaluate", *folders, "--data", place / "text.txt", "--output", out, "--sequences", 3, "--context", 24]
    words += ["--perturb", "noise,typos,rounding", "--sigma", 0.5, "--structure", "--csv", tmp_path / "a" / "rows.csv"]
    assert command(monkeypatch, *words) == 0
    made = json.loads((out / "report.json").read_text())
    assert made["unit"] == "token" and [arm["name"] for arm in made["arms"]] == ["model0", "model1"]
    assert {"typos/mixed", "weight_rounding"} <= {p["family"] for p in made["perturbations"]}
    assert len(made["structure"]) == 2
    assert (tmp_path / "a" / "rows.csv").read_text().startswith("arm,")
    assert "bits per token" in capsys.readouterr().out


def test_a_model_without_perturbation_has_the_loss_of_transformers(place):
    report = evaluate_models(
        [place / "model0"], str(place / "text.txt"), sequences=3, context=24, sigmas=(0.5,), progress=False
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(place / "model0")
    ids = torch.tensor(tokenizer(load_corpus(str(place / "text.txt")).test)["input_ids"])
    count = len(ids) // 24
    kept = min(3, count)
    rows = torch.stack([ids[i * count // kept * 24 :][:24] for i in range(kept)])
    model = GPT2LMHeadModel.from_pretrained(place / "model0").eval()
    model.loss_type = "ForCausalLM"
    expected = float(model(input_ids=rows, labels=rows).loss.detach()) / np.log(2)
    assert report.result("model0", "clean").bits.value == pytest.approx(expected, rel=1e-5)


def test_tokens_spell_back(place):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(place / "model0")
    spelling = TokenizerSpelling(tokenizer)
    ids = tokenizer(TEXT[:200])["input_ids"]
    assert "".join(map(spelling.text, ids)) == TEXT[:200]
    assert sum(spelling.tokens(spelling.text(token)) == [token] for token in ids) == len(ids)


def llama_with_bos(folder: Path, model_of_tokens: models.Model, *, first: str | None, replacing: bool) -> list[str]:
    """Saves a tiny Llama with a tokenizer that marks spaces in tokens, byte fallback off, with or without BOS."""
    raw = Tokenizer(model_of_tokens)
    raw.pre_tokenizer = pre_tokenizers.Metaspace() if replacing else pre_tokenizers.WhitespaceSplit()
    raw.decoder = decoders.Metaspace() if replacing else decoders.WordPiece(cleanup=False)
    trainer = trainers.BpeTrainer if replacing else trainers.WordPieceTrainer
    raw.train_from_iterator([TEXT], trainer(vocab_size=80, special_tokens=["<unk>", "<s>"], show_progress=False))
    if first is not None:
        raw.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, raw.token_to_id(first))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, bos_token_id=1, eos_token_id=None, initializer_range=0.5,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return TEXT.split()


def test_windows_begin_with_bos_where_the_tokenizer_adds_it_and_it_is_not_scored(place, tmp_path):
    llama_with_bos(tmp_path / "with", models.BPE(unk_token="<unk>"), first="<s>", replacing=True)
    options = {"sequences": 3, "context": 24, "progress": False, "families": ("noise", "typos", "token-drop")}
    corpus = str(place / "text.txt")
    report = evaluate_models([tmp_path / "with"], corpus, others=(str(place / "other.txt"),), **options)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "with")
    ids = torch.tensor(tokenizer(load_corpus(corpus).test, add_special_tokens=False)["input_ids"])
    count = len(ids) // 24
    kept = min(3, count)
    rows = torch.stack([ids[i * count // kept * 24 :][:24] for i in range(kept)])
    model = LlamaForCausalLM.from_pretrained(tmp_path / "with").eval()
    with torch.no_grad():
        logits = model(input_ids=torch.cat((torch.ones(kept, 1, dtype=torch.long), rows), 1)).logits
    log_p = logits.double().log_softmax(-1)[:, 1:-1].gather(-1, rows[:, 1:, None])
    clean = report.result("with", "clean")
    assert clean.bits.value == pytest.approx(-float(log_p.mean()) / np.log(2), rel=1e-5)
    assert clean.n_tokens == kept * 23 and report.config["special_tokens_in_front"] == ["<s>"]
    with pytest.raises(ArgumentError, match=r"at most 31 .* with 1 special tokens in front, received 32"):
        evaluate_models([tmp_path / "with"], corpus, sequences=2, context=32, progress=False)


def test_perturbations_of_the_text_leave_bos_alone():
    ids = torch.arange(1, 13).reshape(1, 12)
    data = EvaluationData(ids, prefix=1)
    (batch,) = data.batches(1)
    assert batch.labels[0].tolist() == [-100, -100, *range(3, 13)] and int(data.predicted) == 10
    with Typos(1.0, "drop").applied(torch.nn.Identity(), 1.0) as read:
        dropped = read(batch)
    assert dropped.input_ids[0, :2].tolist() == [1, 2] and int(dropped.attention_mask.sum()) == 2
    other = torch.arange(21, 33).reshape(1, 12)
    with DomainShift.of("other", other).applied(torch.nn.Identity(), 1.0) as read:
        assert read(batch).labels[0].tolist() == [-100, -100, *range(23, 33)]
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=40, n_positions=16)).eval()
    seen = []
    with TokenDrop(1.0).applied(model, 1.0) as read:
        handle = model.transformer.h[0].register_forward_pre_hook(lambda _m, args: seen.append(args[0].detach()))
        model(input_ids=read(batch).input_ids)
        handle.remove()
    assert bool((seen[0][0, 1:] == 0).all()) and bool((seen[0][0, 0] != 0).any())


@pytest.mark.parametrize(
    ("model_of_tokens", "replacing"),
    [(models.BPE(unk_token="<unk>"), True), (models.WordPiece(unk_token="<unk>"), False)],
    ids=["metaspace", "wordpiece"],
)
def test_typos_reach_every_character_under_other_vocabularies(place, tmp_path, model_of_tokens, replacing):
    text = " ".join(llama_with_bos(tmp_path / "m", model_of_tokens, first=None, replacing=replacing)[:60])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "m")
    spelling, ids = TokenizerSpelling(tokenizer), tokenizer(text)["input_ids"]
    assert "".join(map(spelling.text, ids)).strip() == text, "spaces are part of the tokens"
    reached = sum(len(spelling.text(token)) for token in ids if spelling.tokens(spelling.text(token)) == [token])
    assert reached >= 0.98 * len(text)
    report = evaluate_models(
        [tmp_path / "m"], str(place / "text.txt"), sequences=3, context=24, families=("typos",), progress=False
    )
    assert report.config["reached_by_typos"] >= 0.98
    assert (
        "reached_by_typos"
        not in evaluate_models(
            [tmp_path / "m"], str(place / "text.txt"), sequences=3, context=24, progress=False
        ).config
    )


def test_the_expected_time_is_said_before_the_first_measurement_and_not_for_the_cache(place, tmp_path, capsys):
    options = {"sequences": 3, "context": 24, "cache": tmp_path / "kept"}
    evaluate_models([place / "model0"], str(place / "text.txt"), **options)
    assert "expected time about" in capsys.readouterr().err
    evaluate_models([place / "model0"], str(place / "text.txt"), **options)
    assert "expected time" not in capsys.readouterr().err


def test_expected_seconds_are_those_of_a_clean_pass_times_passes_and_sequences(monkeypatch):
    clock = iter([0.0, 2.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=40, n_positions=16))
    data = EvaluationData(torch.zeros(6, 8, dtype=torch.long))
    chosen = PerturbationSet((EmbeddingNoise(0.5), AdversarialNoise(0.1, steps=5)))
    # A batch of 4 takes 2 seconds, so 6 sequences take 3; clean and noise are one pass each, the attack is 17.
    assert expected_seconds(model, data, chosen, batch_size=4) == pytest.approx(3 * 19)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model0", "ce", "--output", "out"], "runs and models cannot be compared"),
        (["model0", "--data", "text.txt"], "--output is required for models"),
        (["model0", "--output", "out"], "--data is required to evaluate models"),
        (["ce", "--output", "out", "--perturb", "earthquake"], "received 'earthquake'"),
    ],
)
def test_wrong_requests_are_one_sentence(place, tmp_path, monkeypatch, capsys, words, says):
    placed = [place / word if word in ("model0", "ce", "text.txt") else word for word in words]
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, "evaluate", *placed) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line


def test_models_of_two_tokenizers_are_refused(place):
    with pytest.raises(ArgumentError, match="must share their tokenizer"):
        evaluate_models([place / "model0", place / "ce" / "model"], str(place / "text.txt"), progress=False)
    with pytest.raises(RunFolderError, match="cannot be read"):
        evaluate_models([place / "nowhere"], str(place / "text.txt"), progress=False)


def test_a_context_that_a_model_cannot_read_is_refused_before_any_folder(place, tmp_path, monkeypatch, capsys):
    words = ["evaluate", place / "model0", "--data", place / "text.txt", "--output", tmp_path / "a" / "b"]
    assert command(monkeypatch, *words, "--sequences", 2, "--csv", tmp_path / "c" / "rows.csv") == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "context must be at most 32" in line and str(place / "model0") in line and "received 128" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["report.json", "report.html", "rows.csv"])
def test_a_report_that_is_there_is_kept_without_force(place, tmp_path, monkeypatch, capsys, name):
    (tmp_path / name).write_text("mine")
    assert command(monkeypatch, "evaluate", place / "ce", "--output", tmp_path, "--csv", tmp_path / "rows.csv") == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"'{tmp_path / name}' exists" in line and "--force" in line
    assert (tmp_path / name).read_text() == "mine"


def test_a_run_that_is_not_there_is_not_made(place, tmp_path, monkeypatch, capsys):
    for wrong, says in ((tmp_path / "nofolder", "there is no run folder"), (place / "text.txt", "is a file")):
        assert command(monkeypatch, "evaluate", wrong) == 1
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert says in line and str(wrong) in line
    assert not list(tmp_path.iterdir())


def test_one_arm_of_one_seed_twice_is_refused_before_it_is_measured(place, tmp_path, monkeypatch):
    def measured(*_args, **_options):
        raise AssertionError("measured")

    monkeypatch.setattr(measuring, "measure", measured)
    shutil.copytree(place / "ce", tmp_path / "copy")
    with pytest.raises(ArgumentError, match=r"must differ in seed, .* of seed 0; leave one out"):
        evaluate_runs([place / "ce", tmp_path / "copy"], progress=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device that must be missing")
def test_a_device_that_this_machine_lacks_is_one_sentence(place, tmp_path, monkeypatch, capsys):
    model, text = place / "model0", place / "text.txt"
    for words in (
        ["evaluate", model, "--data", text, "--output", tmp_path / "out", "--context", 16],
        ["analyze", "--model", model, "--text", "abc", "--json", tmp_path / "out" / "record.json"],
        ["bench", "--suite", "smoke", "--output", tmp_path / "out" / "record.json"],
    ):
        assert command(monkeypatch, *words, "--device", "cuda") == 1
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "device must be one of this machine" in line and "'cuda'" in line
    assert not list(tmp_path.iterdir())
