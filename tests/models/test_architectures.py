"""Each family's table against autograd through the model's own modules, on tiny random models."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import BloomConfig, BloomForCausalLM, FalconConfig, FalconForCausalLM

from support_tokens.errors import UnsupportedModelError
from support_tokens.margins import AttentionState, JacobianBlocks, state_margins
from support_tokens.models import capture_attention
from support_tokens.models.architectures import architecture_of, supported_families
from support_tokens.models.architectures.weights import effective_weight
from tiny_models import CASES, attention_jacobians, everything_in_float64, left_and_right_padding, tiny_model

LAYERS = (0, 1)
every_case = pytest.mark.parametrize("name", CASES)
computed_in_float32 = pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.float32_inside])


def captured(model: nn.Module, mask: Tensor | None = None, **batch) -> dict[int, AttentionState]:
    with torch.no_grad(), capture_attention(model, LAYERS) as capture:
        model(attention_mask=mask, use_cache=False, **batch)
    return capture.states(mask)


def states_and_oracle(name: str, in_float64: bool) -> tuple[dict[int, AttentionState], dict[int, Tensor], Tensor]:
    model = tiny_model(name)
    ids, mask = left_and_right_padding()
    if not in_float64 and model.config._attn_implementation == "eager":
        # Such a model fills a left-padded row with the lowest float64, which is minus infinity to its float32 softmax.
        mask = mask.index_fill(0, torch.tensor([0]), 1)
    with everything_in_float64(in_float64):
        oracle = attention_jacobians(model, name, LAYERS, input_ids=ids, attention_mask=mask)
        return captured(model, mask, input_ids=ids), oracle, mask.bool()


@every_case
def test_blocks_and_margins_are_autograds(name: str) -> None:
    """Left and right padding, layers 0 and 1, both views; windows, where there are any, narrower than the sequence."""
    states, oracle, real = states_and_oracle(name, in_float64=True)
    for layer, state in states.items():
        blocks = JacobianBlocks(state).dense(slice(0, state.length))
        assert_close(blocks[real], oracle[layer][real], rtol=0, atol=1e-10)
        identity = torch.eye(state.width, dtype=torch.float64)
        for view, sign in (("noise", -1), ("block", 1)):
            margins = state_margins(state, view=view)
            expected = torch.linalg.slogdet(identity + sign * oracle[layer])
            assert torch.equal(margins.sign[real], expected.sign[real])
            assert_close(margins.log_abs_det[real], expected.logabsdet[real], rtol=0, atol=1e-9)
            assert torch.equal(margins.valid, real)
            assert (margins.log_abs_det[~real] == 0).all()


@computed_in_float32
def test_a_model_that_computes_norms_in_float32_agrees_to_float32(name: str) -> None:
    states, oracle, real = states_and_oracle(name, in_float64=False)
    for layer, state in states.items():
        blocks = JacobianBlocks(state).dense(slice(0, state.length))
        size = max(1.0, float(oracle[layer][real].abs().max()))
        assert_close(blocks[real] / size, oracle[layer][real] / size, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma3", "phi-qk-norm", "olmo2"])
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    model = tiny_model(name)
    ids = left_and_right_padding()[0][2:]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    together = captured(model, input_ids=ids, position_ids=positions)
    first, second = captured(model, input_ids=ids[:, :3]), captured(model, input_ids=ids[:, 3:])
    for layer in LAYERS:
        alone = torch.cat([state_margins(part[layer]).log_abs_det for part in (first, second)], dim=1)
        margins = state_margins(together[layer])
        assert_close(margins.log_abs_det, alone, rtol=0, atol=1e-5 if CASES[name].float32_inside else 1e-10)
        assert margins.valid.all()


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "opt", "llama", "mistral", "gemma2", "gemma3", "olmo2"])
def test_padding_on_either_side_leaves_the_margins_of_the_bare_sequence(name: str) -> None:
    model = tiny_model(name, dtype=torch.float32)
    ids, mask = left_and_right_padding()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = captured(model, mask, input_ids=ids, position_ids=positions)
    for row, real in enumerate(mask.bool()):
        alone = captured(model, input_ids=ids[row : row + 1, real])
        for layer in LAYERS:
            margins = state_margins(padded[layer])
            assert torch.isfinite(margins.log_abs_det).all()
            expected = state_margins(alone[layer]).log_abs_det[0]
            assert_close(margins.log_abs_det[row, real], expected, rtol=1e-3, atol=1e-3)


def test_a_sliding_window_narrows_what_a_position_sees() -> None:
    states = captured(tiny_model("gemma3"), input_ids=left_and_right_padding()[0][2:])
    local, everywhere = (states[layer].allowed_at(slice(0, 7), 7).sum(-1)[0, 0] for layer in LAYERS)
    assert local.tolist() == [1, 2, 3, 3, 3, 3, 3]
    assert everywhere.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_values_may_be_of_another_width_than_keys() -> None:
    """No supported family ships this; the shapes alone decide, so a Llama with wider values is read as it stands."""
    model = tiny_model("llama", num_key_value_heads=4)
    for block in model.model.layers:
        attention = block.self_attn
        attention.v_proj = nn.Linear(12, 4 * 6, bias=False, dtype=torch.float64)
        attention.o_proj = nn.Linear(4 * 6, 12, bias=False, dtype=torch.float64)
        attention.forward = _wider_values.__get__(attention)
    ids, mask = left_and_right_padding()
    with everything_in_float64():
        oracle = attention_jacobians(model, "llama", LAYERS, input_ids=ids, attention_mask=mask)
        states = captured(model, mask, input_ids=ids)
    for layer, state in states.items():
        blocks = JacobianBlocks(state).dense(slice(0, 7))
        assert state.value.shape[-1] == 6
        assert_close(blocks[mask.bool()], oracle[layer][mask.bool()], rtol=0, atol=1e-10)


def _wider_values(self, hidden_states, position_embeddings, attention_mask, **_):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

    heads = lambda layer, width: layer(hidden_states).unflatten(-1, (-1, width)).transpose(1, 2)  # noqa: E731
    query, key = apply_rotary_pos_emb(heads(self.q_proj, 4), heads(self.k_proj, 4), *position_embeddings)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
    out, _ = function(self, query, key, heads(self.v_proj, 6), attention_mask, scaling=0.5)
    return self.o_proj(out.flatten(2)), None


TINY = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("model", "model_type"),
    [
        (BloomForCausalLM(BloomConfig(**TINY, n_layer=1, n_head=2)), "bloom"),
        (FalconForCausalLM(FalconConfig(**TINY)), "falcon"),
    ],
    ids=["bloom", "falcon"],
)
def test_other_families_are_named_and_told_what_is_supported(model: nn.Module, model_type: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        architecture_of(model)
    assert type(model).__name__ in str(error.value)
    assert model_type in str(error.value)
    for family in supported_families():
        assert family in str(error.value)


@pytest.mark.parametrize(("name", "option"), [("olmo", {"clip_qkv": 1.0}), ("cohere", {"use_qk_norm": True})])
def test_an_option_outside_of_the_formula_is_named(name: str, option: dict) -> None:
    (attribute, value) = next(iter(option.items()))
    with pytest.raises(UnsupportedModelError, match=f"{attribute} = {value!r} where the formula for"):
        architecture_of(tiny_model(name, **option))


def test_modules_that_are_not_where_the_table_says_are_named() -> None:
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    attention.query = attention.q_proj
    del attention.q_proj
    with pytest.raises(UnsupportedModelError, match=r"has no module 'self_attn\.q_proj' in LlamaDecoderLayer"):
        architecture_of(model)


def test_a_module_that_is_no_model_of_transformers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear has no configuration of transformers"):
        architecture_of(nn.Linear(2, 2))


def test_post_norm_opt_attends_to_the_stream_itself() -> None:
    """OPT-350m normalises after it adds attention: what is added, and so mu, passes no norm."""
    model = tiny_model("opt", do_layer_norm_before=False)
    ids, mask = left_and_right_padding()
    states = captured(model, mask, input_ids=ids)
    calls = {}
    handles = [
        block.self_attn.register_forward_pre_hook(
            lambda _m, args, kwargs, layer=layer: calls.__setitem__(layer, kwargs), with_kwargs=True
        )
        for layer, block in enumerate(model.model.decoder.layers)
    ]
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    for handle in handles:
        handle.remove()
    for layer, block in enumerate(model.model.decoder.layers):
        kwargs = dict(calls[layer])
        x = kwargs.pop("hidden_states").detach().requires_grad_()
        mean = block.self_attn(hidden_states=x, **kwargs)[0]
        rows = [torch.autograd.grad(mean[:, 4, d].sum(), x, retain_graph=True)[0][:, 4] for d in range(x.shape[-1])]
        assert states[layer].input_norm is None
        assert_close(JacobianBlocks(states[layer]).dense(slice(4, 5))[:, 0], torch.stack(rows, 1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(dtype: torch.dtype) -> None:
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match="without quantisation"):
        effective_weight(layer)


def test_a_projection_of_an_unknown_kind_is_refused() -> None:
    layer = nn.Embedding(3, 2)
    with pytest.raises(
        UnsupportedModelError,
        match="Embedding must compute a projection",
    ):
        effective_weight(layer)
