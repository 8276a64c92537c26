"""Hugging Face models: loading, attention states of a forward pass, SmallGPT."""

__all__ = [
    "AttentionCapture",
    "build_small_gpt",
    "capture_attention",
    "character_tokenizer",
    "checked_device",
    "decoder_blocks",
    "encode",
    "evaluating",
    "hook_embeddings",
    "load_model",
    "load_small_gpt",
    "model_margins",
    "quiet_transformers",
    "torch_threads",
    "trains_before",
    "unknown_rate",
]

from typing import TYPE_CHECKING

from support_tokens._lazy import lazy_exports

if TYPE_CHECKING:
    from support_tokens.models.capture import AttentionCapture, capture_attention
    from support_tokens.models.devices import checked_device
    from support_tokens.models.hooks import decoder_blocks, hook_embeddings, trains_before
    from support_tokens.models.loading import load_model
    from support_tokens.models.margins import model_margins
    from support_tokens.models.modes import evaluating
    from support_tokens.models.small_gpt import (
        build_small_gpt,
        character_tokenizer,
        encode,
        load_small_gpt,
        quiet_transformers,
        torch_threads,
        unknown_rate,
    )

__getattr__ = lazy_exports(
    __name__,
    {
        "AttentionCapture": "capture",
        "capture_attention": "capture",
        "checked_device": "devices",
        "decoder_blocks": "hooks",
        "hook_embeddings": "hooks",
        "trains_before": "hooks",
        "load_model": "loading",
        "model_margins": "margins",
        "evaluating": "modes",
        "build_small_gpt": "small_gpt",
        "character_tokenizer": "small_gpt",
        "encode": "small_gpt",
        "load_small_gpt": "small_gpt",
        "quiet_transformers": "small_gpt",
        "torch_threads": "small_gpt",
        "unknown_rate": "small_gpt",
    },
)
