r"""One line that puts the log-barrier on a causal language model of transformers: `attach_barrier(model,
weight=0.02)`."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from support_tokens.barrier import (
    PENALTIES,
    MarginController,
    Weight,
    per_token_penalty,
    sample_positions,
    weighted_mean,
)
from support_tokens.errors import ArgumentError, UnsupportedModelError
from support_tokens.law import EmbeddingPrior
from support_tokens.margins import view_sign
from support_tokens.sources import PriorSource

__all__ = ["BarrierHandle", "attach_barrier", "attached_barriers"]

_SLOT = "support_tokens"


class _Barrier(nn.Module):
    """One barrier of a model: a source of margins, a penalty and its weight."""

    def __init__(
        self, source: PriorSource, weight: Weight, penalty: str, target_margin: float, positions: int | None, seed: int
    ):
        super().__init__()
        self.source = source
        self.weight, self.penalty, self.target_margin, self.positions = weight, penalty, target_margin, positions
        self.step = 0
        self.record: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def present_weight(self) -> float | Tensor:
        """The weight at this step."""
        return self.weight(self.step) if callable(self.weight) else self.weight

    def penalty_of_last_pass(self, labels: Tensor | None = None, num_items: Tensor | int | None = None) -> Tensor:
        """Mean penalty of the last forward pass, a scalar with gradient; it is recorded, without host
        synchronisation."""
        valid = self.source.valid()
        positions = None if self.positions is None else sample_positions(valid, self.positions, self._generator)
        margins, squared_error = self.source.observe(positions)
        per_token = per_token_penalty(
            margins,
            self.penalty,
            target_margin=self.target_margin,
            squared_error=squared_error,
            noise_scale=self.source.law.noise_scale.detach(),
        )
        if num_items is None or labels is None:
            share = valid.sum(-1) / valid.sum().clamp_min(1)
        else:
            # Under gradient accumulation the cross-entropy of a micro-batch is its sum over the items of the whole
            # batch; the penalty is split alike, each sequence weighing as much as its items, so that any split has the
            # same gradient.
            share = (labels != -100).sum(-1) / num_items
        penalty = weighted_mean(per_token, margins.valid, share.to(per_token))
        self._note(margins, penalty)
        return penalty

    @torch.no_grad()
    def _note(self, margins, penalty: Tensor) -> None:
        count = margins.valid.sum().clamp_min(1)
        mean = margins.log_abs_det.masked_fill(~margins.valid, 0.0).sum() / count
        self.record = {
            "penalty": penalty.detach(),
            "log_margin_mean": mean,
            "log_margin_min": margins.log_abs_det.detach().masked_fill(~margins.valid, math.inf).min(),
            "negative_share": ((margins.sign < 0) & margins.valid).sum() / count,
        }
        if isinstance(self.weight, MarginController):
            self.weight.update(mean)


class _Barriers(nn.Module):
    """All barriers of one model, in its slot `support_tokens`: their laws train with it and never enter its state
    dict."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # The instance attribute only, if any: the property behind it would give a function that is no attribute of
        # this model.
        self.original = model.__dict__.get("_loss_function")
        self.inherited: Callable[..., Tensor] = model.loss_function  # type: ignore[assignment]
        self.register_load_state_dict_post_hook(self._expect_no_keys)

    def loss(self, *args, **kwargs) -> Tensor:
        """Cross-entropy as before, plus the penalties in train mode."""
        cross_entropy = self.inherited(*args, **kwargs)
        if not self.training:
            return cross_entropy
        labels = kwargs.get("shift_labels")
        if labels is None:
            labels = kwargs.get("labels", args[1] if len(args) > 1 else None)
            labels = None if labels is None else labels[:, 1:]
        total = cross_entropy
        for barrier in self.children():
            penalty = barrier.penalty_of_last_pass(labels, kwargs.get("num_items_in_batch"))  # type: ignore[operator]
            barrier.record["ce"] = cross_entropy.detach()  # type: ignore[index,union-attr]
            total = total + barrier.present_weight() * penalty.to(cross_entropy.device)  # type: ignore[operator]
            barrier.step += 1  # type: ignore[operator]
            barrier.source.forget()  # type: ignore[union-attr,operator]
        return total

    def state_dict(self, *args, destination=None, prefix: str = "", keep_vars: bool = False) -> dict:  # type: ignore[override]
        """Nothing: a saved checkpoint must load in stock transformers; `BarrierHandle.state_dict` has the laws."""
        return {} if destination is None else destination

    @staticmethod
    def _expect_no_keys(_module: nn.Module, incompatible) -> None:
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if f"{_SLOT}." not in key]


