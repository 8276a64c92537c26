"""The contract of `attach_barrier`: what it adds to a loss, what it leaves alone, and how it goes again."""

import copy
import io
import pickle

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, GPT2Model, LlamaForSequenceClassification

from barrier_models import (
    KINDS,
    SOURCES,
    VOCABULARY,
    attached,
    batch,
    gradients,
    language_model,
    penalty_by_textbook,
)
from support_tokens import ArgumentError, CaptureError, UnsupportedModelError, attach_barrier, attached_barriers
from support_tokens.margins import state_margins, support_candidates
from support_tokens.models import capture_attention, hook_embeddings


def embeddings(model, data):
    seen = []
    handle = hook_embeddings(model, seen.append)
    with torch.no_grad():
        model(**data)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", ["", "left", "right"])
def test_loss_is_cross_entropy_plus_weight_times_the_textbook_penalty(kind: str, padding: str) -> None:
    model, data = language_model(kind), batch(padding=padding)
    bare = model(**data).loss
    handle = attached(model, weight=0.3, rank=3)
    x = embeddings(model, data)
    expected = penalty_by_textbook(handle, x, data.get("attention_mask"))
    assert_close(model(**data).loss, bare + 0.3 * expected, rtol=0, atol=1e-10)
    assert handle.last["penalty"] == pytest.approx(expected.item(), abs=1e-10)
    assert handle.last["ce"] == pytest.approx(bare.item(), abs=1e-10)
    assert handle.last["log_margin_mean"] == pytest.approx(-expected.item(), abs=1e-10)
    assert handle.last["log_margin_min"] <= handle.last["log_margin_mean"]
    assert 0 <= handle.last["negative_fraction"] <= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("view", ["noise", "block"])
@pytest.mark.parametrize("layer", [0, 1, (0, -1)])
def test_loss_holds_the_mean_margin_of_the_models_own_attention(kind: str, view: str, layer: int | tuple) -> None:
    model, data = language_model(kind), batch(padding="left")
    mask = data["attention_mask"]
    with capture_attention(model, layers=layer if isinstance(layer, tuple) else (layer,)) as captured:
        bare = model(**data).loss
    found = [state_margins(state, view=view).log_abs_det[mask == 1] for state in captured.states(mask).values()]
    expected = -torch.stack([margins.mean() for margins in found]).mean()
    handle = attached(model, "model", weight=0.3, view=view, layer=layer)
    loss = model(**data).loss
    assert_close(loss, bare + 0.3 * expected, rtol=0, atol=1e-10)
    loss.backward()
    by_barrier = gradients(model)
    handle.remove()
    model.zero_grad()
    (bare + 0.3 * expected).backward()
    for name, gradient in gradients(model).items():
        assert_close(by_barrier[name], gradient, rtol=1e-8, atol=1e-9, msg=name)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_is_never_polluted(kind: str, source: str) -> None:
    model, data = language_model(kind), batch(padding="right")
    bare = model.eval()(**data)
    handle = attached(model, source, weight=5.0)
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            found = model.eval()(**data)
        assert torch.equal(found.loss, bare.loss)
        assert torch.equal(found.logits, bare.logits)
    assert handle.last == {} and handle.step == 0 and not handle.waiting
    loss = model.train()(**data).loss
    model.eval()(**data)
    assert not torch.equal(loss, bare.loss)
    assert handle.step == 1


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KINDS)
def test_generation_with_a_cache_is_the_same(kind: str, source: str) -> None:
    model = language_model(kind).eval()
    prompt, options = batch(2, 4)["input_ids"], {"max_new_tokens": 5, "do_sample": False}
    mask = torch.ones_like(prompt)
    before = model.generate(prompt, attention_mask=mask, **options)
    attached(model, source)
    assert torch.equal(model.generate(prompt, attention_mask=mask, **options), before)
    assert torch.equal(model.generate(prompt, attention_mask=mask, cache_implementation="static", **options), before)
    assert torch.equal(model.train().generate(prompt, attention_mask=mask, **options), before)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KINDS)
def test_remove_leaves_the_model_as_it_was(kind: str, source: str) -> None:
    model, data = language_model(kind), batch()
    hooks = {name: (len(m._forward_pre_hooks), len(m._forward_hooks)) for name, m in model.named_modules()}
    attributes, bare = set(model.__dict__), model(**data).loss
    parameters, function = dict(model.named_parameters()), model.loss_function
    handle = attached(model, source)
    model(**data)
    handle.remove()
    handle.remove()
    assert repr(handle).endswith("removed)")
    assert set(model.__dict__) == attributes
    assert model.loss_function is function
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert {n: (len(m._forward_pre_hooks), len(m._forward_hooks)) for n, m in model.named_modules()} == hooks
    assert torch.equal(model(**data).loss, bare)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kinds", [("prior", "prior"), ("prior", "model"), ("model", "model")], ids="+".join)
