"""The decoder that a causal language model really calls, for families that call what `base_model` does not name."""

import copy

import pytest
import torch
import transformers
from torch import nn

from support_tokens.errors import UnsupportedModelError
from support_tokens.models import decoder_blocks, find_decoder
from tiny_models import tiny_model

_SIZES = {
    "vocab_size": 30,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "is_decoder": True,
    "is_encoder_decoder": False,
}
INNER_DECODERS = {
    "Bart": {},
    "Pegasus": {},
    "Marian": {},
    "MBart": {},
    "Blenderbot": {},
    "BlenderbotSmall": {},
    "PLBart": {},
    "Mvp": {},
    "BigBirdPegasus": {},
    "TrOCR": {},
    "Whisper": {"max_target_positions": 32, "max_source_positions": 8},
}


def inner_decoder_model(family: str, **options) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**_SIZES, **INNER_DECODERS.get(family, {}), **options)
    return getattr(transformers, f"{family}ForCausalLM")(config)


@pytest.mark.parametrize("family", INNER_DECODERS)
def test_a_decoder_inside_a_wrapper_is_found(family: str) -> None:
    model = inner_decoder_model(family)
    found = find_decoder(model)
    assert found.causal_model is model
    assert found.module is model.model.decoder
    assert found.blocks is model.model.decoder.layers
    assert len(found.blocks) == 2
    assert found.embedding is model.get_input_embeddings()


@pytest.mark.parametrize("family", ["opt", "gpt2", "gpt_neox", "llama", "gemma3", "mixtral"])
def test_hooks_on_the_decoder_fire_and_its_output_enters_the_head(family: str) -> None:
    model = tiny_model(family)
    found, kept = find_decoder(model), {}
    found.module.register_forward_hook(lambda _m, _a, output: kept.update(left=output[0]))
    model.get_output_embeddings().register_forward_pre_hook(lambda _m, args: kept.update(entered=args[0]))
    model(input_ids=torch.arange(6).reshape(2, 3))
    assert torch.equal(kept["left"], kept["entered"])
    assert found.blocks is decoder_blocks(model)


def test_opt_calls_the_inner_decoder() -> None:
    model = tiny_model("opt")
    assert find_decoder(model).module is model.model.decoder


def test_the_decoder_is_found_under_wrappers() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("llama")
    inner = model.model
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    assert find_decoder(adapted).module is inner
    assert find_decoder(torch.compile(adapted)).module is inner
    assert find_decoder(model.requires_grad_(False)).causal_model is model


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_finding_leaves_no_trace(device: str) -> None:
    model = tiny_model("opt").to(device)
    model.train()
    model.model.decoder.layers[1].eval()
    if device == "meta":
        with pytest.raises(Exception, match="weights"):
            find_decoder(model)
        return
    modes = [module.training for module in model.modules()]
    attributes = [{name: copy.copy(value) for name, value in vars(module).items()} for module in model.modules()]
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    find_decoder(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    for module, before in zip(model.modules(), attributes, strict=True):
        hooks = {name: value for name, value in vars(module).items() if "hooks" in name}
        assert hooks == {name: value for name, value in before.items() if "hooks" in name}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_it_is_found_where_gradients_are_disabled(context) -> None:
    model = tiny_model("gpt2")
    with context():
        assert find_decoder(model).module is model.transformer
        assert not torch.is_grad_enabled()


def _prophetnet() -> nn.Module:
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 2, "hidden_size": 16, "vocab_size": 30}
    heads = {"num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2}
    config = transformers.ProphetNetConfig(**sizes, **heads, encoder_ffn_dim=8, decoder_ffn_dim=8, is_decoder=True)
    config.is_encoder_decoder = False
    return transformers.ProphetNetForCausalLM(config)


def _with(change) -> nn.Module:
    model = tiny_model("llama")
    change(model)
    return model


def _repeat(model: nn.Module) -> None:
    model.model.layers[1] = model.model.layers[0]


def _skip(model: nn.Module) -> None:
    original = model.model.forward

    def forward(*args, **kwargs):
        layers, model.model.layers = model.model.layers, model.model.layers[:1]
        try:
            return original(*args, **kwargs)
        finally:
            model.model.layers = layers

    model.model.forward = forward


def _bypass(model: nn.Module) -> None:
    original = model.model.forward
    forward = lambda *args, **kwargs: original(*args, **kwargs)  # noqa: E731
    model.forward = lambda **kwargs: (model.lm_head(forward(**kwargs)[0]),)


def _detach(model: nn.Module) -> None:
    model.model.layers[0].register_forward_hook(lambda _m, _a, output: output.detach())


def _fail(model: nn.Module) -> None:
    def forward(**_):
        raise ValueError("pixel_values are required")

    model.forward = forward


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: nn.Linear(2, 2), "must be a causal language model of transformers with a language-model head"),
        (lambda: tiny_model("llama").model, "with a language-model head, received LlamaModel"),
        (
            lambda: _with(_repeat),
            r"must call each of its 2 blocks once and in order, received calls of \[1, 1\]|\[0, 1",
        ),
        (lambda: _with(_skip), r"blocks once and in order, received calls of \[0\]"),
        (
            lambda: _with(_bypass),
            "from the first output of a module that holds the blocks, received none that is called",
        ),
        (lambda: _with(_detach), "gradient of its logits, received none"),
        (lambda: _with(_fail), r"received ValueError \(pixel_values are required\)"),
        (_prophetnet, r"must read embeddings of shape \(B, T, 16\), received \(1, 6, 16\)"),
    ],
    ids=["no transformers", "no head", "repeated", "skipped", "bypassed", "detached", "failing", "ProphetNet"],
)
def test_a_model_that_cannot_be_hooked_is_refused_with_the_reason(model, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        find_decoder(model())
