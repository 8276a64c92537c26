r"""The log-barrier as a term of a model's loss: a source of margins, a penalty and its weight."""

__all__ = ["BarrierTerm"]

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

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
from support_tokens.regularizers.barrier.sources import AttentionSource, PriorSource
from support_tokens.regularizers.base import Term
from support_tokens.regularizers.passes import Pass


class BarrierTerm(Term):
    r"""One barrier of a model.

    Args:
        source: Gives the margins of a forward pass.
        weight: $\lambda$, a number, a schedule or a controller.
        penalty: Name of the penalty.
        target_margin: $m^*$ in nats, for `hinge`.
        positions: Number of positions drawn of each sequence, or `support` for candidates; None: all.
        candidates: Number of candidates of each sequence.
        seed: Seed of the positions.
        every: The penalty counts at every so many steps, with so many times its weight.
        name: Its name in figures.
    """

    def __init__(
        self,
        source: PriorSource | AttentionSource,
        weight: Weight,
        penalty: str,
        target_margin: float,
        positions: int | str | None,
        candidates: int,
        seed: int,
        every: int = 1,
        name: str = "barrier",
    ) -> None:
        super().__init__(name, weight, every)
        self.source, self.candidates = source, candidates
        self.kind, self.target_margin, self.positions = penalty, target_margin, positions
        self.layers = source.layers if isinstance(source, AttentionSource) else ()
        self.generator = torch.Generator().manual_seed(seed)

    def current_weight(self) -> float | Tensor:
        """The weight at this step."""
        if isinstance(self.weight, MarginController):
            return self.weight(0)
        return self._scheduled_weight() if callable(self.weight) else self.weight  # type: ignore[call-arg,return-value]

    @torch.compiler.disable
    def _scheduled_weight(self) -> Tensor:
        return checked_step_weight(self.weight(int(self.steps)), int(self.steps))

    def penalty(self, forward: Pass) -> Tensor:
        """Mean penalty of a pass, a scalar with gradient; recorded without waiting for the device. Without gradients it
        only measures: draws and a controller stay as they were.

        Raises:
            CaptureError: The penalty could move nothing.
        """
        states = self.source.states(forward)
        query = states[0].query
        real = states[0].valid if states[0].valid is not None else torch.ones_like(query[:, 0, :, 0], dtype=torch.bool)
        share = forward.sequence_weights(real, query)
        function, terms, seen = margin_penalty(self.kind, self.target_margin), [], []
        for state, (positions, counting) in zip(states, self._chosen(states, real), strict=True):
            weight = token_weights(counting, share.to(counting.device)) / len(states)
            value, margins = _weighted_penalty(state, weight, function, self.source.view, positions)
            if isinstance(self.source, PriorSource) and self.kind == "map":
                error = self.source.squared_error(state, positions)
                value = value + (weight * error).sum() / (2 * self.source.law.noise_scale.detach() ** 2)
            terms.append(value.to(query.device))
            seen.append(margins)
        penalty = torch.stack(terms).sum()
        self._note(seen, penalty.device)
        if torch.is_grad_enabled() and isinstance(self.weight, MarginController):
            self.weight.update(_mean_over_processes(self.record["log_margin_mean"]))
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
    def _note(self, layers: list[Margins], device: torch.device) -> None:
        def joined(of: Callable[[Margins], Tensor]) -> Tensor:
            return torch.cat([of(margins).to(device) for margins in layers], dim=1)

        valid, log_abs_det = joined(lambda m: m.valid), joined(lambda m: m.log_abs_det)
        count = valid.sum().clamp_min(1)
        # Margins that are 0 by structure would hide the smallest one, unless there are no others.
        rankable = joined(lambda m: m.rankable)
        ranked = torch.where(rankable.any(), rankable, valid)
        self.record = {
            "tokens": count,
            "log_margin_mean": log_abs_det.masked_fill(~valid, 0.0).sum() / count,
            "log_margin_min": log_abs_det.masked_fill(~ranked, math.inf).min(),
            "negative_fraction": ((joined(lambda m: m.sign) < 0) & valid).sum() / count,
        }

    def tensors(self) -> dict[str, Tensor]:
        """Weights of the law, state of the position sampler, weight of a controller."""
        law = {} if (law := self.law) is None else {**dict(law.named_parameters()), **dict(law.named_buffers())}
        state = {**{f"law.{name}": value for name, value in law.items()}, "positions.rng": self.generator.get_state()}
        if isinstance(self.weight, MarginController):
            state["controller"] = self.weight(int(self.steps)).clone()
        return state

    def load(self, tensors) -> None:
        """Takes up what `tensors` gave."""
        own = self.tensors()
        with torch.no_grad():
            for name, tensor in own.items():
                if name.startswith("law."):
                    tensor.copy_(_alike(tensors[name], tensor))
        self.generator.set_state(tensors["positions.rng"].cpu())
        if isinstance(self.weight, MarginController):
            self.weight.load(tensors["controller"])

    @property
    def law(self):
        """The law, or None where the barrier acts on the model's own attention."""
        return getattr(self.source, "law", None)


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


def _mean_over_processes(value: Tensor) -> Tensor:
    """The mean over all processes of training, so that a controller has one weight in all of them."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    value = value.clone()
    torch.distributed.all_reduce(value)
    return value / torch.distributed.get_world_size()


def _alike(value: Tensor, parameter: Tensor) -> Tensor:
    if not hasattr(parameter, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
