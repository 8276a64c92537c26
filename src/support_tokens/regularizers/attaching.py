r"""One line that adds regularizers to the loss of a causal language model: `attach(model, "smart+spread")`."""

__all__ = ["attach", "attached"]

from collections.abc import Sequence

from torch import nn

from support_tokens.errors import ArgumentError
from support_tokens.regularizers.base import Regularizer, Term, parts_of
from support_tokens.regularizers.handle import RegularizerHandle
from support_tokens.regularizers.join import join, slot_of
from support_tokens.regularizers.registry import parse_regularizer
from support_tokens.regularizers.slot import SLOT, RegularizerSlot


def attach(model: nn.Module, regularizer: str | Regularizer, *, seed: int = 0) -> RegularizerHandle:
    r"""Adds regularizers to the loss of a causal language model of transformers.

    In train mode `model(**batch).loss` becomes

    $$ L = \mathrm{CE} + \sum_i w_i\, \overline{p}_i $$

    in every way of training that uses the model's own loss; where a trainer computes the loss itself (TRL, label
    smoothing), `RegularizerCallback(handle).follow(trainer)` adds them there. In eval mode the model is as it was. With
    `num_items_in_batch` (gradient accumulation) every split into micro-batches has one gradient.

    Args:
        model: Any causal language model of transformers, wrapped by PEFT or `torch.compile` or not, but not yet by DDP
            or FSDP. Make the optimiser after this call: terms may have parameters of their own, which never enter the
            model's state dict.
        regularizer: `NAME` or `NAME:OPTION=VALUE,...`, several joined by `+` in any order; or the objects themselves,
            `Smart(weight=0.15) + Spread(weight=0.02)`.
        seed: Seed of the terms' own weights and of drawn positions. Noise is drawn from torch's global generator.

    Returns:
        A `RegularizerHandle`: `.last`, `.state_dict()`, `.remove()`.

    Raises:
        ArgumentError: An unknown name or option, a value out of range, or two that contradict each other.
        UnsupportedModelError: No causal language model of transformers is inside, or a term cannot act on it.
        CaptureError: A term would move nothing; or later, in training, a loss lacks its penalty.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8))
        >>> handle = attach(model, "smart:weight=0.15+spread:weight=0.02")
        >>> ids = torch.arange(8).unsqueeze(0)
        >>> loss = model.train()(input_ids=ids, labels=ids).loss
        >>> sorted(handle.last)
        ['ce', 'smart.penalty', 'smart.weight', 'spread.penalty', 'spread.weight', 'total']
        >>> handle.remove()
    """
    parts = parts_of(parse_regularizer(regularizer) if isinstance(regularizer, str) else regularizer)
    site, slot = slot_of(model)
    terms: list[Term] = []
    try:
        for part in parts:
            terms.append(part.bind(site, slot.watcher, seed))
        _check_together([*slot.terms(), *terms])
    except BaseException:
        for term in terms:
            term.remove()
        slot.watcher.keep_captures({term.layers for term in slot.terms() if term.layers})
        raise
    join(model, site, slot, terms)
    return RegularizerHandle(terms, site.causal_model)


def attached(model: nn.Module) -> RegularizerHandle | None:
    """The handle of all terms on a model, also on a deep copy or an unpickled one, or None.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8))
        >>> attached(model) is None
        True
    """
    for module in model.modules():
        if isinstance(slot := getattr(module, SLOT, None), RegularizerSlot):
            return RegularizerHandle(tuple(slot.terms()), module)
    return None


def _check_together(terms: Sequence[Term]) -> None:
    replacing = [term.name for term in terms if term.replaces_loss]
    if len(replacing) > 1:
        raise ArgumentError(
            f"one regularizer may put another loss in the place of cross-entropy, received {' and '.join(replacing)}; "
            "leave one out."
        )
    adversaries = [term.name for term in terms if hasattr(term, "adversarial")]
    asking = [term.name for term in terms if getattr(term, "at", "clean") == "adversarial"]
    if asking and len(adversaries) != 1:
        raise ArgumentError(
            f"at=adversarial of {asking[0]} needs one adversary beside it, received "
            f"{' and '.join(adversaries) or 'none'}; add smart, or leave at=clean."
        )
