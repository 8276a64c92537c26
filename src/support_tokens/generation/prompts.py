"""Prompts as a batch padded on the left, and the tokens that end a text."""

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
"""A text, or a list of texts or lists of token ids."""


@dataclass(frozen=True)
class Encoded:
    """A batch of tokenized prompts.

    Args:
        texts: The prompts as text.
        rows: Token ids of each prompt.
        ids: `(B, P)`, padded on the left.
        mask: 1 at real tokens, `(B, P)`.
        pad: The id used for padding.
    """

    texts: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]
    ids: Tensor
    mask: Tensor
    pad: int


def encoded_prompts(model: nn.Module, tokenizer: Any, prompts: Prompts, max_new_tokens: int) -> Encoded:
    """A batch of prompts on the device of the model.

    Raises:
        ArgumentError: There is no prompt, one is empty, or one leaves no room for the new tokens.

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
        raise ArgumentError("prompts must hold at least one prompt, received none; pass a text.")
    rows = [_ids(tokenizer, place, prompt) for place, prompt in enumerate(given)]
    context, vocabulary = context_length(model), getattr(text_config(model), "vocab_size", None)
    for place, row in enumerate(rows):
        if not row:
            raise ArgumentError(
                f"prompt {place} must have at least one token, received none; pass a text that is not empty."
            )
        if vocabulary is not None and not all(0 <= index < vocabulary for index in row):
            raise ArgumentError(
                f"prompt {place} must have ids from 0 to {vocabulary - 1}, received {min(row)} to {max(row)}; use the "
                "tokenizer of this model."
            )
        if context is not None and len(row) + max_new_tokens > context:
            raise ArgumentError(
                f"prompt {place} and its continuation must fit the context of {type(model).__name__}, {context} "
                f"tokens, received {len(row)} tokens and max_new_tokens = {max_new_tokens}; shorten the prompt or "
                "lower max_new_tokens."
            )
    texts = [p if isinstance(p, str) else tokenizer.decode(list(row)) for p, row in zip(given, rows, strict=True)]
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None or (vocabulary is not None and pad >= vocabulary):
        pad = min(end_tokens(model, tokenizer), default=0)  # masked, so any id of the model serves
    longest = max(map(len, rows))
    device = next(model.parameters()).device
    ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return Encoded(tuple(texts), tuple(rows), ids, mask, int(pad))


def _listed(value: Any) -> list:
    """A sequence, array or tensor as a list."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Sequence):
        return list(value)
    raise ArgumentError(
        f"prompts must be a text or a list of texts or lists of token ids, received {type(value).__name__}; pass "
        "[ids] for the token ids of one prompt."
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
            f"prompt {place} must be Unicode text, received half a surrogate pair at position {error.start}; read the "
            "text as UTF-8."
        ) from error
    return tuple(tokenizer(prompt)["input_ids"])


def end_tokens(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """Ids of end tokens: of the model's generation settings, else of its tokenizer; empty if neither has one."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = getattr(tokenizer, "eos_token_id", None) if found is None else found
    return frozenset() if found is None else frozenset(found if isinstance(found, list | tuple) else [found])
