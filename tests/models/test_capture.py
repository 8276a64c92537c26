"""A capture leaves the model as it was, copies with it, reads caches, and refuses what it cannot read exactly."""

import copy
import pickle

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from capturing import BATCH, IDS, LAYERS, MASK, margins_of, measured
from support_tokens.errors import ArgumentError, CaptureError, UnsupportedModelError
from support_tokens.margins import state_margins
from support_tokens.models import AttentionCapture, capture, capture_attention
from tiny_models import tiny_model


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-bias-eager", "gemma2", "gpt_oss"])
def test_the_model_computes_what_it_did_bit_for_bit(name: str) -> None:
    model = tiny_model(name, dtype=torch.float32)
    with torch.no_grad():
        before = model(**BATCH).logits
        with capture_attention(model, LAYERS):
            during = model(**BATCH).logits
    assert torch.equal(before, during)


def test_only_captured_modules_see_another_configuration_and_it_is_given_back() -> None:
    config = LlamaConfig(vocab_size=23, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    model, sibling = LlamaForCausalLM(config), LlamaForCausalLM(config)
    attentions = [block.self_attn for block in model.model.layers]
    before = [dict(vars(attention)) for attention in attentions]
    with capture_attention(model, (1,)):
        assert model.config._attn_implementation == "sdpa"
        assert attentions[0].config is before[0]["config"]
        assert attentions[1].config._attn_implementation == "support_tokens"
        assert sibling.model.layers[1].self_attn.config._attn_implementation == "sdpa"
    for attention, variables in zip(attentions, before, strict=True):
        assert vars(attention).keys() == variables.keys()
        assert attention.config is variables["config"]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_implementation_set_during_a_capture_holds_for_captured_layers_too() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    expected = measured(model)
    with torch.no_grad(), capture_attention(model, LAYERS) as capture:
        model.set_attn_implementation("eager")
        weights = model(**BATCH, output_attentions=True).attentions
    assert all(w is not None for w in weights)
    for layer, values in margins_of(capture).items():
        assert_close(values, expected[layer], rtol=1e-4, atol=1e-4)


def test_a_checkpoint_saved_under_a_capture_is_the_stock_one(tmp_path) -> None:
    model = tiny_model("llama", dtype=torch.float32)
    with capture_attention(model, LAYERS):
        assert not [key for key in model.state_dict() if "support_tokens" in key]
        model.save_pretrained(tmp_path)
    assert "support_tokens" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(**BATCH).logits, model(**BATCH).logits)


# Caches


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "olmo2"])
@pytest.mark.parametrize("pieces", [[1] * 7, [3, 4]], ids=["token-by-token", "two-pieces"])
def test_a_cache_gives_the_margins_of_the_full_pass(name: str, pieces: list[int]) -> None:
    model = tiny_model(name)
    ids = IDS[2:]
    full = measured(model, input_ids=ids, attention_mask=MASK[2:])
    found: dict[int, list[Tensor]] = {layer: [] for layer in LAYERS}
    cache, start = None, 0
    with torch.no_grad(), capture_attention(model, LAYERS) as capture:
        for piece in pieces:
            out = model(ids[:, start : start + piece], attention_mask=MASK[2:, : start + piece], cache=cache)
            cache, start = out.cache, start + piece
            for layer, state in capture.states().items():
                assert state.length == piece
                found[layer].append(state_margins(state).log_abs_det)
    for layer in LAYERS:
        assert_close(torch.cat(found[layer], dim=1), full[layer], rtol=0, atol=1e-4)


def test_generation_leaves_the_state_of_the_newest_token() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    with capture_attention(model) as capture:
        out = model.generate(IDS[2:], attention_mask=MASK[2:], max_new_tokens=3, do_sample=False)
    (newest,) = measured(model, (0,), input_ids=out[:, :-1], attention_mask=torch.ones_like(out[:, :-1])).values()
    assert_close(margins_of(capture, None)[0][:, -1], newest[:, -1], rtol=1e-4, atol=1e-4)


def test_a_cache_of_fixed_size_is_refused() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    cache = StaticCache(config=model.config, max_cache_len=16)
    with capture_attention(model), torch.no_grad(), pytest.raises(CaptureError, match="StaticCache of fixed size"):
        model(IDS[2:], cache=cache)


# Copies


def test_a_deep_copy_captures_for_itself_and_holds_no_tensors() -> None:
    model = tiny_model("gemma3", dtype=torch.float32)
    capture = AttentionCapture(model, LAYERS)
    model(**BATCH)
    copied_model, copied = copy.deepcopy((model, capture))
    with pytest.raises(CaptureError, match="must have run in a forward pass"):
        copied.states()
    with torch.no_grad():
        copied_model.model.embed_tokens.weight.mul_(2)
        copied_model(**BATCH)
    after = margins_of(copied)
    assert all((after[layer] - values).abs().max() > 1e-4 for layer, values in margins_of(capture).items())
    copied.remove()
    assert not any(module._forward_pre_hooks for module in copied_model.modules())
    assert copied_model.model.layers[0].self_attn.config is copied_model.config
    model(**BATCH)
    assert capture.states().keys() == {0, 1}


