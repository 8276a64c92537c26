"""Analysis against autograd through the model's own modules, in any batching, by windows, and interrupted."""

import json
import math
import threading

import pytest
import torch
from torch.testing import assert_close

from support_tokens import analysis
from support_tokens.analysis import FIGURES, MarginReport, analyze, analyze_texts, windows_of
from support_tokens.analysis import texts as module
from support_tokens.errors import ArgumentError, DataError, NumericalError, RunFolderError
from support_tokens.margins import view_sign
from support_tokens.models import build_small_gpt, character_tokenizer, decoder_blocks, in_turn, model_margins
from tiny_models import attention_jacobians, everything_in_float64, tiny_model

IDS = [3, 7, 1, 12, 5, 5, 9]
MANY = {"a": [3, 7, 1, 12, 5, 5, 9], "b": [4, 4, 8], "c": [20], "d": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}


class Numbers:
    """A tokenizer whose tokens are numbers."""

    def convert_ids_to_tokens(self, ids):
        return [str(index) for index in ids]

    def decode(self, ids, **_):
        return f" {ids[0]}"


def figures_of(record):
    """All figures of a record, as one tensor a name, tokens of all entries in a row."""
    tokens = [token for entry in record.layers for token in entry.tokens]
    names = ("log_abs_det", "sigma_min", "gradient_share", "surprisal_nats")
    found = {name: torch.tensor([getattr(t, name) for t in tokens if getattr(t, name) is not None]) for name in names}
    found["per_head"] = torch.tensor([t.per_head for t in tokens])
    return {name: value.double() for name, value in found.items()}, [(t.sign, t.coupling_sign) for t in tokens]


@pytest.mark.parametrize("family", ["gpt2", "llama", "olmo2", "gemma2"])
def test_figures_are_those_of_autograds_jacobians(family) -> None:
    model = tiny_model(family)
    with everything_in_float64():
        jacobians = attention_jacobians(model, family, (0, 1), input_ids=torch.tensor([IDS]))
        report = analyze(model, Numbers(), IDS, layers=(0, 1), view=("noise", "block"))
        logits = model(torch.tensor([IDS])).logits[0].log_softmax(-1)
    for entry in report.record.layers:
        dense = jacobians[entry.layer][0]
        whole = torch.eye(dense.shape[-1], dtype=dense.dtype) + view_sign(entry.view) * dense
        get = lambda name, entry=entry: torch.tensor([getattr(t, name) for t in entry.tokens], dtype=torch.float64)  # noqa: E731
        sign, log_abs_det = torch.linalg.slogdet(whole)
        assert_close(get("sign"), sign, rtol=0, atol=0)
        assert_close(get("log_abs_det"), log_abs_det, rtol=1e-9, atol=1e-9)
        assert_close(get("sigma_min"), torch.linalg.svdvals(whole)[:, -1], rtol=1e-8, atol=1e-9)
        norms = torch.linalg.inv(whole).mT.norm(dim=(-2, -1))
        assert_close(get("gradient_share"), norms / norms.sum(), rtol=1e-7, atol=1e-9)
        eigenvalues = torch.linalg.eigvals((dense + dense.mT) / 2).real
        dominant = eigenvalues.gather(-1, eigenvalues.abs().argmax(-1, keepdim=True)).squeeze(-1)
        assert_close(get("coupling_sign"), dominant.sign(), rtol=0, atol=0)
        assert entry.tokens[0].surprisal_nats is None
        for t in range(1, len(IDS)):
            assert math.isclose(entry.tokens[t].surprisal_nats, -logits[t - 1, IDS[t]].item(), abs_tol=1e-9)


