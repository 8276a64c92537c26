"""What a model reads: its text configuration, its context, and the arguments of a forward pass over padded texts."""

__all__ = ["context_length", "text_config", "text_inputs", "transformers_model"]

import inspect
from typing import Any

from torch import Tensor, nn


def transformers_model(model: nn.Module) -> Any:
    """The outermost model of transformers in `model`, under any wrapper; `model` itself if there is none."""
    from transformers import PreTrainedModel

    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def text_config(model: nn.Module) -> Any:
    """The configuration of the text decoder in `model`, or None if no module has a configuration of transformers.

    Args:
        model: A model of transformers, wrapped (PEFT, DDP, `torch.compile`) or not.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> text_config(model).hidden_size
        8
    """
    configs = (getattr(module, "config", None) for module in model.modules())
    config = next((c for c in configs if hasattr(c, "get_text_config")), None)
    return None if config is None else config.get_text_config(decoder=True)


def context_length(model: nn.Module) -> int | None:
    """Number of positions that `model` can read, or None where its configuration states no limit.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> context_length(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)))
        16
    """
    return getattr(text_config(model), "max_position_embeddings", None)


def text_inputs(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Any]:
    """Arguments of a forward pass in which each text is read as it would be alone, padded on either side or not.

    Positions count real tokens, as in `generate`; most models count padding too unless they are told. A batch without
    padding gets no mask, so that each kernel is the one that a single text meets.

    Args:
        model: A causal language model of transformers, wrapped or not.
        input_ids: Tokens, `(B, T)`.
        attention_mask: 1 at real tokens, `(B, T)`; None: all are.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
        >>> import torch
        >>> mask = torch.tensor([[0, 0, 1, 1, 1]])
        >>> text_inputs(model, torch.arange(5).unsqueeze(0), mask)["position_ids"]
        tensor([[0, 0, 0, 1, 2]])
    """
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    if attention_mask is None or bool(attention_mask.all()):
        return inputs | {"attention_mask": None}
    if attention_mask.dim() == 2 and "position_ids" in inspect.signature(transformers_model(model).forward).parameters:
        inputs["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
    return inputs
