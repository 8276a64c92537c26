"""A tiny random model of any causal type of transformers, from its configuration alone."""

__all__ = ["TinyModelError", "batches", "causal_types", "tiny_model"]

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, LAYERS, WINDOW = 29, 32, 4, 2, 8, 2, 3
MOST_PARAMETERS = 10_000_000

# What a size is called, by families of models; a configuration gets those that it has.
_SIZES: tuple[tuple[int, str], ...] = (
    (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    (
        WIDTH,
        "hidden_size n_embd d_model emb_dim embedding_size input_embedding_size output_embedding_size "
        "word_embed_proj_dim embedding_dim lru_width attention_hidden_size",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads attention_heads encoder_attention_heads decoder_attention_heads "
        "num_decoder_attention_heads num_encoder_attention_heads num_heads swa_num_attention_heads",
    ),
    (KV_HEADS, "num_key_value_heads swa_num_key_value_heads"),
    (
        HEAD_WIDTH,
        "head_dim d_head dim_head attention_head_dim attention_head_size v_head_dim swa_head_dim swa_v_head_dim "
        "qk_nope_head_dim global_head_dim index_head_dim kv_channels linear_key_head_dim linear_value_head_dim",
    ),
    (
        16,
        "intermediate_size ffn_dim ffn_hidden_size encoder_ffn_dim decoder_ffn_dim dff d_inner n_inner dim_ff "
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size intermediate_size_mlp "
        "feed_forward_size kv_lora_rank q_lora_rank adapter_rank mamba_d_state expert_ffn_hidden_size "
        "hidden_size_per_layer_input moe_shared_expert_intermediate_size prefix_dense_intermediate_size "
        "dense_intermediate_size router_hidden_size block_ff_dim laurel_rank mamba_dt_rank",
    ),
    (
        4,
        "qk_rope_head_dim rotary_dim num_experts num_local_experts n_routed_experts moe_num_experts mamba_d_conv "
        "conv1d_width index_topk linear_num_value_heads linear_num_key_heads index_n_heads",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
        "num_encoder_layers moe_topk num_experts_per_tok moe_k n_input_layers conv_L_cache moe_top_k",
    ),
    (
        1,
        "n_group topk_group first_k_dense_replace n_shared_experts num_shared_experts moe_num_shared_experts "
        "num_dense_layers mamba_n_groups mamba_ngroups num_nextn_predict_layers num_expert_group",
    ),
    (64, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions original_max_position_embeddings"),
    (WINDOW, "sliding_window attention_window_size sliding_window_size"),
    (
        0,
        "attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout dropout activation_dropout "
        "hidden_dropout_prob attention_probs_dropout_prob residual_dropout embedding_dropout "
        "attn_dropout resid_dropout embed_dropout layerdrop decoder_layerdrop",
    ),
)
_TINY = {name: size for size, names in _SIZES for name in names.split()}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# What the rules above cannot know.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_n_groups": 1}
_SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}, "full_attention": None},
    },
    "gemma3": {
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lara_mini": {"layer_types": ["linear_attention", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1},
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2},
        "audio_config": {"hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2},
    },
    "phimoe": {"router_jitter_noise": 0.0},
}


class TinyModelError(Exception):
    """A type of which no tiny model is made, with the reason."""


def causal_types() -> tuple[str, ...]:
    """Every `model_type` that `AutoModelForCausalLM` of the installed transformers knows."""
    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def tiny_model(model_type: str, seed: int = 0) -> nn.Module:
    """A model of few layers in float64, every parameter random, gains and biases too, without dropout.

    Args:
        model_type: Key of the mapping of causal models.
        seed: Of the parameters.

    Raises:
        TinyModelError: The configuration makes no small model, or no model at all.
    """
    try:
        config = _config(model_type)
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if size > MOST_PARAMETERS:
            raise TinyModelError(f"its tiny configuration still has {size:,} parameters")
        model = AutoModelForCausalLM.from_config(_config(model_type))
        for holder in (model.config, model.config.get_text_config(decoder=True)):
            # Grouped matrix products of experts have no float64; attention does not depend on how experts compute.
            holder._experts_implementation = "eager"
        _randomise(model, seed)
        return model.double().eval()
    except TinyModelError:
        raise
    except Exception as error:
        raise TinyModelError(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}") from error


def batches(seed: int = 0) -> list[dict[str, Tensor]]:
    """A batch with rows padded left, padded right and whole, and the same tokens without any mask."""
    ids = torch.randint(3, VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :2], mask[1, -2:] = 0, 0
    return [{"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}, {"input_ids": ids[:2]}]


def _config(model_type: str) -> PreTrainedConfig:
    kind = CONFIG_MAPPING[model_type]
    try:
        default = kind()
    except Exception:  # some defaults cannot be built; the class alone then says its fields
        default = kind.__new__(kind)
    special = dict(_SPECIAL.get(model_type, {}))
    text = default.get_text_config(decoder=True)
    if text is not default and "text_config" in default.to_dict():
        outer = {name: special.pop(name) for name in ("vision_config", "audio_config") if name in special}
        return kind(text_config={**_options(text), **special}, **outer, **_TOKENS)
    return kind(**{**_options(default), **special})


def _options(default: PreTrainedConfig) -> dict[str, Any]:
    known = default.to_dict()
    options: dict[str, Any] = {}
    for name, size in _TINY.items():
        if name in known and not isinstance(known[name], list | dict | bool):
            options[name] = float(size) if isinstance(known[name], float) else size
    if "kv_lora_rank" in options:
        # Latent attention: keys are as many as queries, and the width of a head is that of the part that rotates.
        latent = {"num_key_value_heads": HEADS, "head_dim": options["qk_rope_head_dim"]}
        options.update({name: size for name, size in latent.items() if name in options})
    for name in ("sliding_window", "attention_window_size"):
        if name in options and known[name] is None and "layer_types" not in known:
            del options[name]
    kinds = set(known.get("layer_types") or ())
    if kinds == {"sliding_attention", "full_attention"}:
        options["layer_types"] = ["sliding_attention", "full_attention"]
    elif "full_attention" in kinds and len(kinds) == 2:
        options["layer_types"] = [next(k for k in sorted(kinds) if k != "full_attention"), "full_attention"]
    return {**options, **{n: v for n, v in _TOKENS.items() if n in known}}


@torch.no_grad()
def _randomise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        # Gains around one; matrices so large that attention is neither flat nor one key alone.
        centre = 1.0 if parameter.dim() == 1 and "norm" in name.lower() and name.endswith("weight") else 0.0
        size = 0.3 if parameter.dim() == 1 else 0.8 if "embed" in name or "wte" in name else 0.25
        parameter.copy_(centre + size * torch.randn(parameter.shape, generator=generator))
