"""Captured margins while people train: gradients, checkpointing, compilation, 16 bits, and LoRA."""

import copy

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.testing import assert_close

from capturing import BATCH, IDS, LAYERS, MASK, margins_of, measured, penalty_gradients, same_gradients
from support_tokens.errors import CaptureError, UnsupportedModelError
from support_tokens.margins import state_margins
from support_tokens.models import AttentionCapture, capture_attention
from tiny_models import everything_in_float64, tiny_model


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "olmo2", "gpt_oss"])
def test_margins_have_the_gradient_of_finite_differences_by_every_parameter(name: str) -> None:
    model = tiny_model(name)
    generator = torch.Generator().manual_seed(1)
    direction = [1e-6 * torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]

    def shifted(sign: int) -> Tensor:
        with torch.no_grad():
            for parameter, step in zip(model.parameters(), direction, strict=True):
                parameter += sign * step
        return sum(values.sum() for values in measured(model).values())

    with everything_in_float64():
        with capture_attention(model, LAYERS) as capture:
            model(**BATCH)
            value = sum(values.sum() for values in margins_of(capture).values())
            gradients = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
        by_gradient = sum((g * step).sum() for g, step in zip(gradients, direction, strict=True) if g is not None)
        by_difference = (shifted(1) - (shifted(-2))) / 2
    assert_close(by_gradient, by_difference, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_checkpointing_without_reentry_keeps_the_gradient(name: str) -> None:
    model = tiny_model(name)
    capture = AttentionCapture(model, LAYERS)
    expected = penalty_gradients(model.train(), capture)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    found = penalty_gradients(model, capture)
    assert torch.equal(found[0], expected[0])
    same_gradients(found[1], expected[1])


def test_checkpointing_of_a_step_with_its_loss_records_nothing_in_the_backward_pass() -> None:
    model = tiny_model("llama").train()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    capture = AttentionCapture(model, (0,))
    loss = model(**BATCH, labels=IDS, use_cache=False).loss
    capture.clear()
    loss.backward()
    with pytest.raises(CaptureError, match="must have run in a forward pass"):
        capture.states()


def test_reentrant_checkpointing_is_refused_by_name() -> None:
    model = tiny_model("llama").train()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    capture = AttentionCapture(model)
    model(**BATCH, use_cache=False)
    with pytest.raises(CaptureError, match=r"layer 0 of LlamaForCausalLM .* use_reentrant=False"):
        capture.states(MASK)
    with torch.no_grad():
        model(**BATCH)
    assert torch.isfinite(margins_of(capture)[0]).all()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_states_of_a_pass_without_gradients_can_be_used_where_gradients_are_on(context) -> None:
    model = tiny_model("gemma3", dtype=torch.float32)
    expected = measured(model)
    with capture_attention(model, LAYERS) as capture:
        with context():
            model(**BATCH)
        for layer, state in capture.states(MASK).items():
            margins = state_margins(state)
            assert not margins.log_abs_det.requires_grad
            assert torch.equal(margins.log_abs_det, expected[layer])
            assert torch.isfinite(margins.sigma_min).all()


@pytest.mark.parametrize(("backend", "compiled_first"), [("aot_eager", True), ("aot_eager", False), ("eager", True)])
def test_a_compiled_model_gives_the_eager_gradient(backend: str, compiled_first: bool) -> None:
    torch._dynamo.reset()
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=1)
    reference = AttentionCapture(model)
    expected = penalty_gradients(model, reference)
    reference.remove()
    compiled = torch.compile(model, backend=backend)
    if compiled_first:
        compiled(**BATCH, use_cache=False)
        capture = AttentionCapture(compiled)
    else:
        capture = AttentionCapture(model)
    found = penalty_gradients(compiled, capture)
    assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    # A compiled graph gives zero where an eager one gives none: to what comes after attention.
    gradients = {name.removeprefix("_orig_mod."): gradient for name, gradient in found[1].items()}
    everything = {name: expected[1].get(name, torch.zeros_like(gradient)) for name, gradient in gradients.items()}
    assert expected[1].keys() <= gradients.keys()
    same_gradients(gradients, everything, atol=1e-4 * max(float(g.abs().max()) for g in expected[1].values()))
    capture.remove()
    torch._dynamo.reset()


