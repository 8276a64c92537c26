r"""The regularised loss of a model: cross-entropy in eval mode, and in train mode $\mathrm{CE} + \sum_i w_i\,
\overline{p}_i$ over the terms that sit in the model."""

__all__ = ["SLOT", "RegularizerSlot"]

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from support_tokens.errors import CaptureError
from support_tokens.models import Decoder, is_replica, loss_function_of, restore_loss_function
from support_tokens.regularizers.base import Term
from support_tokens.regularizers.figures import StepFigures
from support_tokens.regularizers.passes import Change, Pass
from support_tokens.regularizers.watcher import ForwardWatcher

SLOT = "support_tokens"
"""Attribute of a causal language model under which its terms sit."""


class RegularizerSlot(nn.Module):
    """All terms of one model: their parameters train with it and never enter its state dict.

    Args:
        site: Where regularizers act on the model.
    """

    def __init__(self, site: Decoder) -> None:
        super().__init__()
        model = site.causal_model
        # The instance attribute only, if any: the property behind it would give a function that is no attribute of
        # this model.
        self.original = loss_function_of(model)
        self.inherited: Callable[..., Tensor] = model.loss_function  # type: ignore[assignment]
        self.register_load_state_dict_post_hook(self._expect_no_keys)
        self.watcher = ForwardWatcher(site, self._choose, self._change, self._ended)
        self.figures = StepFigures()
        self._site = (site,)  # in a tuple, since a module held as an attribute would be registered a second time
        self._told = self._follows_optimizer = False
        self._unread: set[Term] = set()
        self._pending: _PendingPenalties | None = None
        self._optimizer_hooks: tuple[RemovableHandle, ...] = ()

    def install(self) -> None:
        """Take the place in the model: only now, so that a term that cannot be made leaves no trace."""
        model = self.site.causal_model
        self.watcher.start()
        self._optimizer_hooks = _follow_optimizers(self)
        setattr(model, SLOT, self)
        model.loss_function = self.loss  # type: ignore[assignment]

    @property
    def site(self) -> Decoder:
        """Where the terms act on the model."""
        return self._site[0]

    def terms(self) -> Iterator[Term]:
        """The terms, oldest first."""
        return iter(self.children())  # type: ignore[arg-type]

    def place(self, term: Term) -> str:
        """The name under which a term's figures stand."""
        return next((name for name, child in self.named_children() if child is term), "")

    def add(self, term: Term) -> None:
        """One more."""
        taken = {name for name, _ in self.named_children()}
        self.add_module(next(f"term_{n}" for n in range(len(taken) + 1) if f"term_{n}" not in taken), term)

    def discard(self, term: Term) -> None:
        """One less; no loss owes its penalty any more."""
        self.figures.drop(place := self.place(term))
        delattr(self, place)
        self._settle((term,))
        self.watcher.keep_captures({other.layers for other in self.terms() if other.layers})

    def _choose(self, decoder: nn.Module) -> bool:
        if not self.training or next(self.terms(), None) is None:
            return False
        if is_replica(decoder):
            raise CaptureError(
                "the model runs in threads of torch.nn.DataParallel, which share one regularizer; one process a device "
                "is required: start with torchrun or accelerate launch."
            )
        if not torch.is_grad_enabled():
            # A pass for metrics must not displace one that still waits for its loss.
            return not self._unread
        if self._unread and torch.compiler.is_compiling():
            # Compiled code has no hooks on gradients that could tell which loss was differentiated.
            raise CaptureError(
                "no loss held the penalty of the regularizer since the last forward pass of the compiled model; use "
                "the loss that the model returns for labels, or add handle.weighted_penalty() to your own."
            )
        self._unread = {term for term in self.terms() if term.has_penalty}
        self._pending = None if torch.compiler.is_compiling() else _PendingPenalties(set(self._unread))
        return True

    def _change(self, mask: Tensor | None) -> Change | None:
        return partial(self._changed, mask) if any(term.changes_embeddings for term in self.terms()) else None

    def _changed(self, mask: Tensor | None, x: Tensor) -> Tensor:
        real = (
            torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask[:, -x.shape[1] :] != 0
        )
        for term in self.terms():
            x = term.change(x, real)
        return x

    def _ended(self, output: Any) -> None:
        if self.training:
            if self._pending is not None and torch.is_grad_enabled() and output[0].requires_grad:
                output[0].register_hook(self._pending.check)
        elif not self._told and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            unused = not any(int(term.counted) for term in self.terms())
            if unused and output[0].requires_grad:
                output[0].register_hook(self._tell)

    def _tell(self, _gradient: Tensor) -> None:
        """Hook of what the decoder computed in eval mode, before a regularizer ever acted."""
        if not self._told:
            self._told = True
            warnings.warn(
                "A loss was differentiated while the model is in eval mode, where its regularizers add nothing; call "
                "model.train() to train with them (from_pretrained gives models in eval mode; Lightning leaves them "
                "so).",
                stacklevel=2,
            )

    def loss(self, *args, **kwargs) -> Tensor:
        """Cross-entropy as before, plus the penalties in train mode."""
        cross_entropy = self.inherited(*args, **kwargs)
        if not self.training:
            return cross_entropy
        if not self.watcher.seen:
            raise CaptureError(
                "the regularizer saw no forward pass before this loss; call the model as a whole, and where "
                "torch.compile had compiled it before the regularizer was attached, call torch.compiler.reset() after "
                "attaching."
            )
        self.watcher.seen = False
        if not self.watcher.looking or self.watcher.current is None:
            return cross_entropy
        targets = kwargs.get("shift_labels")
        if targets is None:
            labels = kwargs.get("labels", args[1] if len(args) > 1 else None)
            targets = None if labels is None else labels[:, 1:]
        self.watcher.current.logits = kwargs.get("logits", args[0] if args else None)
        pending = self._pending
        total = self.objective(tuple(self.terms()), cross_entropy, targets, kwargs.get("num_items_in_batch"))
        if pending is not None and total.requires_grad:
            total.register_hook(pending.settle)
        return total

    def objective(
        self,
        terms: Sequence[Term],
        cross_entropy: Tensor | None,
        targets: Tensor | None = None,
        num_items: Tensor | int | None = None,
        *,
        weighted: bool = True,
    ) -> Tensor:
        """Cross-entropy and the weighted penalties of some terms on the last forward pass, a scalar with gradient.

        Args:
            terms: Those whose penalties join.
            cross_entropy: Loss of the model; None: it is computed elsewhere, and the penalties alone are wanted.
            targets: `(B, n)`, -100 where there is none.
            num_items: Number of targets of the whole batch, of which this may be a part; None: this is the whole.
            weighted: Whether the penalties are taken times their weights.

        Raises:
            CaptureError: There is no pass, a loss has the penalty already, or a penalty could move nothing.
        """
        forward = self._waiting_pass(terms)
        forward.targets, forward.num_items, forward.cross_entropy = targets, num_items, cross_entropy
        forward.adversary = next((a for term in self.terms() if (a := getattr(term, "adversarial", None))), None)
        self.figures.begin(split=num_items is not None and targets is not None)
        weights = [self._weight(term) if term.has_penalty else None for term in terms]
        # Where another loss takes the place of all of the cross-entropy, the backward pass through it is spared.
        forward.spared = cross_entropy is not None and any(
            term.replaces_loss and isinstance(weight, float) and weight == 1.0
            for term, weight in zip(terms, weights, strict=True)
        )
        forward.alone = sum(weight is not None for weight in weights) == 1
        total = cross_entropy.detach() if forward.spared and cross_entropy is not None else cross_entropy
        for term, weight in zip(terms, weights, strict=True):
            if weight is None:
                continue
            penalty = self.penalty(term, forward)
            penalty = penalty if cross_entropy is None else penalty.to(cross_entropy.device)
            self._note(term, penalty, weight)
            weight = weight if weighted else 1.0
            total = weight * penalty if total is None else total + weight * penalty
        if total is None:
            total = torch.zeros((), device=next(self.site.embedding.parameters()).device)
        if cross_entropy is not None:
            self.figures.add(("", "ce"), cross_entropy)
            self.figures.add(("", "total"), total)
        self._settle(terms, owed=cross_entropy is not None)
        if torch.is_grad_enabled():
            for term in terms:
                term.counted = term.counted + 1
                if not self._follows_optimizer:
                    term.steps = term.steps + 1
        return total

    def penalty(self, term: Term, forward: Pass) -> Tensor:
        """The penalty of a term on a pass, without its weight."""
        if torch.is_grad_enabled() or not term.runs_again:
            if self._pending is None:
                return term.penalty(forward)
            with self._pending.searching():
                return term.penalty(forward)
        # A pass for metrics must not change what later steps draw.
        with torch.random.fork_rng(), torch.enable_grad():
            return term.penalty(forward).detach()

    def _weight(self, term: Term) -> float | Tensor | None:
        """The weight at this step, with `every` so many times it; None where the step is left out."""
        if term.every > 1 and not _due(term):
            return None
        weight = term.current_weight()
        if isinstance(weight, float) and weight == 0.0 and term.runs_again:
            return None  # nothing is drawn, so that the run is that without the term, bit for bit
        return weight * term.every

    def _note(self, term: Term, penalty: Tensor, weight: float | Tensor) -> None:
        place = self.place(term)
        self.figures.add((place, "penalty"), penalty)
        self.figures.set((place, "weight"), weight)
        for name, value in term.record.items():
            if name != "tokens":
                self.figures.add((place, name), value, term.record.get("tokens"))

    def _waiting_pass(self, terms: Sequence[Term]) -> Pass:
        owing = [term for term in terms if term.has_penalty]
        forward = self.watcher.current
        read = torch.is_grad_enabled() and owing and not any(term in self._unread for term in owing)
        if forward is None or read:
            raise CaptureError(
                "the regularizer saw no forward pass in train mode that waits for its penalty; call the model through "
                "its forward pass in train mode, once for every loss, or remove the regularizer."
            )
        return forward

    def waits(self, term: Term) -> bool:
        """Whether the last forward pass has entered no loss of a term yet."""
        return term in self._unread

    def _settle(self, terms: Sequence[Term], *, owed: bool = False) -> None:
        """Take note that the penalties of some terms were read; they stay owed until their own loss is differentiated
        where that is the model's."""
        self._unread = self._unread - set(terms)
        if self._pending is not None and torch.is_grad_enabled() and not owed:
            self._pending.owed -= set(terms)
        if not self._unread:
            self.watcher.current = None

    def _trained_by(self, optimizer: Optimizer) -> bool:
        trained = next((p for p in self.site.causal_model.parameters() if p.requires_grad), None)
        return any(p is trained for group in optimizer.param_groups for p in group["params"])

    def before_step(self, optimizer: Optimizer) -> None:
        """Hook of every optimiser, before its step."""
        if self._trained_by(optimizer):
            for term in self.terms():
                term.before_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Hook of every optimiser: schedules count the steps of the one that trains this model."""
        if not self._trained_by(optimizer):
            return
        for term in self.terms():
            # Before the first step losses were counted, of which it may have had several.
            counted = 0 if self._follows_optimizer else min(int(term.steps), self.figures.parts)
            term.steps = term.steps - counted + 1
            term.after_step(optimizer)
        self._follows_optimizer = True
        self.figures.close()

    def state_dict(self, *args, destination=None, prefix: str = "", keep_vars: bool = False) -> dict:  # type: ignore[override]
        """Nothing: a saved checkpoint must load in stock transformers; a handle's `state_dict` has the terms."""
        return {} if destination is None else destination

    @staticmethod
    def _expect_no_keys(_module: nn.Module, incompatible) -> None:
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if f"{SLOT}." not in key]

    def remove(self) -> None:
        """Leave the model as it was; a loss function that somebody set since stays."""
        model = self.site.causal_model
        self.watcher.stop()
        for hook in self._optimizer_hooks:
            hook.remove()
        if loss_function_of(model) == self.loss:
            restore_loss_function(model, self.original)
        delattr(model, SLOT)

    def __deepcopy__(self, memo: dict) -> "RegularizerSlot":
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__setstate__({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        return copied

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_pending": None, "_unread": set(), "_optimizer_hooks": ()}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._optimizer_hooks = _follow_optimizers(self)


class _PendingPenalties:
    """One forward pass with gradients, and the terms that no loss of it holds yet."""

    def __init__(self, terms: set[Term]) -> None:
        self.owed = terms
        self._searching = False

    @contextmanager
    def searching(self) -> Iterator[None]:
        """While a term differentiates the loss itself (SAM's first gradient)."""
        self._searching = True
        try:
            yield
        finally:
            self._searching = False

    def check(self, _gradient: Tensor) -> None:
        """Hook of what the decoder computed: its gradient must come from a loss with every penalty in it."""
        if self.owed and not self._searching:
            raise CaptureError(
                "a backward pass began from a loss that does not hold the penalty of the regularizer; use the loss "
                "that the model returns for labels, or add handle.weighted_penalty() to your own before backward(), "
                "or, where a trainer computes the loss itself, call RegularizerCallback(handle).follow(trainer)."
            )

    def settle(self, _gradient: Tensor) -> None:
        """Hook of the loss: whatever flows from here flows through the penalties too."""
        self.owed.clear()


def _follow_optimizers(slot: RegularizerSlot) -> tuple[RemovableHandle, ...]:
    """Tells a slot of every optimiser's steps for as long as it lives."""
    reference = weakref.ref(slot)

    def before_step(optimizer: Optimizer, _args: tuple, _kwargs: dict) -> None:
        if (alive := reference()) is not None:
            alive.before_step(optimizer)

    def after_step(optimizer: Optimizer, _args: tuple, _kwargs: dict) -> None:
        if (alive := reference()) is not None:
            alive.after_step(optimizer)

    handles = (register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step))
    for handle in handles:
        weakref.finalize(slot, handle.remove)
    return handles


@torch.compiler.disable
def _due(term: Term) -> bool:
    return int(term.steps) % term.every == 0
