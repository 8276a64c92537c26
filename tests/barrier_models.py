"""Tiny causal language models and batches for the tests of the barrier, and the barrier's value by the textbook."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from naive import textbook_slogdet
from support_tokens import BarrierHandle, CaptureError, attach_barrier

__all__ = [
    "KINDS",
    "SOURCES",
    "VOCABULARY",
    "attached",
    "batch",
    "gradients",
    "language_model",
    "penalty_by_textbook",
    "unless_refused",
]

KINDS = ("gpt2", "llama")
SOURCES = ("prior", "model")
VOCABULARY, WIDTH = 17, 8
T = TypeVar("T")


def language_model(kind: str = "gpt2", *, seed: int = 0, dtype: torch.dtype = torch.float64, **options) -> nn.Module:
    """Two blocks of width 8 without dropout, in train mode, with weights so large that attention is far from flat."""
    sizes = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "gpt2":
            still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            shape = {"n_layer": 2, "n_head": 2, "n_embd": WIDTH, "n_positions": 32, "initializer_range": 0.4}
            model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, **shape, **still, **options))
        else:
            shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": WIDTH}
            more = {"intermediate_size": 12, "max_position_embeddings": 32, "initializer_range": 0.4}
            model = LlamaForCausalLM(LlamaConfig(**sizes, **shape, **more, **options))
    return model.to(dtype).train()


def batch(rows: int = 4, length: int = 8, *, seed: int = 0, padding: str = "") -> dict[str, Tensor]:
    """Ids, and for `left` or `right` padding of growing width a mask and labels of -100 there."""
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    if not padding:
        return {"input_ids": ids, "labels": ids.clone()}
    widths = torch.arange(rows).unsqueeze(1) % (length - 2)
    place = torch.arange(length).expand(rows, -1)
    real = place >= widths if padding == "left" else place < length - widths
    ids = ids.masked_fill(~real, 0)
    return {"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~real, -100)}


def attached(model: nn.Module, source: str = "prior", weight=0.5, **options) -> BarrierHandle:
    """A barrier, the law (if any) in the precision of the model."""
    handle = attach_barrier(model, weight, source=source, **options)
    if source == "prior":
        handle.law.to(next(model.parameters()).dtype)
    return handle


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all gradients by name, those of the law too."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def penalty_by_textbook(handle: BarrierHandle, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over real tokens of -log|det J_t| of the law on embeddings x `(B, T, D)`, with loops and no shared code."""
    law, values = handle.law, []
    for row in range(len(x)):
        padding = None if mask is None else mask[row] == 0
        _, log_abs_det = textbook_slogdet(x[row], law.w_q[None], law.w_k[None], padding=padding)
        values.append(log_abs_det if padding is None else log_abs_det[~padding])
    return -torch.cat(values).mean()


def unless_refused(call: Callable[[], T], words: str) -> T | None:
    """What `call` gives, or None where it is refused in these words: right or loud, and nothing in between."""
    try:
        return call()
    except CaptureError as error:
        refusal = str(error)
    assert words in refusal, refusal
    return None