# Precision


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("autocast", [True, False])
def test_sixteen_bit_activations_are_computed_in_float32(name: str, autocast: bool) -> None:
    model = tiny_model(name, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.no_grad(), capture_attention(model, LAYERS) as capture, torch.autocast("cpu", enabled=autocast):
        model(**BATCH)
        inside = capture.states(MASK)
        within = {layer: state_margins(state).log_abs_det for layer, state in inside.items()}
    outside = margins_of(capture)
    for layer, state in inside.items():
        assert state.query.dtype == state.to_query.weight.dtype == state.input_norm.direction.dtype == torch.float32
        assert torch.equal(state.value, state.value.bfloat16().float())
        assert within[layer].dtype == torch.float32
        assert torch.equal(within[layer], outside[layer])


# Adapters


def lora(model: nn.Module, **options) -> nn.Module:
    targets = ["c_attn", "c_proj"] if model.config.model_type == "gpt2" else ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = LoraConfig(r=2, lora_alpha=6, lora_dropout=0.0, target_modules=targets, init_lora_weights=False, **options)
    return get_peft_model(model, config, autocast_adapter_dtype=False)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_counts_and_learns(name: str, checkpointing: bool) -> None:
    torch.manual_seed(0)
    model = lora(tiny_model(name), fan_in_fan_out=name == "gpt2").train()
    merged = copy.deepcopy(model).merge_and_unload()
    expected = measured(merged)
    for layer, found in measured(model).items():
        assert_close(found, expected[layer], rtol=0, atol=1e-9 if name == "gpt2" else 1e-4)
    with model.disable_adapter():
        without = measured(model)
    assert any((without[layer] - measured(model)[layer]).abs().max() > 1e-2 for layer in LAYERS)
    capture = AttentionCapture(model, LAYERS)
    if checkpointing:
        model.enable_input_require_grads()
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    _, gradients = penalty_gradients(model, capture)
    assert all("lora_" in parameter for parameter in gradients)
    reference = AttentionCapture(merged, LAYERS)
    for parameter in merged.parameters():
        parameter.requires_grad_(True)
    _, of_merged = penalty_gradients(merged, reference)
    stem = "transformer.h.0.attn.c_attn" if name == "gpt2" else "model.layers.0.self_attn.k_proj"
    weight = of_merged[f"{stem}.weight"].T if name == "gpt2" else of_merged[f"{stem}.weight"]
    a, b = (model.get_parameter(f"base_model.model.{stem}.lora_{x}.default.weight") for x in "AB")
    # By the chain rule of W + 3 B A.
    assert_close(gradients[f"base_model.model.{stem}.lora_A.default.weight"], 3 * b.T @ weight, rtol=1e-4, atol=1e-4)
    assert_close(gradients[f"base_model.model.{stem}.lora_B.default.weight"], 3 * weight @ a.T, rtol=1e-4, atol=1e-4)


def test_a_merged_adapter_is_not_counted_twice() -> None:
    torch.manual_seed(0)
    model = lora(tiny_model("gpt2"), fan_in_fan_out=True)
    expected = measured(model)
    model.merge_adapter()
    for layer, found in measured(model).items():
        assert_close(found, expected[layer], rtol=0, atol=1e-9)


def test_variants_of_lora_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"adapter 'default' of Linear is a variant of LoRA"):
        measured(lora(tiny_model("llama"), use_dora=True))


def test_other_adapters_are_refused() -> None:
    model = get_peft_model(
        tiny_model("llama"), IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    )
    with pytest.raises(
        UnsupportedModelError, match=r"peft\.tuners\.ia3.* in a way whose effective weight is not known"
    ):
        measured(model)
