"""Hugging Face models: loading, attention states of a forward pass, SmallGPT."""

__all__ = [
    "AttentionCapture",
    "Decoder",
    "MarginReader",
    "build_small_gpt",
    "capture_attention",
    "character_tokenizer",
    "checked_device",
    "context_length",
    "decoder_blocks",
    "encode",
    "evaluating",
    "execution_device",
    "find_decoder",
    "find_model",
    "hook_embeddings",
    "in_turn",
    "is_replica",
    "load_config",
    "load_model",
    "load_small_gpt",
    "load_tokenizer",
    "loss_function_of",
    "model_margins",
    "quiet_transformers",
    "recomputing",
    "restore_loss_function",
    "save_trainer_checkpoint",
    "text_config",
    "text_inputs",
    "torch_threads",
    "trains_before",
    "unknown_rate",
]

from typing import TYPE_CHECKING

from support_tokens._lazy import lazy_exports

if TYPE_CHECKING:
    from support_tokens.models.capture import AttentionCapture, capture_attention
    from support_tokens.models.compat import (
        execution_device,
        is_replica,
        loss_function_of,
        recomputing,
        restore_loss_function,
        save_trainer_checkpoint,
    )
    from support_tokens.models.hooks import (
        Decoder,
        decoder_blocks,
        evaluating,
        find_decoder,
        hook_embeddings,
        trains_before,
    )
    from support_tokens.models.inputs import context_length, text_config, text_inputs
    from support_tokens.models.loading import checked_device, find_model, load_config, load_model, load_tokenizer
    from support_tokens.models.margins import model_margins
    from support_tokens.models.reader import MarginReader
    from support_tokens.models.small_gpt import (
        build_small_gpt,
        character_tokenizer,
        encode,
        load_small_gpt,
        quiet_transformers,
        torch_threads,
        unknown_rate,
    )
    from support_tokens.models.turns import in_turn

__getattr__ = lazy_exports(
    __name__,
    {
        "AttentionCapture": "capture",
        "capture_attention": "capture",
        "execution_device": "compat",
        "is_replica": "compat",
        "loss_function_of": "compat",
        "restore_loss_function": "compat",
        "save_trainer_checkpoint": "compat",
        "Decoder": "hooks",
        "decoder_blocks": "hooks",
        "evaluating": "hooks",
        "find_decoder": "hooks",
        "hook_embeddings": "hooks",
        "trains_before": "hooks",
        "context_length": "inputs",
        "text_config": "inputs",
        "text_inputs": "inputs",
        "checked_device": "loading",
        "find_model": "loading",
        "load_config": "loading",
        "load_model": "loading",
        "load_tokenizer": "loading",
        "model_margins": "margins",
        "MarginReader": "reader",
        "build_small_gpt": "small_gpt",
        "character_tokenizer": "small_gpt",
        "encode": "small_gpt",
        "load_small_gpt": "small_gpt",
        "quiet_transformers": "small_gpt",
        "recomputing": "compat",
        "torch_threads": "small_gpt",
        "unknown_rate": "small_gpt",
        "in_turn": "turns",
    },
)