def test_two_barriers_add_up_and_go_in_any_order(kinds: tuple[str, str], first: int) -> None:
    model, data = language_model(), batch()
    bare = model(**data).loss
    handles = [attached(model, source, weight=0.1 * (n + 1), seed=n) for n, source in enumerate(kinds)]
    assert len(attached_barriers(model)) == 2
    loss = model(**data).loss
    terms = [handle.last["penalty"] * handle.weight for handle in handles]
    assert loss.item() == pytest.approx(bare.item() + sum(terms), abs=1e-9)
    handles[first].remove()
    assert [handle.attached for handle in handles] == [first == 1, first == 0]
    loss = model(**data).loss
    assert loss.item() == pytest.approx(bare.item() + terms[1 - first], abs=1e-9)
    loss.backward()
    again = attached(model, kinds[first], weight=0.1 * (first + 1), seed=first)
    assert model(**data).loss.item() == pytest.approx(bare.item() + sum(terms), abs=1e-9)
    for handle in (again, handles[1 - first]):
        handle.remove()
    assert torch.equal(model(**data).loss, bare)


def test_a_loss_function_of_the_user_is_kept_and_given_back() -> None:
    model, data = language_model(), batch()

    def doubled(logits, labels, vocab_size, **kwargs):
        return 2 * torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].flatten())

    model.loss_function = doubled
    handle = attached(model, weight=0.25)
    loss = model(**data).loss
    assert loss.item() == pytest.approx(handle.last["ce"] + 0.25 * handle.last["penalty"], abs=1e-9)
    handle.remove()
    assert model.loss_function is doubled


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KINDS)
def test_copies_have_a_barrier_of_their_own(kind: str, source: str, copied) -> None:
    model, data = language_model(kind), batch()
    handle = attached(model, source, penalty="hinge", target_margin=3.0, positions=3)
    other_of = copied(model)  # before any pass
    model(**data)
    other = copied(model)  # with tensors of a graph inside
    (found,) = attached_barriers(other)
    (_,) = attached_barriers(other_of)
    assert torch.equal(model(**data).loss, other(**data).loss)
    before = (handle.step, handle.last)
    other(**batch(seed=1)).loss.backward()
    assert (handle.step, handle.last) == before
    assert not gradients(model)
    assert gradients(other).keys() == dict(other.named_parameters()).keys() - frozen(other)
    found.remove()
    assert handle.attached and not attached_barriers(other)
    model(**data).loss.backward()


def frozen(model) -> set[str]:
    return {name for name, p in model.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_a_stock_one(kind: str, tmp_path) -> None:
    model, data = language_model(kind), batch()
    keys = model.state_dict().keys()
    handle = attached(model)
    assert model.state_dict().keys() == keys
    model.save_pretrained(tmp_path)
    stock, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float64)
    assert not any(report[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert torch.equal(stock.train()(**data).loss, language_model(kind)(**data).loss)
    assert model.load_state_dict(stock.state_dict(), strict=True) == torch.nn.modules.module._IncompatibleKeys([], [])
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({}, strict=True)
    handle.remove()


def test_the_law_is_saved_apart_and_taken_up_again() -> None:
    first, second, data = language_model(), language_model(), batch()
    handle, other = attached(first, positions=3), attached(second, positions=3, seed=9)
    first(**data).loss.backward()
    buffer = io.BytesIO()
    torch.save(handle.state_dict(), buffer)
    other.load_state_dict(handle.state_dict())
    assert other.step == 1
    assert torch.equal(first(**data).loss, second(**data).loss)
    with pytest.raises(ArgumentError, match="attach the regularizer with the options it was saved with"):
        other.load_state_dict(attached(language_model(), rank=2).state_dict())
    with pytest.raises(ArgumentError, match="the state must have the shapes"):
        attached(language_model(), "model").load_state_dict(handle.state_dict())


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KINDS)
def test_without_labels_there_is_no_loss_and_no_crash(kind: str, source: str) -> None:
    model, data = language_model(kind), batch()
    reference = model(**data).loss
    handle = attached(model, source, weight=0.4)
    assert model(input_ids=data["input_ids"]).loss is None
    model(input_ids=data["input_ids"])
    logits = model(input_ids=data["input_ids"]).logits
    logits = logits.float()  # as transformers does
    ce = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), data["labels"][:, 1:].flatten())
    loss = ce + handle.weighted_penalty()
    assert_close(ce, reference)
    loss.backward()
    by_hand = gradients(model)
    model.zero_grad()
    model(**data).loss.backward()
    for name, gradient in gradients(model).items():
        assert_close(by_hand[name], gradient, rtol=1e-9, atol=1e-11, msg=name)
    with pytest.raises(CaptureError, match="once for every loss"):
        handle.penalty()


