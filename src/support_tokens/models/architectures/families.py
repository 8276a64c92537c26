"""One table a family: the only place in the package where names of models and of their modules stand."""

__all__ = ["TABLES"]

from support_tokens.models.architectures.table import Architecture, Norm

_LAYER_NORM = Norm("input_layernorm", centered=True, epsilon="eps")
_GEMMA_NORM = Norm("input_layernorm", gain_offset=1.0, epsilon="eps")
_GEMMA_POST = Norm("post_attention_layernorm", gain_offset=1.0, epsilon="eps")

TABLES: tuple[Architecture, ...] = (
    Architecture(
        "GPT-2",
        ("gpt2",),
        attention="attn",
        projections=("c_attn",),
        fused="stacked",
        output="c_proj",
        input_norm=Norm("ln_1", centered=True, epsilon="eps"),
        rotation=None,
    ),
    Architecture(
        "GPT-NeoX (Pythia)",
        ("gpt_neox",),
        attention="attention",
        projections=("query_key_value",),
        fused="per_head",
        output="dense",
        input_norm=_LAYER_NORM,
    ),
    Architecture(
        "OPT",
        ("opt",),
        output="out_proj",
        input_norm=Norm("self_attn_layer_norm", centered=True, epsilon="eps", switch="do_layer_norm_before"),
        rotation=None,
        query_factor="scaling",
    ),
    Architecture("Llama (SmolLM2)", ("llama",)),
    Architecture("Mistral", ("mistral",)),
    Architecture("Mixtral", ("mixtral",)),
    Architecture("Qwen2", ("qwen2",)),
    Architecture("Qwen2-MoE", ("qwen2_moe",)),
    Architecture("Qwen3", ("qwen3", "qwen3_moe"), query_norm=Norm("q_norm"), key_norm=Norm("k_norm")),
    Architecture("Gemma", ("gemma",), input_norm=_GEMMA_NORM),
    Architecture("Gemma2", ("gemma2",), input_norm=_GEMMA_NORM, output_norm=_GEMMA_POST),
    Architecture(
        "Gemma3",
        ("gemma3_text",),
        input_norm=_GEMMA_NORM,
        output_norm=_GEMMA_POST,
        query_norm=Norm("q_norm", gain_offset=1.0, epsilon="eps", heads_first=True),
        key_norm=Norm("k_norm", gain_offset=1.0, epsilon="eps", heads_first=True),
    ),
    Architecture(
        "Phi",
        ("phi",),
        output="dense",
        input_norm=_LAYER_NORM,
        query_norm=Norm("q_layernorm", centered=True, epsilon="eps", heads_first=True, switch="qk_layernorm"),
        key_norm=Norm("k_layernorm", centered=True, epsilon="eps", heads_first=True, switch="qk_layernorm"),
    ),
    Architecture("Phi-3", ("phi3",), projections=("qkv_proj",), fused="stacked"),
    Architecture(
        "OLMo",
        ("olmo",),
        input_norm=Norm("input_layernorm", centered=True, epsilon=1e-5),
        required=(("clip_qkv", None),),
    ),
    Architecture(
        "OLMo2",
        ("olmo2", "olmo3"),
        input_norm=None,
        output_norm=Norm("post_attention_layernorm"),
        query_norm=Norm("q_norm"),
        key_norm=Norm("k_norm"),
    ),
    Architecture("StableLM", ("stablelm",), input_norm=_LAYER_NORM, required=(("qk_layernorm", False),)),
    Architecture("Granite", ("granite",), residual_factor="residual_multiplier"),
    Architecture(
        "Cohere",
        ("cohere",),
        input_norm=Norm("input_layernorm", centered=True),
        rotation="neighbours",
        required=(("use_qk_norm", False),),
    ),
    Architecture(
        "Cohere2",
        ("cohere2",),
        input_norm=Norm("input_layernorm", centered=True),
        rotation="neighbours",
        rotation_switch="sliding_window",
    ),
    Architecture("SmolLM3", ("smollm3",), rotation_switch="use_rope"),
    Architecture("StarCoder2", ("starcoder2",), input_norm=_LAYER_NORM),
    Architecture("GPT-OSS", ("gpt_oss",), rotation="halves_narrow"),
    Architecture("Seed-OSS", ("seed_oss",)),
    Architecture(
        "Apertus",
        ("apertus",),
        input_norm=Norm("attention_layernorm"),
        query_norm=Norm("q_norm", heads_first=True),
        key_norm=Norm("k_norm", heads_first=True),
    ),
    Architecture("GLM", ("glm",), rotation="neighbours_narrow"),
    Architecture("GLM-4", ("glm4",), output_norm=Norm("post_self_attn_layernorm"), rotation="neighbours_narrow"),
    Architecture("Helium", ("helium",), rotation="neighbours_narrow"),
    Architecture("ERNIE 4.5", ("ernie4_5",), rotation="neighbours_narrow"),
)
