"""Arms with a log-barrier: the paper's, one whose weight is steered, and one that no change of scale can satisfy."""

__all__ = ["Barrier", "HeldMargin", "InvariantBarrier", "attach_repulsive", "repulsive_state"]

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import torch as safetensors
from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.files import write_bytes
from support_tokens.margins import AttentionState, state_from_weights, state_margins
from support_tokens.margins.linalg import full_precision
from support_tokens.models import decoder_blocks, hook_embeddings
from support_tokens.regularizers.barrier.attach import BarrierHandle, attach_barrier
from support_tokens.regularizers.barrier.callback import BarrierCallback
from support_tokens.regularizers.barrier.penalties import MarginController, WarmupSchedule, Weight, sample_positions
from support_tokens.regularizers.base import Attachment, option, require


@dataclass(frozen=True)
class Barrier:
    r"""Cross-entropy plus a barrier: $L = CE + \lambda\, \mathrm{mean}_t\, p_t$, with $p_t = -\log|\det J_t|$ (`log`).

    Under the source `prior` the law's own $W_Q, W_K$ learn with the model (theory, section 4).

    Args:
        weight: $\lambda$, nats per nat.
        penalty: `log`, `hinge` or `map`; see `support_tokens.regularizers.barrier.penalties.per_token_penalty`.
        source: `prior`: the paper's law on the embeddings; `model`: the attention of block 0.
        positions: Positions of each sequence that count in a step, drawn anew; 0: all.
        target_margin: $m^*$ in nats, for `hinge`.
        view: `noise` or `block`; the law has the noise view only.
        layers: The first so many blocks, whose mean counts, for the source `model`.
        warmup: Steps over which the weight rises from 0.
        fade: Step at which the weight has come down to 0 again, along a cosine; 0: it stays.

    Raises:
        ArgumentError: An option out of its bounds, or two that do not go together.
    """

    name: ClassVar[str] = "barrier"
    summary: ClassVar[str] = "cross-entropy and log-barrier of the embedding law"

    weight: float = option(0.02, "weight of the barrier in the loss")
    penalty: str = option("log", "log, hinge or map", choices=("log", "hinge", "map"))
    source: str = option("prior", "prior: the paper's law; model: attention of block 0", choices=("prior", "model"))
    positions: int = option(0, "positions of a sequence that count in a step; 0: all")
    target_margin: float = option(0.0, "log margin in nats below which the hinge acts")
    view: str = option("noise", "noise: x - mu(x); block: x + mu(x), source=model only", choices=("noise", "block"))
    layers: int = option(1, "the first so many blocks, source=model only", least=1)
    warmup: int = option(0, "steps over which the weight rises from 0")
    fade: int = option(0, "step at which the weight has come down to 0 again; 0: it stays")

    def __post_init__(self):
        require(self)
        if self.source == "prior" and (self.view, self.layers) != ("noise", 1):
            raise ArgumentError(
                f"arm 'barrier': view and layers go with source=model, received view={self.view!r} and "
                f"layers={self.layers} with source='prior'; add source=model."
            )
        if self.fade and self.fade <= self.warmup:
            raise ArgumentError(
                f"arm 'barrier': fade must come after warmup, received fade={self.fade} and warmup={self.warmup}."
            )
        if self.penalty == "map" and self.source == "model":
            raise ArgumentError("arm 'barrier': the penalty map needs the law, source=prior, received source='model'.")
        if self.target_margin and self.penalty != "hinge":
            raise ArgumentError(
                f"arm 'barrier': target_margin goes with penalty=hinge, received penalty={self.penalty!r}; "
                "leave one out."
            )

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """Registers the law in the model, if any, and adds the penalty to its loss in train mode.

        Raises:
            ArgumentError: The model has fewer blocks than `layers`.
        """
        if self.layers > (depth := len(decoder_blocks(model))):
            raise ArgumentError(
                f"arm 'barrier': layers must be at most {depth}, the blocks of the model, received {self.layers}; pass "
                "fewer layers."
            )
        weight: Weight = self.weight
        if self.warmup or self.fade:
            final = 0.0 if self.fade else None
            weight = WarmupSchedule(self.weight, warmup=self.warmup, total=self.fade or None, final=final)
        handle = attach_barrier(
            model,
            weight,
            source=self.source,
            penalty=self.penalty,
            view=self.view,
            layer=tuple(range(self.layers)) if self.layers > 1 else 0,
            positions=self.positions or None,
            target_margin=self.target_margin,
            seed=seed,
        )
        return _attachment(handle)


