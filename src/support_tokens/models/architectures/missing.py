"""What the formula lacks for types of models that no table describes: the reasons for which they are refused."""

__all__ = ["missing_for"]

_GATE = "a gate computed from the token multiplies what its heads attend to"
_LATENT = "its queries, keys and values pass a latent projection with a norm inside"
_SPARSE = "an indexer chooses the keys that each token attends to"
_OWN = "its attention does not pass through the attention interface of transformers"
_POST = "it normalises the sum of the residual stream and attention, so that attention adds nothing of its own"
_NONE = "its blocks use a recurrence instead of attention"
_SHARED = "its layers share keys and values"
_SCALED = "it scales queries by their position"
_BIAS = "a bias that depends on positions is added to its logits"
_RESIDUAL = "its blocks scale or mix the residual stream itself"

_TYPES: dict[str, str] = {
    _GATE: "afmoe beam hrm_text laguna lfm3 qwen3_5_text qwen3_5_moe_text qwen3_next",
    _LATENT: "axk1 bailing_hybrid deepseek_v2 deepseek_v3 glm4_moe_lite kimi_linear longcat_flash minicpm3 sarvam_mla "
    "youtu",
    _SPARSE: "axk2 deepseek_v32 deepseek_v4 doge dots3_note_text glm_moe_dsa hy_v4 minimax_m3_vl_text qwen4_exp_text",
    _OWN: "big_bird cpmant falcon gpt_neo gpt_neox_japanese megatron-bert mvp openai-gpt prophetnet reformer rembert "
    "roformer trocr xglm xlm xlnet",
    _POST: "bart bert bert-generation blenderbot-small camembert ctrl data2vec-text electra ernie marian plbart "
    "roberta roc_bert xlm-roberta",
    _NONE: "falcon_mamba mamba mamba2 rwkv xlstm",
    _SHARED: "gemma3n_text gemma4_text gemma4_unified_text",
    _SCALED: "llama4_text ministral3",
    _BIAS: "bloom inkling_text inkling2_text inkling2_loop_text mpt",
    _RESIDUAL: "dory minimax falcon_h1",
    "a norm stands between its heads and their output projection": "bitnet",
    "its queries, keys and values are fused in blocks": "codegen",
    "it subtracts one attention from another": "diffllama",
    "its heads are chosen by a router": "jetmoe",
}
_REASONS = {model_type: reason for reason, types in _TYPES.items() for model_type in types.split()}


def missing_for(model_type: str) -> str:
    """Why models of a type are refused, as a clause.

    Args:
        model_type: As in the configuration of the text model.

    Example:
        >>> missing_for("rwkv")
        'its blocks use a recurrence instead of attention'
    """
    return _REASONS.get(model_type, "no table describes its attention")
