r"""One line that puts the log-barrier on a causal language model of transformers: `attach_barrier(model,
weight=0.02)`."""

__all__ = ["BarrierHandle", "attach_barrier", "attached_barriers"]

from torch import nn

from support_tokens.regularizers.barrier.build import barrier_term
from support_tokens.regularizers.barrier.handle import BarrierHandle
from support_tokens.regularizers.barrier.penalties import Weight
from support_tokens.regularizers.barrier.term import BarrierTerm
from support_tokens.regularizers.join import join, slot_of
from support_tokens.regularizers.slot import SLOT


def attach_barrier(
    model: nn.Module,
    weight: Weight = 0.02,
    *,
    source: str = "prior",
    penalty: str = "log",
    view: str = "noise",
    layer: int | tuple[int, ...] = 0,
    positions: int | str | None = None,
    candidates: int = 16,
    rank: int | None = None,
    noise_scale: float = 1.0,
    target_margin: float = 0.0,
    every: int = 1,
    seed: int = 0,
) -> BarrierHandle:
    r"""Adds the log-barrier to the loss of a causal language model.

    In train mode `model(**batch).loss` becomes

    $$ L = \mathrm{CE} + \lambda \cdot \overline{p_t}, \qquad p_t = -\log|\det J_t| \text{ for the penalty }
    \texttt{log}, $$

    the mean over valid tokens; in eval mode the loss is the bare cross-entropy. With `num_items_in_batch` (the
    Trainer's accumulation) each sequence's mean counts by its share of items, so that every split into micro-batches
    has one gradient.

    Args:
        model: A causal language model of transformers, wrapped (PEFT, `torch.compile`) or not, but not yet DDP or
            FSDP. Make the optimiser after this call: the law's W_Q and W_K are parameters of the model. They never
            enter its state dict, so a saved checkpoint loads in stock transformers; `BarrierHandle.state_dict` holds
            them.
        weight: $\lambda \ge 0$: a number, a schedule `step -> lambda`, or a `MarginController`.
        source: `prior`: the paper's law with a coupling of its own, on the embeddings that enter the first block.
            `model`: the model's own attention at `layer`, with no new parameter.
        penalty: `log`, `hinge` or `map`; see `margin_penalty`. `log` is unbounded below: watch `handle.last`.
        view: `noise` ($J = I - D$) or `block` ($J = I + D$); the law has the noise view only.
        layer: Block, or several whose mean counts, for the source `model`; negative ones count from the last.
        positions: Number of positions of each sequence, drawn uniformly at every step: the penalty stays unbiased.
            `support`: those that a cheap screen takes for support tokens, a mean over the worst; see `screen`. None:
            all.
        candidates: Number of positions of each sequence for `support`.
        rank: R of the law; None: min(D, 32).
        noise_scale: $\sigma$ of the law, for the penalty `map`.
        target_margin: $m^*$ in nats, for the penalty `hinge`.
        every: The penalty counts at every so many steps, with so many times its weight: the same in the mean over
            steps, at that part of the cost.
        seed: Seed of the law's weights and of the positions; the global generator is left alone.

    Returns:
        A `BarrierHandle`: `.last`, `.weight`, `.penalty()`, `.state_dict()`, `.remove()`.

    Raises:
        ArgumentError: An option is out of range, or two do not go together.
        UnsupportedModelError: No causal language model of transformers is inside, or its attention cannot be read.
        CaptureError: Later, in training: at a loss or a backward pass in which the penalty would be missing, or would
            move nothing of the model.

    Source:
        arXiv:2602.22271, the MAP objective; theory page, section 4, for what it does not do.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8))
        >>> handle = attach_barrier(model, weight=0.02)
        >>> ids = torch.arange(8).unsqueeze(0)
        >>> loss = model.train()(input_ids=ids, labels=ids).loss
        >>> sorted(handle.last)
        ['ce', 'log_margin_mean', 'log_margin_min', 'negative_fraction', 'penalty', 'total', 'weight']
        >>> handle.remove()
    """
    site, slot = slot_of(model)
    term = barrier_term(
        site,
        slot.watcher,
        weight,
        source=source,
        penalty=penalty,
        view=view,
        layer=layer,
        positions=positions,
        candidates=candidates,
        rank=rank,
        noise_scale=noise_scale,
        target_margin=target_margin,
        every=every,
        seed=seed,
    )
    join(model, site, slot, [term])
    return BarrierHandle(term, site.causal_model)


def attached_barriers(model: nn.Module) -> list[BarrierHandle]:
    """Handles of all barriers on a model, also on a deep copy or an unpickled model, oldest first.

    Example:
        >>> import copy
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8))
        >>> _ = attach_barrier(model)
        >>> copied = copy.deepcopy(model)
        >>> attached_barriers(copied)
        [BarrierHandle(penalty='log', weight=0.02, attached)]
    """
    slots = [(m, slot) for m in model.modules() if (slot := m.__dict__.get("_modules", {}).get(SLOT)) is not None]
    return [BarrierHandle(term, m) for m, slot in slots for term in slot.terms() if isinstance(term, BarrierTerm)]