def test_resized_and_tied_embeddings() -> None:
    for kind, tie in (("gpt2", True), ("gpt2", False), ("llama", True)):
        model, data = language_model(kind, tie_word_embeddings=tie), batch()
        handle = attached(model, weight=0.3)
        model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
        x = embeddings(model, data)
        loss = model(**data).loss
        expected = handle.last["ce"] + 0.3 * penalty_by_textbook(handle, x).item()
        assert loss.item() == pytest.approx(expected, abs=1e-9)
        loss.backward()
        assert model.get_input_embeddings().weight.grad[data["input_ids"]].any()
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert tied == tie


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"source": "both"}, "source must be 'prior' or 'model'"),
        ({"penalty": "square"}, "penalty must be one of log, hinge, map"),
        ({"view": "inner"}, "view must be 'noise' or 'block'"),
        ({"view": "block"}, "the law acts on the noise view of layer 0"),
        ({"layer": 1}, "the law acts on the noise view of layer 0"),
        ({"source": "model", "penalty": "map"}, "'map' needs the squared error of a law"),
        ({"source": "model", "rank": 3}, "belong to the law"),
        ({"source": "model", "noise_scale": 0.1}, "belong to the law"),
        ({"source": "model", "layer": 2}, "received 2"),
        ({"source": "model", "layer": (0, -2)}, "each once"),
        ({"source": "model", "layer": ()}, "one block or more"),
        ({"target_margin": 1.0}, "belongs to the penalty 'hinge'"),
        ({"penalty": "hinge", "target_margin": float("nan")}, "finite number of nats"),
        ({"positions": 0}, "positions must be at least 1"),
        ({"positions": "best"}, "or 'support', received 'best'"),
        ({"positions": "support", "candidates": 0}, "candidates must be a whole number of at least 1"),
        ({"candidates": 1.5}, "candidates must be a whole number of at least 1, received 1.5"),
        ({"rank": 2.5}, "rank must be a whole number of at least 1, received 2.5"),
        ({"rank": True}, "rank must be a whole number"),
        ({"seed": "a"}, "seed must be a whole number, received 'a'"),
        ({"noise_scale": "1"}, "positive finite"),
        ({"penalty": "hinge", "target_margin": "1"}, "finite number of nats"),
        ({"rank": 0}, "at least 1"),
        ({"noise_scale": -1.0}, "positive finite"),
        ({"weight": -0.1}, "finite number of at least 0"),
        ({"weight": True}, "finite number of at least 0"),
        ({"weight": "0.1"}, "finite number of at least 0"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_and_leaves_no_trace(options: dict, words: str) -> None:
    model = language_model()
    with pytest.raises(ArgumentError, match=words) as refusal:
        attach_barrier(model, **options)
    assert "\n" not in str(refusal.value)
    assert attached_barriers(model) == []
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())


def test_models_that_are_none() -> None:
    llama = language_model("llama").config
    bert = BertConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    for model in (
        torch.nn.Linear(2, 2),
        GPT2Model(language_model().config),
        LlamaForSequenceClassification(llama),
        BertForMaskedLM(bert),
    ):
        with pytest.raises(UnsupportedModelError, match=f"received {type(model).__name__}"):
            attach_barrier(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [0, (0, 1)])
def test_support_positions_are_exact_margins_of_each_layers_candidates(kind: str, layer: int | tuple) -> None:
    model, data = language_model(kind), batch(padding="left")
    layers = layer if isinstance(layer, tuple) else (layer,)
    with capture_attention(model, layers=layers) as captured, torch.no_grad():
        model(**data)
    states = captured.states(data["attention_mask"]).values()
    counts = data["attention_mask"].sum(-1)
    expected = 0.0
    for state in states:
        margins = state_margins(state, positions=support_candidates(state, 2))
        expected -= ((margins.log_abs_det.mean(-1) * counts).sum() / counts.sum()).item() / len(layers)
    handle = attached(model, "model", layer=layer, positions="support", candidates=2)
    assert model(**data).loss.item() == pytest.approx(handle.last["ce"] + handle.current_weight * expected, abs=1e-10)
    again = handle.last["penalty"]
    model(**data)
    assert handle.last["penalty"] == again
