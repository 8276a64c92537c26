r"""Uncertainty of a given text under a model, per token and for the text as a whole."""

__all__ = ["score_sequences", "score_tokens"]

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.generation.signals.observer import Observer
from support_tokens.generation.signals.table import (
    SEQUENCE_SIGNALS,
    TOKEN_SIGNALS,
    Quantities,
    Signal,
    chosen_signals,
    sequence_values,
    token_values,
)
from support_tokens.law import EmbeddingLaw, EmbeddingPrior
from support_tokens.models import evaluating, in_turn, text_config, text_inputs

# Bytes of the logits of one forward pass; a batch that needs more is split.
_LOGIT_BYTES = 256 * 2**20


def score_tokens(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    layers: Sequence[int] = (0,),
    view: str = "noise",
    signals: Sequence[str] | None = None,
    law: EmbeddingLaw | EmbeddingPrior | None = None,
    prompt_lengths: int | Tensor = 1,
) -> dict[str, Tensor]:
    r"""Signals of every token of a text: entry t is the uncertainty of the prediction of token t+1 made at t.

    A batch is split so that the logits of one forward pass stay within 256 MiB; a single sequence is never split. No
    result depends on the batch.

    Args:
        model: A causal language model of transformers, of a supported family; read in evaluation mode.
        input_ids: Tokens, `(B, T)`.
        attention_mask: 1 at real tokens, `(B, T)`, padded on either side; None: all are.
        layers: Indices of blocks; negative ones count from the last. Each costs about one LU factorisation per token.
        view: `noise` for the margins of $x - \mu(x)$, `block` for those of $x + \mu(x)$.
        signals: Names of `TOKEN_SIGNALS`; None: all except `NegativeSigmaMin`, which needs the singular values of a
            D x D matrix per token, and, without a law, `NegativeLogDensity`.
        law: Law of the embeddings that enter block 0.
        prompt_lengths: Number of prompt tokens of each sequence, an integer or `(B,)`, which RAUQ skips; no other
            signal uses it.

    Returns:
        Name to values `(B, T)`, higher where less certain; `NAME (layer=L)` for signals of a layer. NaN at padding.
        `NegativeLogLikelihood` and `RAUQ` use the token that follows: they are NaN at the last token of a sequence, and
        cannot predict an error of the token that they use.

    Raises:
        ArgumentError: Shapes do not fit, or a layer, view or signal does not exist.
        UnsupportedModelError: The attention of the model cannot be read exactly.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8)).eval()
        >>> found = score_tokens(model, torch.arange(6).unsqueeze(0), signals=["TokenEntropy", "NegativeLogMargin"])
        >>> {name: tuple(value.shape) for name, value in found.items()}
        {'TokenEntropy': (1, 6), 'NegativeLogMargin (layer=0)': (1, 6)}
    """
    chosen = chosen_signals(TOKEN_SIGNALS, signals, law=law is not None)
    parts = [
        token_values(chosen, found)
        for found, _ in _passes(model, input_ids, attention_mask, chosen, layers, view, law, prompt_lengths)
    ]
    return _joined(parts)


def score_sequences(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    layers: Sequence[int] = (0,),
    view: str = "noise",
    signals: Sequence[str] | None = None,
    law: EmbeddingLaw | EmbeddingPrior | None = None,
    prompt_lengths: int | Tensor = 1,
) -> dict[str, Tensor]:
    r"""Signals of every sequence as a whole, with the names and the aggregation of lm-polygraph.

    They aggregate over the positions that predict a token of the answer, from the last token of the prompt on; signals
    of a position rather than of a prediction (margins, attention, hidden states, density) include the last token too.

    Args:
        model: As in `score_tokens`.
        input_ids: Tokens, `(B, T)`.
        attention_mask: 1 at real tokens, `(B, T)`; None: all are.
        layers: Indices of blocks.
        view: `noise` or `block`.
        law: Law of the embeddings that enter block 0.
        signals: Names of `SEQUENCE_SIGNALS`; None: all except the expensive one, and without a law those that need
            one.
        prompt_lengths: Number of prompt tokens of each sequence, an integer or `(B,)`.

    Returns:
        Name to values `(B,)`, higher where less certain; NaN for a sequence without such a position.

    Raises:
        ArgumentError, UnsupportedModelError: As in `score_tokens`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8)).eval()
        >>> sorted(score_sequences(model, torch.arange(6).unsqueeze(0), prompt_lengths=2))[:3]
        ['AttentionScore (layer=0)', 'HiddenScore (layer=0)', 'MaximumNegativeLogMargin (layer=0)']
    """
    chosen = chosen_signals(SEQUENCE_SIGNALS, signals, law=law is not None)
    parts = [
        sequence_values(chosen, found, answer)
        for found, answer in _passes(model, input_ids, attention_mask, chosen, layers, view, law, prompt_lengths)
    ]
    return _joined(parts)


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@torch.no_grad()
def _passes(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    signals: Sequence[Signal],
    layers: Sequence[int],
    view: str,
    law: EmbeddingLaw | EmbeddingPrior | None,
    prompt_lengths: int | Tensor,
) -> Iterator[tuple[Quantities, Tensor]]:
    """Quantities of one part of the batch after the other, each with its answer positions."""
    mask = _checked(input_ids, attention_mask)
    size = max(1, _LOGIT_BYTES // (4 * input_ids.shape[1] * getattr(text_config(model), "vocab_size", 1)))
    prompts = torch.as_tensor(prompt_lengths, device=input_ids.device).expand(len(input_ids)).unsqueeze(-1)
    if bool((prompts < 1).any()):
        raise ArgumentError(
            f"prompt_lengths must be at least 1, received {int(prompts.min())}; the first token has no prediction."
        )
    with in_turn(model), evaluating(model):
        for begin in range(0, len(input_ids), size):
            rows = slice(begin, begin + size)
            ids, real = input_ids[rows], mask[rows].bool()
            answer = real & (real.cumsum(-1) >= prompts[rows])
            following = torch.full_like(ids, -1)
            following[:, :-1] = ids[:, 1:].masked_fill(~real[:, 1:], -1)
            inputs = text_inputs(model, ids, mask[rows])
            observer = Observer(model, signals, layers, view, law)
            try:
                logits = model(**inputs).logits
                yield observer.read(logits, following, inputs["attention_mask"], answer), answer
            finally:
                observer.remove()


def _checked(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    if input_ids.dim() != 2 or 0 in input_ids.shape or input_ids.is_floating_point():
        raise ArgumentError(
            f"input_ids must be integers of shape (B, T), at least one, received {tuple(input_ids.shape)} of "
            f"{input_ids.dtype}; pass a batch of texts."
        )
    if attention_mask is None:
        return torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise ArgumentError(
            f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}, received "
            f"{tuple(attention_mask.shape)}; pass 1 at real tokens and 0 at padding."
        )
    return attention_mask.to(input_ids)
