"""Prompts as a batch padded on the left, checked against the context of the model, and the tokens that end a text."""

__all__ = ["Encoded", "Prompts", "encoded_prompts", "end_tokens"]

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.models import context_length, text_config

Prompts = str | Sequence[str | Sequence[int]]
"""A text, or several, each a text or token ids."""


@dataclass(frozen=True)
class Encoded:
    """Prompts as the model reads them.

    Args:
        texts: As text.
        rows: Ids of each.
        ids: `(B, P)`, padded on the left.
        mask: 1 at real tokens, `(B, P)`.
        pad: The id that stands in padding.
    """

    texts: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]
    ids: Tensor
    mask: Tensor
    pad: int


def encoded_prompts(model: nn.Module, tokenizer: Any, prompts: Prompts, max_new_tokens: int) -> Encoded:
    """A batch of prompts on the device of the model.

    Raises:
        ArgumentError: There is none, one is empty, or one leaves no room for what is to be written.

    Example:
        >>> from support_tokens.models import character_tokenizer, build_small_gpt
        >>> tokenizer = character_tokenizer("abc")
        >>> model = build_small_gpt(tokenizer, layers=1, heads=2, width=8, context=16)
        >>> encoded_prompts(model, tokenizer, ["a", "cab"], 4).mask
        tensor([[0, 0, 1],
                [1, 1, 1]])
    """
    given = [prompts] if isinstance(prompts, str) else _listed(prompts)
    if not given:
        raise ArgumentError("prompts must hold one prompt or more, received none; pass a text.")
    rows = [_ids(tokenizer, place, prompt) for place, prompt in enumerate(given)]
    context, vocabulary = context_length(model), getattr(text_config(model), "vocab_size", None)
    for place, row in enumerate(rows):
        if not row:
            raise ArgumentError(f"prompt {place} is empty, where one token or more is required; write something.")
        if vocabulary is not None and not all(0 <= index < vocabulary for index in row):
            raise ArgumentError(
                f"prompt {place} holds ids outside of the vocabulary of {vocabulary}; use the model's own tokenizer."
            )
        if context is not None and len(row) + max_new_tokens > context:
            raise ArgumentError(
                f"prompt {place} has {len(row)} tokens, which with max_new_tokens = {max_new_tokens} is over the "
                f"context of {type(model).__name__}, {context} tokens; shorten the prompt or lower max_new_tokens."
            )
    texts = [p if isinstance(p, str) else tokenizer.decode(list(row)) for p, row in zip(given, rows, strict=True)]
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None or (vocabulary is not None and pad >= vocabulary):
        pad = min(end_tokens(model, tokenizer), default=0)  # masked, so any id will do that the model has
    longest = max(map(len, rows))
    device = next(model.parameters()).device
    ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return Encoded(tuple(texts), tuple(rows), ids, mask, int(pad))


def _listed(value: Any) -> list:
    """A sequence, array or tensor as a list; a number is none."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Sequence):
        return list(value)
    raise ArgumentError(
        f"prompts must be a text, or several, each a text or token ids, received a {type(value).__name__} where a text "
        "or a sequence is required; pass [ids] for the ids of one prompt."
    )


def _ids(tokenizer: Any, place: int, prompt: Any) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        row = _listed(prompt)
        if any(isinstance(index, bool) or not isinstance(index, Integral) for index in row):
            raise ArgumentError(
                f"prompt {place} must be a text or whole numbers, received {row!r:.60}; pass token ids."
            )
        return tuple(map(int, row))
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"prompt {place} holds half of a character at place {error.start}, where text is required; pass UTF-8."
        ) from error
    return tuple(tokenizer(prompt)["input_ids"])


def end_tokens(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """Ids that end a text, by the model's generation settings or else by its tokenizer; empty if neither names one."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = getattr(tokenizer, "eos_token_id", None) if found is None else found
    return frozenset() if found is None else frozenset(found if isinstance(found, list | tuple) else [found])