def test_head_figures_are_those_of_the_model_with_the_other_heads_silenced() -> None:
    model = tiny_model("gpt2")
    report = analyze(model, Numbers(), IDS)
    width = 12 // 4
    for head in range(4):
        alone = tiny_model("gpt2")
        with torch.no_grad():
            weight = alone.transformer.h[0].attn.c_proj.weight  # (inputs, outputs): rows are heads' outputs
            kept = weight[head * width : (head + 1) * width].clone()
            weight.zero_()[head * width : (head + 1) * width] = kept
        expected = model_margins(alone, torch.tensor([IDS]))[0].log_abs_det[0]
        found = torch.tensor([token.per_head[head] for token in report.select().tokens], dtype=torch.float64)
        assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_results_are_the_same_in_any_batching(family) -> None:
    model = tiny_model(family)
    options = {"layers": (0, 1), "views": ("noise", "block"), "window": 6, "overlap": 2}
    with everything_in_float64():
        alone, signs = figures_of(analyze_texts(model, Numbers(), MANY, batch_size=1, **options))
        for batch_size in (2, 3, 8):
            found, found_signs = figures_of(analyze_texts(model, Numbers(), MANY, batch_size=batch_size, **options))
            assert found_signs == signs
            for name, value in alone.items():
                assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=lambda said, name=name: f"{name}: {said}")


def test_a_text_is_not_changed_by_its_neighbours_or_the_order() -> None:
    model = tiny_model("gpt2")
    record = analyze_texts(model, Numbers(), MANY, batch_size=4)
    backwards = analyze_texts(model, Numbers(), dict(reversed(MANY.items())), batch_size=4)
    for place, name in enumerate(MANY):
        other = backwards.select(text=len(MANY) - 1 - place)
        assert backwards.texts[len(MANY) - 1 - place].name == name
        margins = [[t.log_abs_det for t in entry.tokens] for entry in (record.select(text=place), other)]
        assert_close(torch.tensor(margins[0]), torch.tensor(margins[1]), rtol=1e-10, atol=1e-10)


def test_windows_report_each_token_once_with_its_context() -> None:
    for length in range(1, 30):
        for window, overlap in ((5, 0), (5, 4), (8, 3), (40, 10)):
            spans = windows_of(length, window, overlap)
            assert [t for span in spans for t in range(span.first, span.stop)] == list(range(length))
            for span in spans:
                assert span.stop - span.start <= window
                assert span.first - span.start == (0 if span.start == span.first == 0 else overlap)


def test_a_token_of_a_later_window_is_that_of_the_window_alone() -> None:
    model = tiny_model("gpt2")
    ids = MANY["d"]
    record = analyze_texts(model, Numbers(), {"d": ids}, window=6, overlap=2)
    assert [(w.start, w.first, w.stop) for w in record.texts[0].windows] == [(0, 0, 6), (4, 6, 10), (8, 10, 11)]
    alone = analyze(model, Numbers(), ids[4:10]).select().tokens[2:]
    whole = record.select().tokens[6:10]
    assert [t.position for t in whole] == [6, 7, 8, 9]
    for one, other in zip(alone, whole, strict=True):
        assert math.isclose(one.log_abs_det, other.log_abs_det, rel_tol=1e-10, abs_tol=1e-10)
        assert math.isclose(one.surprisal_nats, other.surprisal_nats, rel_tol=1e-10)
    assert math.isclose(sum(t.gradient_share for t in record.select().tokens), 1.0, rel_tol=1e-12)
    assert "2 tokens before it" in record.notes[0]
    assert (record.window, record.overlap) == (6, 2)


def test_a_token_without_context_has_no_surprisal() -> None:
    record = analyze_texts(tiny_model("gpt2"), Numbers(), {"d": MANY["d"]}, window=4, overlap=0)
    assert [t.position for t in record.select().tokens if t.surprisal_nats is None] == [0, 4, 8]


def test_what_was_done_survives_an_interruption(monkeypatch) -> None:
    model = tiny_model("gpt2").train()
    whole = analyze_texts(model, Numbers(), MANY, batch_size=1)
    measure, calls = module.measure_windows, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(module, "measure_windows", interrupted)
    part = analyze_texts(model, Numbers(), MANY, batch_size=1)
    assert not part.complete
    assert [text.name for text in part.texts] == ["a", "b"]
    assert part.layers == whole.layers[:2]
    assert "interrupted: 2 of 4 texts" in " ".join(part.notes)
    assert model.training
    calls[:] = [1, 1]
    with pytest.raises(KeyboardInterrupt):
        analyze_texts(model, Numbers(), MANY)


