"""Weights as a projection used them in that very pass, or a refusal with the reason; nothing outlives its use."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.testing import assert_close

from support_tokens.errors import CaptureError, UnsupportedModelError
from support_tokens.margins import JacobianBlocks, state_margins
from support_tokens.models import AttentionCapture, capture_attention, model_margins
from tiny_models import attention_jacobians, everything_in_float64, tiny_model

IDS = torch.tensor([[5, 9, 3, 7, 11]])
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")

# Ways in which a projection's own pre-hook, or a property, computes its weight anew in each pass.
COMPUTED_WEIGHTS = {
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
    "hook-based weight norm": weight_norm,
    "hook-based spectral norm": spectral_norm,
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral norm": parametrizations.spectral_norm,
}


def llama(seed: int = 0) -> nn.Module:
    model = tiny_model("llama", dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model


def with_weights(way: str, seed: int = 0) -> nn.Module:
    model = llama(seed)
    torch.manual_seed(seed)
    for block in model.model.layers:
        for name in PROJECTIONS:
            COMPUTED_WEIGHTS[way](getattr(block.self_attn, name))
    return model.eval()


def oracle(model: nn.Module) -> Tensor:
    with everything_in_float64():
        return attention_jacobians(model, "llama", (0,), input_ids=IDS)[0]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("way", COMPUTED_WEIGHTS)
def test_the_first_pass_after_loading_reads_the_new_weights(way: str) -> None:
    wanted, model = with_weights(way, seed=0), with_weights(way, seed=1)
    model_margins(model, IDS)
    model.load_state_dict(wanted.state_dict())
    with everything_in_float64(), torch.no_grad(), capture_attention(model) as capture:
        model(input_ids=IDS)
    blocks = JacobianBlocks(capture.states()[0]).dense(slice(0, IDS.shape[1]))
    assert_close(blocks, oracle(wanted), rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("way", COMPUTED_WEIGHTS)
def test_steps_of_training_have_gradients_of_their_own(way: str) -> None:
    model = with_weights(way).train()
    with capture_attention(model) as capture:
        for _ in range(2):
            if way in ("spectral norm", "orthogonal"):  # both keep buffers
                with pytest.raises(UnsupportedModelError, match="reading does not change"):
                    model(input_ids=IDS)
                return
            model(input_ids=IDS)
            state_margins(capture.states()[0]).log_abs_det.sum().backward()
    gradients = [p.grad for p in model.model.layers[0].self_attn.parameters() if p.grad is not None]
    assert any(float(gradient.abs().sum()) > 0 for gradient in gradients)


class Quantized(nn.Linear):
    """A fake quantisation, as in quantisation-aware training."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (self.weight * 4).round() / 4, self.bias)


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("patched", [False, True])
def test_a_linear_layer_with_a_forward_of_its_own_is_refused(name: str, patched: bool) -> None:
    model = llama()
    attention = model.model.layers[0].self_attn
    layer = getattr(attention, name)
    if patched:
        layer.forward = Quantized.forward.__get__(layer)
    else:
        replaced = Quantized(layer.in_features, layer.out_features, bias=False, dtype=torch.float64)
        setattr(attention, name, replaced)
    with pytest.raises(UnsupportedModelError, match="received a forward of its own"):
        model_margins(model, IDS)


class Renamed(nn.Linear):
    """A subclass that computes what its parent does."""


def test_a_subclass_with_the_forward_of_linear_is_read() -> None:
    model, expected = llama(), model_margins(llama(), IDS)[0].log_abs_det
    model.model.layers[0].self_attn.q_proj.__class__ = Renamed
    assert torch.equal(model_margins(model, IDS)[0].log_abs_det, expected)


def test_adapters_by_row_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False)  # noqa: E731
    model = peft.get_peft_model(tiny_model("llama", dtype=torch.float32), config(), adapter_name="first")
    model.add_adapter("second", config())
    model.eval()
    with torch.no_grad(), capture_attention(model) as capture:
        model(input_ids=IDS.repeat(2, 1))
        assert capture.states()[0].batch == 2
        with pytest.raises(CaptureError, match="received adapter_names"):
            model(input_ids=IDS.repeat(2, 1), adapter_names=["__base__", "second"])


def test_a_block_at_two_depths_is_refused() -> None:
    model = llama()
    first, second = model.model.layers
    model.model.layers = nn.ModuleList([first, second, first])
    model.config.num_hidden_layers = 3
    for layer in (0, 2):
        with pytest.raises(UnsupportedModelError, match="a block that stands at one depth"):
            AttentionCapture(model, (layer,))
    assert model_margins(model, IDS, layers=(1,))[1].log_abs_det.isfinite().all()


def test_one_attention_in_two_blocks_is_refused() -> None:
    model = llama()
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    with torch.no_grad(), capture_attention(model), pytest.raises(CaptureError, match="received a second call"):
        model(input_ids=IDS, use_cache=False)


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("epsilon", [1e-3, None])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_norm_of_torch_in_the_place_of_the_familys_is_read(norm: type, epsilon: float | None, family: str) -> None:
    options = {} if epsilon is None else {"eps": epsilon}
    model = tiny_model(family, dtype=torch.float64)
    for block in model.model.layers:
        own = norm(block.input_layernorm.weight.shape[0], dtype=torch.float64, **options)
        nn.init.normal_(own.weight)
        block.input_layernorm = own
    with everything_in_float64(), torch.no_grad(), capture_attention(model) as capture:
        model(input_ids=IDS)
    blocks = JacobianBlocks(capture.states()[0]).dense(slice(0, IDS.shape[1]))
    with everything_in_float64():
        expected = attention_jacobians(model, family, (0,), input_ids=IDS)[0]
    assert_close(blocks, expected, rtol=0, atol=1e-10)


def test_a_norm_of_another_kind_is_refused() -> None:
    model = llama()
    model.model.layers[0].input_layernorm = nn.BatchNorm1d(12)
    with pytest.raises(
        UnsupportedModelError, match=r"must have a norm of its own family.* received torch.*BatchNorm1d"
    ):
        model_margins(model, IDS)
    model = llama()
    norm = model.model.layers[0].input_layernorm
    norm.forward = lambda x: 2 * x
    with pytest.raises(UnsupportedModelError, match="LlamaRMSNorm with a forward of its own"):
        model_margins(model, IDS)


def test_nothing_is_alive_after_use_with_the_collector_off() -> None:
    model = llama().train()
    capture = AttentionCapture(model, (0, 1))
    kept: list[weakref.ref] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
            states = capture.states()
            margins = {layer: state_margins(state) for layer, state in states.items()}
            total = loss + sum(margin.log_abs_det.sum() for margin in margins.values())
            total.backward()
            tensors = [state.query for state in states.values()] + [state.to_query.weight for state in states.values()]
            kept += [weakref.ref(tensor) for tensor in (*tensors, loss, total)]
            kept += [weakref.ref(state) for state in states.values()]
            capture.clear()
            del loss, states, margins, total, tensors
        assert [reference() for reference in kept if reference() is not None] == []
    finally:
        gc.enable()
        capture.remove()