@dataclass(frozen=True)
class HeldMargin:
    r"""Log-barrier whose weight is steered so that the mean log margin stays at a target: dual ascent on
    $\mathbb{E} \log|\det J_t| \ge m^*$.

    Args:
        target: $m^*$ in nats.
        rate: Step of the dual ascent.
        source: As in `Barrier`.
    """

    name: ClassVar[str] = "hold"
    summary: ClassVar[str] = "cross-entropy and a barrier steered to a target margin"

    target: float = option(1.0, "mean log margin to hold, in nats", least=-1e3)
    rate: float = option(0.01, "step of the dual ascent, per optimiser step")
    source: str = option("prior", "prior: the paper's law; model: attention of block 0", choices=("prior", "model"))

    def __post_init__(self):
        require(self)

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """As `Barrier.attach`, with a controller in place of the weight."""
        controller = MarginController(self.target, rate=self.rate)
        return _attachment(attach_barrier(model, controller, source=self.source, seed=seed))


@dataclass(frozen=True)
class InvariantBarrier:
    r"""A barrier that no change of scale can satisfy, on RMS-normalised embeddings with a fixed repulsive coupling.

    $$ L = CE - \lambda\, \mathrm{mean}_t \log\det(I + c\, \Sigma_t), \qquad \hat x_t = x_t / \mathrm{rms}(x_t), $$

    with $\Sigma_t$ the covariance of the past $\hat x_s$ under $\alpha_{ts} \propto \exp(-c\, \hat x_t^T \hat x_s)$:
    the paper's law with the coupling $A = -c I$. The determinant is never below one, so the map never folds, and
    $\mathrm{tr}\, \Sigma_t \le D$ bounds the gain, which growing embeddings do not change.

    Args:
        weight: $\lambda$.
        coupling: $c$.
        positions: Positions of each sequence that count in a step, drawn anew; 0: all.
    """

    name: ClassVar[str] = "invariant"
    summary: ClassVar[str] = "cross-entropy and a barrier on embeddings of unit RMS"

    weight: float = option(0.02, "weight of the barrier in the loss")
    coupling: float = option(0.1, "strength c of the fixed repulsive coupling")
    positions: int = option(32, "positions of a sequence that count in a step; 0: all")

    def __post_init__(self):
        require(self)

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """Keeps the embeddings of each forward pass in train mode for the penalty."""

        def negative_margin(state: AttentionState, valid: Tensor) -> tuple[Tensor, Tensor]:
            drawn = sample_positions(valid, self.positions) if self.positions else None
            margins = state_margins(state, positions=drawn)
            return -margins.log_abs_det, margins.valid

        return attach_repulsive(model, self.weight, self.coupling, negative_margin)


def attach_repulsive(
    model: nn.Module,
    weight: float,
    coupling: float,
    per_token: Callable[[AttentionState, Tensor], tuple[Tensor, Tensor]],
) -> Attachment:
    """Adds `weight` times the mean of a penalty of `repulsive_state` on the embeddings of each pass in train mode.

    Args:
        model: A causal language model of transformers.
        weight: Weight of the mean in the loss.
        coupling: As in `repulsive_state`.
        per_token: From a state and its valid positions to penalties and to which of them count, both `(B, n)`.
    """
    seen: list[Tensor] = []

    def keep(x: Tensor) -> None:
        if model.training and torch.is_grad_enabled():
            seen[:] = [x]

    def penalty(_model: nn.Module, inputs: Mapping[str, Tensor], _outputs: Any) -> Tensor:
        x = seen.pop()
        mask = inputs.get("attention_mask")
        valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask.bool()
        with full_precision(x):
            value, kept = per_token(repulsive_state(x.float(), coupling, valid), valid)
        return weight * value.masked_fill(~kept, 0.0).sum() / kept.sum().clamp_min(1)

    return Attachment(hook_embeddings(model, keep).remove, penalty=penalty)


def repulsive_state(x: Tensor, coupling: float, valid: Tensor) -> AttentionState:
    r"""Attention of the law with coupling $-c I$ on embeddings of unit RMS at each position.

    Args:
        x: `(B, T, D)`, float32 or better.
        coupling: $c$, at least 0.
        valid: `(B, T)`, False at padding.

    Example:
        >>> state = repulsive_state(torch.randn(2, 5, 4), 0.1, torch.ones(2, 5, dtype=torch.bool))
        >>> bool((state_margins(state).log_abs_det >= 0).all())
        True
    """
    unit = x * x.square().mean(-1, keepdim=True).clamp_min(1e-12).rsqrt()
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).unsqueeze(0)
    return state_from_weights(unit, -identity, identity, scale=coupling, key_padding_mask=~valid)


def _attachment(handle: BarrierHandle) -> Attachment:
    def save(folder: Path) -> None:
        weights = {key: value.detach().cpu().contiguous() for key, value in handle.state_dict().items()}
        write_bytes(folder / "barrier.safetensors", safetensors.save(weights))

    return Attachment(handle.remove, (BarrierCallback(handle),), save)