def test_every_block_is_left_in_its_mode() -> None:
    model = tiny_model("gpt2").train()
    model.transformer.h[1].eval()  # as someone who freezes a block sets it
    modes = [block.training for block in model.modules()]
    analyze(model, Numbers(), IDS)
    assert [block.training for block in model.modules()] == modes


def test_it_waits_for_its_turn_on_the_model() -> None:
    model, finished = tiny_model("gpt2"), threading.Event()
    other = threading.Thread(target=lambda: (analyze(model, Numbers(), IDS), finished.set()))
    with in_turn(model):
        other.start()
        assert not finished.wait(0.3)
    other.join()
    assert finished.is_set()


def test_progress_counts_tokens() -> None:
    seen = []
    analyze_texts(tiny_model("gpt2"), Numbers(), MANY, batch_size=2, progress=lambda *said: seen.append(said))
    assert seen == sorted(seen)
    assert {0, 10, 22} <= {done for done, _ in seen}
    assert {total for _, total in seen} == {22}


def test_an_interruption_is_heard_within_a_window() -> None:
    def stop(done: int, total: int) -> None:
        if done > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        analyze(tiny_model("gpt2"), Numbers(), IDS, layers=(0, 1), progress=stop)


def test_figures_can_be_left_out() -> None:
    model = tiny_model("gpt2")
    names = ("sigma_min", "gradient_share", "coupling_sign", "per_head", "surprisal_nats")
    whole = analyze(model, Numbers(), IDS).select().tokens
    bare = analyze(model, Numbers(), IDS, skip=names).select().tokens
    assert [t.log_abs_det for t in bare] == [t.log_abs_det for t in whole]
    for name in names:
        assert {getattr(t, name) for t in bare} == {None}
        one = analyze(model, Numbers(), IDS, skip=(name,)).select().tokens
        assert {getattr(t, name) for t in one} == {None}
        for other in set(names) - {name}:
            assert [getattr(t, other) for t in one] == [getattr(t, other) for t in whole]


def test_no_block_below_the_deepest_that_is_read_runs_for_margins_alone() -> None:
    model, ran = tiny_model("gpt2"), []
    blocks = decoder_blocks(model)
    for place, block in enumerate(blocks):
        block.register_forward_hook(lambda *_, place=place: ran.append(place))
    margins = analyze(model, Numbers(), IDS, layers=(0,), skip=FIGURES).select().tokens
    assert ran == [0]
    ran.clear()
    whole = analyze(model, Numbers(), IDS, layers=(0,)).select().tokens
    assert set(ran) == set(range(len(blocks)))
    assert [token.log_abs_det for token in margins] == [token.log_abs_det for token in whole]


@pytest.fixture
def report() -> MarginReport:
    tokenizer = character_tokenizer("abc \n")
    torch.manual_seed(0)
    return analyze(build_small_gpt(tokenizer, layers=2, heads=2, width=8, context=16), tokenizer, "abba cab\na", (0, 1))


