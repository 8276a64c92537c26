r"""The penalised loss of a model: cross-entropy in eval mode, and in train mode $\mathrm{CE} + \sum_i \lambda_i\,
\overline{p}_i$ over the barriers that sit in the model."""

__all__ = ["BarrierSlot", "BarrierTerm"]

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from support_tokens.errors import CaptureError
from support_tokens.margins import (
    AttentionState,
    Margins,
    fused_penalty,
    rankable_positions,
    state_margins,
    support_candidates,
)
from support_tokens.regularizers.barrier.penalties import (
    MarginController,
    Weight,
    checked_step_weight,
    margin_penalty,
    sample_positions,
    token_weights,
)
from support_tokens.regularizers.barrier.sources import SLOT, ModelSource, PassWatch, PriorSource


class BarrierTerm(nn.Module):
    r"""One barrier of a model: a source of margins, a penalty and its weight.

    Args:
        source: Gives the margins of the last forward pass.
        weight: $\lambda$, a number, a schedule or a controller.
        penalty: Name of the penalty.
        target_margin: $m^*$ in nats, for `hinge`.
        positions: Number of positions drawn of each sequence, or `support` for candidates; None: all.
        candidates: Number of candidates of each sequence.
        seed: Seed of the positions.
    """

    def __init__(
        self,
        source: PriorSource | ModelSource,
        weight: Weight,
        penalty: str,
        target_margin: float,
        positions: int | str | None,
        candidates: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.source, self.candidates = source, candidates
        self.weight, self.penalty, self.target_margin, self.positions = weight, penalty, target_margin, positions
        # Tensors on the host, and no buffers: to the compiler a number that changes at every step is a new program at
        # every step, and one on the device would have to be waited for.
        self.steps, self.counted = torch.tensor(0), torch.tensor(0)
        self.record: dict[str, Tensor] = {}
        self.generator = torch.Generator().manual_seed(seed)

    def present_weight(self) -> float | Tensor:
        """The weight at this step."""
        if isinstance(self.weight, MarginController):
            return self.weight(0)
        return self._scheduled_weight() if callable(self.weight) else self.weight  # type: ignore[call-arg,return-value]

    @torch.compiler.disable
    def _scheduled_weight(self) -> Tensor:
        return checked_step_weight(self.weight(int(self.steps)), int(self.steps))  # type: ignore[operator]

    def mean_penalty(self, labels: Tensor | None = None, num_items: Tensor | int | None = None) -> Tensor:
        """Mean penalty of the last forward pass, a scalar with gradient; recorded without host synchronisation, and the
        pass is forgotten. Without gradients it only measures: steps, draws and a controller stay as they were.

        Args:
            labels: Targets `(B, ...)`, -100 where there is none.
            num_items: Number of targets in the whole batch, of which this may be a part; None: this is the whole.

        Raises:
            CaptureError: There is no pass, or the penalty could move nothing.
        """
        states = self.source.states()
        query = states[0].query
        real = states[0].valid if states[0].valid is not None else torch.ones_like(query[:, 0, :, 0], dtype=torch.bool)
        chosen = self._chosen(states, real)
        if num_items is None or labels is None:
            share = real.sum(-1).to(query) / real.sum().clamp_min(1)
        else:
            # Under gradient accumulation the cross-entropy of a micro-batch is its sum over the items of the whole
            # batch; the penalty is split alike, each sequence weighing as much as its items, so that any split has the
            # same gradient.
            share = (labels != -100).flatten(1).sum(-1).to(query) / _on(num_items, query.device)
        function, terms, seen = margin_penalty(self.penalty, self.target_margin), [], []
        for state, (positions, counting) in zip(states, chosen, strict=True):
            weight = token_weights(counting, share.to(counting.device)) / len(states)
            value, margins = _weighted_penalty(state, weight, function, self.source.view, positions)
            if isinstance(self.source, PriorSource) and self.penalty == "map":
                error = self.source.squared_error(state, positions)
                value = value + (weight * error).sum() / (2 * self.source.law.noise_scale.detach() ** 2)
            terms.append(value.to(query.device))
            seen.append(margins)
        penalty = torch.stack(terms).sum()
        self._note(seen, penalty)
        if torch.is_grad_enabled():
            self.steps, self.counted = self.steps + 1, self.counted + 1
            if isinstance(self.weight, MarginController):
                self.weight.update(_mean_over_processes(self.record["log_margin_mean"]))
        self.source.forget()
        return penalty

    def _chosen(self, states: Sequence[AttentionState], real: Tensor) -> list[tuple[Tensor | None, Tensor]]:
        """The positions of each state, and which of them count and do not only fill a row: all, a draw that layers
        share, or candidates of each layer."""
        if self.positions is None:
            return [(None, real)] * len(states)
        if self.positions == "support":
            found = [support_candidates(state, self.candidates, self.source.view) for state in states]
            return [(p, rankable_positions(state).gather(1, p)) for state, p in zip(states, found, strict=True)]
        drawn = self._draw(real, self.positions)  # type: ignore[call-arg,arg-type]
        return [(drawn, real.gather(1, drawn))] * len(states)

    @torch.compiler.disable
    def _draw(self, valid: Tensor, count: int) -> Tensor:
        generator = self.generator
        if not torch.is_grad_enabled():
            # A pass for metrics must not change what later steps draw.
            generator = torch.Generator()
            generator.set_state(self.generator.get_state())
        return sample_positions(valid, count, generator)

    @torch.no_grad()
    def _note(self, layers: list[Margins], penalty: Tensor) -> None:
        def joined(of: Callable[[Margins], Tensor]) -> Tensor:
            return torch.cat([of(margins).to(penalty.device) for margins in layers], dim=1)

        valid, log_abs_det = joined(lambda m: m.valid), joined(lambda m: m.log_abs_det)
        count = valid.sum().clamp_min(1)
        # Margins that are 0 by structure would hide the smallest one, unless there are no others.
        rankable = joined(lambda m: m.rankable)
        ranked = torch.where(rankable.any(), rankable, valid)
        mean = log_abs_det.masked_fill(~valid, 0.0).sum() / count
        self.record = {
            "penalty": penalty.detach(),
            "log_margin_mean": mean,
            "log_margin_min": log_abs_det.masked_fill(~ranked, math.inf).min(),
            "negative_share": ((joined(lambda m: m.sign) < 0) & valid).sum() / count,
        }


class _Ticket:
    """One forward pass with gradients, and the barriers that no loss of it holds yet."""

    def __init__(self, barriers: Iterator[nn.Module]) -> None:
        self.owed = set(barriers)

    def check(self, _gradient: Tensor) -> None:
        """Hook of what the decoder computed: its gradient must come from a loss with every penalty in it."""
        if self.owed:
            raise CaptureError(
                "a backward pass began from a loss that does not hold the penalty of the barrier; use the loss that "
                "the model returns for labels, or add handle.weighted_penalty() to your own before backward(), or, "
                "where a trainer computes the loss itself, call BarrierCallback(handle).follow(trainer)."
            )

    def settle(self, _gradient: Tensor) -> None:
        """Hook of the loss: whatever flows from here flows through the penalties too."""
        self.owed.clear()


class BarrierSlot(nn.Module):
    """All barriers of one model: their laws train with it and never enter its state dict.

    Args:
        model: The causal language model.
        decoder: Its base model, without head.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        # The instance attribute only, if any: the property behind it would give a function that is no attribute of
        # this model.
        self.original = model.__dict__.get("_loss_function")
        self.inherited: Callable[..., Tensor] = model.loss_function  # type: ignore[assignment]
        self.register_load_state_dict_post_hook(self._expect_no_keys)
        self.watch = PassWatch(decoder, self._choose)
        self._hook: RemovableHandle | None = None
        self._ticket: _Ticket | None = None
        self._waiting = False
        self._told = False

    def install(self, model: nn.Module, decoder: nn.Module) -> None:
        """Take the place in the model: only now, so that a barrier that cannot be made leaves no trace."""
        self.watch.start(decoder)
        self._hook = decoder.register_forward_hook(self._after)
        setattr(model, SLOT, self)
        model.loss_function = self.loss  # type: ignore[assignment]

    def barriers(self) -> Iterator[BarrierTerm]:
        """The barriers, oldest first."""
        return iter(self.children())  # type: ignore[arg-type]

    def add(self, barrier: BarrierTerm) -> None:
        """One more."""
        taken = {name for name, _ in self.named_children()}
        name = next(f"barrier_{n}" for n in range(len(taken) + 1) if f"barrier_{n}" not in taken)
        self.add_module(name, barrier)
        self.watch.listeners.append(barrier.source)

    def discard(self, barrier: BarrierTerm) -> None:
        """One less; no loss owes its penalty any more."""
        self.watch.listeners.remove(barrier.source)
        delattr(self, next(name for name, child in self.named_children() if child is barrier))
        self.count(barrier)

    def _choose(self, decoder: nn.Module) -> bool:
        if not self.training or next(self.barriers(), None) is None:
            return False
        if getattr(decoder, "_is_replica", False):
            raise CaptureError(
                "the model runs in threads of torch.nn.DataParallel, which share one barrier; one process a device is "
                "required: start with torchrun or accelerate launch."
            )
        if not torch.is_grad_enabled():
            # A pass for metrics must not displace one that still waits for its loss.
            return not self._waiting
        if self._waiting and torch.compiler.is_compiling():
            # Compiled code has no hooks on gradients that could tell which loss was differentiated.
            raise CaptureError(
                "no loss held the penalty of the barrier since the last forward pass of the compiled model; use the "
                "loss that the model returns for labels, or add handle.weighted_penalty() to your own."
            )
        self._waiting = True
        self._ticket = None if torch.compiler.is_compiling() else _Ticket(self.barriers())
        return True

    def _after(self, _decoder: nn.Module, _args: tuple, output) -> None:
        if self.training:
            if self._ticket is not None and torch.is_grad_enabled() and output[0].requires_grad:
                output[0].register_hook(self._ticket.check)
        elif not self._told and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            unused = not any(int(barrier.counted) for barrier in self.barriers())
            if unused and output[0].requires_grad:
                output[0].register_hook(self._tell)

    def _tell(self, _gradient: Tensor) -> None:
        """Hook of what the decoder computed in eval mode, before the barrier ever acted."""
        if not self._told:
            self._told = True
            warnings.warn(
                "A loss was differentiated while the model is in eval mode, where its barrier adds nothing; call "
                "model.train() to train with it (from_pretrained gives models in eval mode; Lightning leaves them so).",
                stacklevel=2,
            )

    def loss(self, *args, **kwargs) -> Tensor:
        """Cross-entropy as before, plus the penalties in train mode."""
        cross_entropy = self.inherited(*args, **kwargs)
        if not self.training:
            return cross_entropy
        if not self.watch.seen:
            raise CaptureError(
                "the barrier saw no forward pass before this loss; call the model as a whole, and where torch.compile "
                "had compiled it before the barrier was attached, call torch.compiler.reset() after attaching."
            )
        self.watch.seen = False
        if not self.watch.looking:
            return cross_entropy
        labels = kwargs.get("shift_labels")
        if labels is None:
            labels = kwargs.get("labels", args[1] if len(args) > 1 else None)
            labels = None if labels is None else labels[:, 1:]
        total = cross_entropy
        for barrier in self.barriers():
            weight = barrier.present_weight()
            penalty = barrier.mean_penalty(labels, kwargs.get("num_items_in_batch"))
            barrier.record["ce"] = cross_entropy.detach()
            total = total + weight * penalty.to(cross_entropy.device)
        self._waiting = False
        if self._ticket is not None and total.requires_grad:
            total.register_hook(self._ticket.settle)
        return total

    def count(self, barrier: BarrierTerm) -> None:
        """Takes note that a loss outside of the model holds the penalty of `barrier`."""
        if self._ticket is not None:
            self._ticket.owed.discard(barrier)
        self._waiting = any(other.source.waiting for other in self.barriers())

    def state_dict(self, *args, destination=None, prefix: str = "", keep_vars: bool = False) -> dict:  # type: ignore[override]
        """Nothing: a saved checkpoint must load in stock transformers; `BarrierHandle.state_dict` has the laws."""
        return {} if destination is None else destination

    @staticmethod
    def _expect_no_keys(_module: nn.Module, incompatible) -> None:
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if f"{SLOT}." not in key]

    def remove(self, model: nn.Module) -> None:
        """Leave `model` as it was; a loss function that somebody set since stays."""
        self.watch.stop()
        if self._hook is not None:
            self._hook.remove()
        if model.__dict__.get("_loss_function") == self.loss:
            if self.original is None:
                del model.__dict__["_loss_function"]
            else:
                model._loss_function = self.original
        delattr(model, SLOT)

    def __deepcopy__(self, memo: dict) -> "BarrierSlot":
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        return copied

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_ticket": None, "_waiting": False}


def _weighted_penalty(
    state: AttentionState,
    weight: Tensor,
    function: Callable[[Tensor], Tensor],
    view: str,
    positions: Tensor | None,
) -> tuple[Tensor, Margins]:
    """Sum of weights times penalties, with gradient, and the margins."""
    weight = weight.to(state.query.device)
    positions = None if positions is None else positions.to(state.query.device)
    if torch.compiler.is_compiling():
        # The compiler plans memory itself, and follows no backward pass inside of a forward pass.
        margins = state_margins(state, view=view, positions=positions)
        return (weight * function(margins.log_abs_det)).sum(), margins
    return fused_penalty(state, weight, function, view=view, positions=positions)


def _on(count: Tensor | int, device: torch.device) -> Tensor | int:
    return count.to(device) if isinstance(count, Tensor) else count


def _mean_over_processes(value: Tensor) -> Tensor:
    """The mean over all processes of training, so that a controller has one weight in all of them."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    value = value.clone()
    torch.distributed.all_reduce(value)
    return value / torch.distributed.get_world_size()