def test_a_pickled_model_captures_for_itself() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    capture = AttentionCapture(model, LAYERS)
    model(**BATCH)
    expected = margins_of(capture)
    loaded_model, loaded = pickle.loads(pickle.dumps((model, capture)))
    with torch.no_grad():
        loaded_model(**BATCH)
    for layer, values in margins_of(loaded).items():
        assert torch.equal(values, expected[layer])
    loaded.remove()
    assert loaded_model.model.layers[0].self_attn.config is loaded_model.config


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_captures_of_one_layer_are_removed_in_any_order(order: tuple[int, int]) -> None:
    model = tiny_model("llama", dtype=torch.float32)
    config = model.config
    captures = [AttentionCapture(model, (0,)), AttentionCapture(model, (0, 1))]
    with torch.no_grad():
        model(**BATCH)
    assert torch.equal(margins_of(captures[0])[0], margins_of(captures[1])[0])
    captures[order[0]].remove()
    with torch.no_grad():
        model(**BATCH)
    assert torch.isfinite(margins_of(captures[order[1]])[0]).all()
    captures[order[1]].remove()
    captures[order[1]].remove()
    assert all(block.self_attn.config is config for block in model.model.layers)


def test_a_capture_that_fails_half_way_leaves_nothing(monkeypatch) -> None:
    model = tiny_model("llama", dtype=torch.float32)
    before = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    copied, seen = copy.copy, []

    def second_fails(value):
        seen.append(value)
        if len(seen) == 2:
            raise MemoryError
        return copied(value)

    monkeypatch.setattr(capture.copy, "copy", second_fails)
    with pytest.raises(MemoryError):
        AttentionCapture(model, (0, 1))
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == before
    assert all(block.self_attn.config is model.config for block in model.model.layers)
    assert not any(hasattr(block.self_attn, "_support_tokens_tap") for block in model.model.layers)


def test_an_offloaded_model_gives_its_margins() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    expected = measured(model)
    cpu_offload(model, execution_device="cpu", state_dict={n: t.clone() for n, t in model.state_dict().items()})
    assert model.model.layers[0].self_attn.q_proj.weight.device.type == "meta"
    for layer, values in measured(model).items():
        assert torch.equal(values, expected[layer])
    assert model.model.layers[0].self_attn.q_proj.weight.device.type == "meta"


# Refusals


def test_nothing_captured_is_an_error() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    with (
        capture_attention(model) as capture,
        pytest.raises(CaptureError, match="layer 0 of LlamaForCausalLM must have run"),
    ):
        capture.states()
    model(**BATCH)
    with pytest.raises(CaptureError, match="must have run in a forward pass of the model"):
        capture.states()


def test_a_pass_that_fails_leaves_nothing_of_the_one_before() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    with torch.no_grad(), capture_attention(model, LAYERS) as capture:
        model(**BATCH)
        handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**BATCH)
        handle.remove()
        with pytest.raises(CaptureError, match="layer 1"):
            capture.states()


def test_masks_that_are_not_causal_are_refused() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    bidirectional = torch.ones(3, 1, 7, 7, dtype=torch.bool)
    biased = torch.zeros(3, 1, 7, 7).masked_fill(~bidirectional.tril(), -torch.inf) - torch.eye(7)
    for mask in (bidirectional, biased):
        with torch.no_grad(), capture_attention(model) as capture:
            model(IDS, attention_mask=mask)
        with pytest.raises(CaptureError, match="a causal mask of 0 and -inf"):
            capture.states()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_four_dimensions_says_who_is_real(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=torch.float32)
    seen = torch.ones(7, 7, dtype=torch.bool).tril() & MASK.bool()[:, None, None, :]
    mask = seen if dtype == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(dtype).min)
    with torch.no_grad(), capture_attention(model) as capture:
        model(IDS, attention_mask=mask)
    margins = state_margins(capture.states(mask)[0])
    assert torch.equal(margins.valid, MASK.bool())
    assert_close(margins.log_abs_det, measured(model)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", [(), (2,), (-3,), (0, -2), (0.0,), (True,)])
def test_layers_that_are_not_there_are_named(layers: tuple) -> None:
    with pytest.raises(ArgumentError, match="layers must"):
        AttentionCapture(tiny_model("llama"), layers)


def test_layers_count_from_the_end() -> None:
    assert AttentionCapture(tiny_model("llama"), (-1, 0)).layers == (1, 0)


@pytest.mark.parametrize("shape", [(2, 7), (3, 6), (3, 7, 7)])
def test_an_attention_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    model = tiny_model("llama", dtype=torch.float32)
    with torch.no_grad(), capture_attention(model) as capture:
        model(**BATCH)
    with pytest.raises(ArgumentError, match="attention_mask must have"):
        capture.states(torch.ones(shape))


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention"])
def test_other_attention_implementations_are_refused(implementation: str) -> None:
    model = tiny_model("llama")
    model.config._attn_implementation_internal = implementation
    with pytest.raises(UnsupportedModelError, match=f"'{implementation}'.*attn_implementation='sdpa'"):
        AttentionCapture(model)


def test_attention_in_both_directions_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="attention in both directions"):
        AttentionCapture(tiny_model("gemma3", use_bidirectional_attention=True))


def test_threads_of_data_parallel_are_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[0].self_attn._is_replica = True
    with capture_attention(model), pytest.raises(CaptureError, match="DataParallel"):
        model(**BATCH)