class BarrierHandle:
    r"""The user's hold on an attached barrier: what it measured, its weight, and the way to take it off.

    Made by `attach_barrier`.
    """

    def __init__(self, barrier: _Barrier, model: nn.Module) -> None:
        self._barrier = barrier
        self._model = weakref.ref(model)

    def __repr__(self) -> str:
        state = "attached" if self.attached else "removed"
        return f"BarrierHandle(penalty={self._barrier.penalty!r}, weight={self.weight!r}, {state})"

    @property
    def attached(self) -> bool:
        """Whether the barrier still acts on its model."""
        model = self._model()
        return model is not None and any(b is self._barrier for b in getattr(model, _SLOT, nn.Module()).children())

    @property
    def last(self) -> dict[str, float]:
        """The last training step: `ce`, `penalty`, `log_margin_mean`, `log_margin_min` in nats, `negative_share`;
        empty before it.

        Reading it synchronises with the device; the training step itself does not.
        """
        return {name: float(value) for name, value in self._barrier.record.items()}

    @property
    def law(self) -> EmbeddingPrior:
        """The law whose coupling the barrier acts on."""
        return self._barrier.source.law

    @property
    def weight(self) -> Weight:
        r"""$\lambda$: a number, a schedule or a controller; may be set."""
        return self._barrier.weight

    @weight.setter
    def weight(self, value: Weight) -> None:
        self._barrier.weight = _checked_weight(value)

    @property
    def step(self) -> int:
        """Steps the schedule has seen: losses computed in train mode, unless set from outside (optimiser steps,
        say)."""
        return self._barrier.step

    @step.setter
    def step(self, value: int) -> None:
        self._barrier.step = value

    def penalty(self) -> Tensor:
        r"""Mean penalty of the last forward pass in train mode, a scalar with gradient, without $\lambda$.

        For a loop that computes its loss from logits, without labels in the forward pass.

        Raises:
            CaptureError: There was no such pass, or its loss has already counted the penalty.
        """
        return self._barrier.penalty_of_last_pass()

    def state_dict(self) -> dict[str, Tensor]:
        """The law's weights and the state of the position sampler, to be saved beside the model's checkpoint."""
        law = {f"law.{name}": value.detach().clone() for name, value in self.law.state_dict().items()}
        return {**law, "positions.rng": self._barrier._generator.get_state(), "step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take up the state that `state_dict` gave."""
        self.law.load_state_dict({name.removeprefix("law."): v for name, v in state.items() if name.startswith("law.")})
        self._barrier._generator.set_state(state["positions.rng"].cpu())
        self.step = int(state["step"])

    def remove(self) -> None:
        """Take the barrier off and leave the model as it was; a second call does nothing."""
        model = self._model()
        if model is None or not self.attached:
            return
        barriers = getattr(model, _SLOT)
        name = next(name for name, child in barriers.named_children() if child is self._barrier)
        self._barrier.source.remove()
        delattr(barriers, name)
        if next(barriers.children(), None) is None:
            if barriers.original is None:
                del model.__dict__["_loss_function"]
            else:
                model._loss_function = barriers.original
            delattr(model, _SLOT)


def attach_barrier(
    model: nn.Module,
    weight: Weight = 0.02,
    *,
    source: str = "prior",
    penalty: str = "log",
    view: str = "noise",
    layer: int = 0,
    positions: int | None = None,
    rank: int | None = None,
    noise_scale: float = 1.0,
    target_margin: float = 0.0,
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
        model: A causal language model of transformers, wrapped (PEFT, `torch.compile`) or not. Make the optimiser
            after this call: the law's W_Q and W_K are parameters of the model. They never enter its state dict, so a
                saved checkpoint loads
            in stock transformers; `BarrierHandle.state_dict` holds them.
        weight: $\lambda \ge 0$: a number, a schedule `step -> lambda`, or a `MarginController`.
        source: `prior`: the paper's law with a coupling of its own, on the embeddings that enter the first block.
        penalty: `log`, `hinge` or `map`; see `per_token_penalty`. `log` is unbounded below: watch `handle.last`.
        view: `noise` ($J = I - D$) or `block` ($J = I + D$); the law has the noise view only.
        layer: Block whose input the source reads; the law reads that of block 0.
        positions: Number of positions of each sequence, drawn uniformly at every step; None: all. The penalty stays
            unbiased.
        rank: R of the law; None: min(D, 32).
        noise_scale: $\sigma$ of the law, for the penalty `map`.
        target_margin: $m^*$ in nats, for the penalty `hinge`.
        seed: Seed of the law's weights and of the positions; the global generator is left alone.

    Returns:
        A `BarrierHandle`: `.last`, `.weight`, `.penalty()`, `.state_dict()`, `.remove()`.

    Raises:
        ArgumentError: An option is out of range.
        UnsupportedModelError: No causal language model of transformers is inside.

    Source:
        arXiv:2602.22271, the MAP objective; theory page, section 4, for what it does not do.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8))
        >>> handle = attach_barrier(model, weight=0.02)
        >>> ids = torch.arange(8).unsqueeze(0)
        >>> loss = model.train()(input_ids=ids, labels=ids).loss
        >>> sorted(handle.last)
        ['ce', 'log_margin_mean', 'log_margin_min', 'negative_share', 'penalty']
        >>> handle.remove()
    """
    view_sign(view)
    weight = _checked_weight(weight)
    if source != "prior":
        raise ArgumentError(f"source must be 'prior', received {source!r}; the law's own coupling is the only source.")
    if penalty not in PENALTIES:
        raise ArgumentError(f"penalty must be one of {', '.join(PENALTIES)}, received {penalty!r}; choose one of them.")
    if view != "noise" or layer != 0:
        raise ArgumentError(
            f"the law acts on the noise view of layer 0, received view={view!r}, layer={layer}; leave both at their "
            f"defaults."
        )
    if positions is not None and positions < 1:
        raise ArgumentError(f"positions must be at least 1, received {positions}; leave it None for all positions.")
    if not math.isfinite(target_margin):
        raise ArgumentError(f"target_margin must be a finite number of nats, received {target_margin}; pass 0.0, say.")

    causal_model, decoder = _causal_model(model)
    embedding = causal_model.get_input_embeddings().weight
    width = causal_model.config.get_text_config(decoder=True).hidden_size
    generator = torch.Generator().manual_seed(seed)
    law = EmbeddingPrior(width, min(width, 32) if rank is None else rank, noise_scale, generator=generator)
    law.log_noise_scale.requires_grad_(False)  # the penalty has no normaliser that would keep a learned sigma finite
    law.to(embedding.device)
    barrier = _Barrier(PriorSource(causal_model, decoder, law), weight, penalty, target_margin, positions, seed)
    return _install(causal_model, barrier)


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
    causal_model, _ = _causal_model(model)
    return [BarrierHandle(barrier, causal_model) for barrier in getattr(causal_model, _SLOT, nn.Module()).children()]  # type: ignore[arg-type]


def _install(causal_model: nn.Module, barrier: _Barrier) -> BarrierHandle:
    if not hasattr(causal_model, _SLOT):
        barriers = _Barriers(causal_model)
        setattr(causal_model, _SLOT, barriers)
        causal_model.loss_function = barriers.loss  # type: ignore[assignment]
    barriers = getattr(causal_model, _SLOT)
    taken = {name for name, _ in barriers.named_children()}
    barriers.add_module(next(f"barrier_{n}" for n in range(len(taken) + 1) if f"barrier_{n}" not in taken), barrier)
    barriers.train(causal_model.training)
    return BarrierHandle(barrier, causal_model)


def _causal_model(model: nn.Module) -> tuple[Any, nn.Module]:
    """The transformers model that computes the loss, under any wrapper, and its base model."""
    from transformers import PreTrainedModel

    found = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if found is None or found.base_model is found or found.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"model must be a causal language model of transformers with a language-model head, received "
            f"{type(model).__name__}; "
            "load it with AutoModelForCausalLM."
        )
    return found, found.base_model


def _checked_weight(weight: Weight) -> Weight:
    if callable(weight):
        return weight
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not (0 <= weight < math.inf):
        raise ArgumentError(
            f"weight must be a finite number of at least 0 or a schedule, received {weight!r}; pass 0.02, say."
        )
    return float(weight)