def test_json_has_the_keys_of_the_contract_and_comes_back(report, tmp_path) -> None:
    path = tmp_path / "report.json"
    report.to_json(path)
    made = json.loads(path.read_text())
    assert made["schema_version"] == 2
    assert isinstance(made["model"], str)
    assert [(entry["layer"], entry["view"]) for entry in made["layers"]] == [(0, "noise"), (1, "noise")]
    keys = {"position", "id", "token", "sign", "log_abs_det", "sigma_min", "valid"}
    assert all(keys <= set(token) for entry in made["layers"] for token in entry["tokens"])
    assert "".join(token["token"] for token in made["layers"][0]["tokens"]) == "abba cab\na"
    assert MarginReport.from_json(path) == report


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "robustness"}, "kind must be 'token_margins', received 'robustness'"),
        ({"schema_version": 3}, "schema_version must be 1 to 2, received 3"),
        ({"layers": []}, "layers must be of a length that is at least 1"),
        ({"layers": [{"layer": 0, "view": "noise", "tokens": [{"position": 0}]}]}, "tokens[0].id is missing"),
    ],
)
def test_a_file_that_is_no_record_is_named(report, tmp_path, change, said) -> None:
    path = tmp_path / "report.json"
    report.to_json(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(RunFolderError) as caught:
        MarginReport.from_json(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_table_and_parquet_hold_every_token(report, tmp_path) -> None:
    import pandas as pd

    frame = report.to_dataframe()
    assert len(frame) == 20
    assert list(frame.columns[:4]) == ["text", "name", "layer", "view"]
    report.to_parquet(tmp_path / "report.parquet")
    read = pd.read_parquet(tmp_path / "report.parquet")
    assert read["log_abs_det"].tolist() == frame["log_abs_det"].tolist()
    assert [list(heads) for heads in read["per_head"]] == frame["per_head"].tolist()
    assert read.attrs["model"] == report.record.model


def test_support_tokens_are_the_smallest_margins_earlier_first(report) -> None:
    tokens = report.select(layer=1).tokens
    found = report.support_tokens(3, layer=1)
    assert list(found) == sorted(tokens, key=lambda t: (t.log_abs_det, t.position))[:3]
    assert len(report.support_tokens(99)) == len(tokens)
    with pytest.raises(ArgumentError, match="k must be at least 1, received 0"):
        report.support_tokens(0)
    with pytest.raises(ArgumentError, match="no margins of layer 7"):
        report.support_tokens(1, layer=7)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"text": ""}, DataError, "text has no tokens"),
        ({"text": []}, DataError, "no text to analyze"),
        ({"text": [3, 99]}, DataError, "vocabulary of the model is 0 to 22"),
        ({"text": [-1]}, DataError, "token ids from -1"),
        ({"text": "\ud800"}, DataError, "half a surrogate pair"),
        ({"layers": (5,)}, ArgumentError, "layers must be integers"),
        ({"layers": ()}, ArgumentError, "one block or more"),
        ({"view": "both"}, ArgumentError, "view must be 'noise' or 'block', received 'both'"),
        ({"view": ("noise", "noise")}, ArgumentError, "each once"),
        ({"window": 0}, ArgumentError, "window must be at least 1"),
        ({"window": 1000}, ArgumentError, "at most the context of GPT2LMHeadModel"),
        ({"window": 4, "overlap": 4}, ArgumentError, "overlap must be from 0 to 3"),
        ({"batch_size": 0}, ArgumentError, "batch_size must be at least 1"),
        ({"skip": ("sign",)}, ArgumentError, "received 'sign'"),
    ],
)
def test_wrong_arguments_are_named(options, error, said) -> None:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstu")
    with pytest.raises(error) as caught:
        analyze(tiny_model("gpt2"), tokenizer, **{"text": IDS, **options})
    assert said in str(caught.value)


def test_a_model_that_gives_no_finite_figures_is_named() -> None:
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.transformer.h[0].attn.c_proj.weight.fill_(float("nan"))
    with pytest.raises(NumericalError, match="surprisal of a token must be finite"):
        analyze(model, Numbers(), IDS)
    with pytest.raises(NumericalError, match="log_abs_det of layer 0 must be finite"):
        analyze(model, Numbers(), IDS, skip=("surprisal_nats",))
    with pytest.raises(NumericalError, match="log_abs_det of layer 0 must be finite"):
        analyze(model, Numbers(), IDS, skip=FIGURES)


def test_the_public_names_are_the_packages() -> None:
    import support_tokens

    assert support_tokens.analyze is analysis.analyze
    assert support_tokens.MarginReport is analysis.MarginReport
