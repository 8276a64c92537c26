"""Tiny random models of every family, and the autograd oracle that runs through a model's own modules.

The oracle knows nothing of tables: it runs the model's own block with its feed-forward part silenced, so that what the
block adds to its input is what attention adds, with norms after it and multipliers in it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from support_tokens.models import decoder_blocks

__all__ = ["CASES", "Case", "attention_jacobians", "everything_in_float64", "left_and_right_padding", "tiny_model"]

WIDTH, HEADS, KV_HEADS, VOCABULARY = 12, 4, 2, 23

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "head_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_SLIDING = {"sliding_window": 3}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}


@dataclass(frozen=True)
class Case:
    """A family and what makes its tiny configuration a hard one.

    Args:
        model_type: As in the configuration.
        options: What differs from the common configuration; None takes an option away.
        float32_inside: Whether the model's own code computes a norm or the weights of attention in float32.
        mlp: Where the feed-forward part of a block is; empty: the two layers `fc1` and `fc2` in the block itself.
    """

    model_type: str
    options: dict = field(default_factory=dict)
    float32_inside: bool = True
    mlp: str = "mlp"


CASES: dict[str, Case] = {
    "gpt2": Case("gpt2", {"scale_attn_by_inverse_layer_idx": True, **_NO_DROPOUT}, float32_inside=False),
    "gpt_neox": Case("gpt_neox", {"rotary_pct": 0.5, "hidden_size": 16}, float32_inside=False),
    "gpt_neox-sequential": Case("gpt_neox", {"use_parallel_residual": False, "hidden_size": 16}, float32_inside=False),
    "opt": Case("opt", {"ffn_dim": 16, "word_embed_proj_dim": WIDTH}, float32_inside=False, mlp=""),
    "llama": Case("llama"),
    "llama-bias-eager": Case("llama", {"attention_bias": True, "attn_implementation": "eager"}),
    "llama-yarn": Case(
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": Case("mistral", _SLIDING),
    "mixtral": Case("mixtral", {**_EXPERTS, **_SLIDING}),
    "qwen2": Case("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "hidden_size": 16, **_SLIDING}),
    "qwen2_moe": Case("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 8, "hidden_size": 16}),
    "qwen3": Case("qwen3", {"use_sliding_window": True, "max_window_layers": 1, **_SLIDING}),
    "qwen3_moe": Case("qwen3_moe", _EXPERTS),
    "gemma": Case("gemma"),
    "gemma2": Case("gemma2", {"attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 7, **_SLIDING}),
    "gemma3": Case("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"], **_SLIDING}),
    "phi": Case("phi", {"hidden_size": 16}, float32_inside=False),
    "phi-qk-norm": Case("phi", {"hidden_size": 16, "qk_layernorm": True}, float32_inside=False),
    "phi3": Case("phi3", {"sliding_window": 3, "hidden_size": 16}),
    "olmo": Case("olmo", {"hidden_size": 16}),
    "olmo2": Case("olmo2", {"hidden_size": 16}),
    "olmo3": Case("olmo3", {"hidden_size": 16, "layer_types": ["sliding_attention", "full_attention"], **_SLIDING}),
    "stablelm": Case("stablelm", {"hidden_size": 32, "head_dim": 8, "use_qkv_bias": True}, float32_inside=False),
    "granite": Case("granite", {"hidden_size": 16, "residual_multiplier": 0.37, "attention_multiplier": 0.6}),
    "cohere": Case("cohere", {"hidden_size": 16}),
    "cohere2": Case("cohere2", {"hidden_size": 16, "layer_types": ["sliding_attention", "full_attention"], **_SLIDING}),
    "smollm3": Case("smollm3", {"hidden_size": 16, "no_rope_layers": [1, 0]}),
    "starcoder2": Case("starcoder2", {"hidden_size": 16, **_SLIDING}, float32_inside=False),
    "gpt_oss": Case(
        "gpt_oss", {**_EXPERTS, **_ROPE, "layer_types": ["sliding_attention", "full_attention"], **_SLIDING}
    ),
    "seed_oss": Case("seed_oss", {"attention_bias": True}),
    "apertus": Case("apertus", _ROPE),
    "glm": Case("glm"),
    "glm4": Case("glm4"),
    "helium": Case("helium", {"hidden_size": 16}),
    "ernie4_5": Case("ernie4_5"),
}


def tiny_model(case: Case | str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **options) -> nn.Module:
    """A model of two blocks with every parameter random, gains and biases too, in evaluation mode."""
    case = CASES[case] if isinstance(case, str) else case
    chosen = {**_COMMON, **case.options, **options}
    # Grouped matrix products of experts have no float64; attention does not depend on how experts are computed.
    implementations = {"experts_implementation": "eager"} if "num_experts" in chosen else {}
    if "attn_implementation" in chosen:
        implementations["attn_implementation"] = chosen.pop("attn_implementation")
    config = AutoConfig.for_model(case.model_type, **{k: v for k, v in chosen.items() if v is not None})
    model = AutoModelForCausalLM.from_config(config, **implementations)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Gains around one (zero, where the model adds the one); matrices so large that attention is not flat.
            size = 0.4 if parameter.dim() == 1 else 0.8 if "embed" in name or "wte" in name else 0.45
            centre = 1.0 if "norm" in name and name.endswith("weight") and "gemma" not in case.model_type else 0.0
            parameter.copy_(centre + size * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).eval()


def left_and_right_padding(length: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask `(3, T)`: padded left, padded right, and whole."""
    ids = torch.randint(3, VOCABULARY, (3, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    mask[1, -2:] = 0
    return ids.masked_fill(mask == 0, 0), mask


class _Float64(TorchFunctionMode):
    """Turns a model's own casts to float32 into casts to float64: what is left to differ is the formula."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].double()
        replace = lambda a: torch.float64 if a is torch.float32 else a  # noqa: E731
        if func in (torch.Tensor.to, torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax):
            args, kwargs = tuple(map(replace, args)), {k: replace(v) for k, v in kwargs.items()}
        return func(*args, **kwargs)


@contextmanager
def everything_in_float64(active: bool = True) -> Iterator[None]:
    with ExitStack() as stack:
        if active:
            stack.enter_context(_Float64())
        yield


def attention_jacobians(model: nn.Module, case: Case | str, layers: tuple[int, ...], **batch) -> dict[int, Tensor]:
    """Autograd's d mu_t / d x_t `(B, T, D, D)` of each layer, through its own block without the feed-forward part."""
    case = CASES[case] if isinstance(case, str) else case
    blocks = decoder_blocks(model)
    calls: dict[int, tuple] = {}
    handles = [
        blocks[layer].register_forward_pre_hook(
            lambda _m, args, kwargs, layer=layer: calls.__setitem__(layer, (args, kwargs)), with_kwargs=True
        )
        for layer in layers
    ]
    with torch.no_grad():
        model(**batch, use_cache=False)
    for handle in handles:
        handle.remove()
    return {layer: _jacobian(blocks[layer], case, *calls[layer]) for layer in layers}


def _jacobian(block: nn.Module, case: Case, args: tuple, kwargs: dict) -> Tensor:
    x, rest = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
    x = x.detach().requires_grad_()
    batch, length, width = x.shape

    def silence(_module, _args, output):
        return (0 * output[0], *output[1:]) if isinstance(output, tuple) else 0 * output

    silent = block.fc2 if not case.mlp else block.get_submodule(case.mlp)
    handle = silent.register_forward_hook(silence)
    out = block(x, *rest, **kwargs)
    handle.remove()
    mean = (out[0] if isinstance(out, tuple) else out) - x
    rows = torch.zeros(batch, length, width, width, dtype=x.dtype)
    for t in range(length):
        for d in range(width):
            # Sequences of a batch do not see each other: one backward pass serves them all.
            (gradient,) = torch.autograd.grad(mean[:, t, d].sum(), x, retain_graph=True)
            rows[:, t, d] = gradient[:, t]
    return rows
