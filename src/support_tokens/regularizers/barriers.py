"""Regularizers with a log-barrier: the paper's, one whose weight is steered, and one that no change of scale can
satisfy."""

__all__ = ["Barrier", "ScaleFreeBarrier", "TargetMargin", "repulsive_state"]

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from support_tokens.errors import ArgumentError
from support_tokens.margins import AttentionState, state_from_weights, state_margins
from support_tokens.margins.linalg import full_precision
from support_tokens.models import Decoder
from support_tokens.regularizers.barrier.build import barrier_term
from support_tokens.regularizers.barrier.penalties import MarginController, WarmupSchedule, Weight, sample_positions
from support_tokens.regularizers.barrier.sources import check_embeddings_train
from support_tokens.regularizers.base import AT, Regularizer, Term
from support_tokens.regularizers.options import option
from support_tokens.regularizers.passes import Pass
from support_tokens.regularizers.watcher import ForwardWatcher


@dataclass(frozen=True)
class Barrier(Regularizer):
    r"""Cross-entropy plus a barrier: $L = CE + \lambda\, \mathrm{mean}_t\, p_t$, with $p_t = -\log|\det J_t|$ (`log`).

    Under the source `prior` the law's own $W_Q, W_K$ learn with the model (theory, section 4).

    Args:
        weight: $\lambda$, nats per nat.
        penalty: `log`, `hinge` or `map`; see `margin_penalty`.
        source: `prior`: the paper's law on the embeddings; `model`: the attention of the model's own blocks.
        positions: Positions of each sequence that count in a step, drawn anew; 0: all.
        target_margin: $m^*$ in nats, for `hinge`.
        view: `noise` or `block`; the law has the noise view only.
        layer: First block, for the source `model`.
        layers: Number of blocks from there on, whose mean counts, for the source `model`.
        warmup: Steps over which the weight rises from 0.
        at: Which embeddings the law reads: before training noise, after it, or those of the adversary beside it.
        every: The penalty counts at every so many steps, with so many times its weight.

    Raises:
        ArgumentError: An option out of its bounds, or two that do not go together.
    """

    name: ClassVar[str] = "barrier"
    kind: ClassVar = "law"
    summary: ClassVar[str] = "cross-entropy and log-barrier of the embedding law"

    weight: float = option(0.02, "weight of the barrier in the loss")
    penalty: str = option("log", "log, hinge or map", choices=("log", "hinge", "map"))
    source: str = option("prior", "prior: the paper's law; model: the model's attention", choices=("prior", "model"))
    positions: int = option(0, "positions of a sequence that count in a step; 0: all")
    target_margin: float = option(0.0, "log margin in nats below which the hinge acts", least=-1e3)
    view: str = option("noise", "noise: x - mu(x); block: x + mu(x), source=model only", choices=("noise", "block"))
    layer: int = option(0, "first block, source=model only")
    layers: int = option(1, "number of blocks from there on, source=model only", least=1)
    warmup: int = option(0, "steps over which the weight rises from 0")
    at: str = option("clean", "embeddings that the law reads: clean, noisy or adversarial", choices=AT)
    every: int = option(1, "count at every so many steps", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == "prior" and (self.view, self.layer, self.layers) != ("noise", 0, 1):
            raise ArgumentError(
                f"regularizer 'barrier': view, layer and layers go with source=model, received view={self.view!r}, "
                f"layer={self.layer} and layers={self.layers} with source='prior'; add source=model."
            )
        if self.source == "model" and self.at != "clean":
            raise ArgumentError(
                f"regularizer 'barrier': at goes with source=prior, received at={self.at!r} with source='model', which "
                "reads the attention of the pass itself; leave at out."
            )
        if self.penalty == "map" and self.source == "model":
            raise ArgumentError(
                "regularizer 'barrier': the penalty map needs the law, source=prior, received source='model'."
            )
        if self.target_margin and self.penalty != "hinge":
            raise ArgumentError(
                f"regularizer 'barrier': target_margin goes with penalty=hinge, received penalty={self.penalty!r}; "
                "leave one out."
            )

    def bind(self, site: Decoder, watcher: ForwardWatcher, seed: int) -> Term:
        """See `Regularizer.bind`.

        Raises:
            ArgumentError: The model has fewer blocks than are asked for.
        """
        last, depth = self.layer + self.layers, len(site.blocks)
        if last > depth:
            raise ArgumentError(
                f"regularizer 'barrier': layer + layers must be at most {depth}, the blocks of the model, received "
                f"{self.layer} + {self.layers}; pass fewer layers."
            )
        weight: Weight = WarmupSchedule(self.weight, warmup=self.warmup) if self.warmup else self.weight
        return barrier_term(
            site,
            watcher,
            weight,
            source=self.source,
            penalty=self.penalty,
            view=self.view,
            layer=tuple(range(self.layer, last)) if self.source == "model" else 0,
            positions=self.positions or None,
            target_margin=self.target_margin,
            every=self.every,
            seed=seed,
            at=self.at,
        )


@dataclass(frozen=True)
class TargetMargin(Regularizer):
    r"""Log-barrier whose weight is steered so that the mean log margin stays at a target: dual ascent on
    $\mathbb{E} \log|\det J_t| \ge m^*$.

    Args:
        target: $m^*$ in nats.
        rate: Step of the dual ascent.
        source: As in `Barrier`.
    """

    name: ClassVar[str] = "target-margin"
    kind: ClassVar = "law"
    summary: ClassVar[str] = "cross-entropy and a barrier steered to a target margin"

    target: float = option(1.0, "mean log margin to hold, in nats", least=-1e3)
    rate: float = option(0.01, "step of the dual ascent, per loss")
    source: str = option("prior", "prior: the paper's law; model: attention of block 0", choices=("prior", "model"))

    def bind(self, site: Decoder, watcher: ForwardWatcher, seed: int) -> Term:
        """See `Regularizer.bind`."""
        controller = MarginController(self.target, rate=self.rate)
        return barrier_term(site, watcher, controller, source=self.source, seed=seed, name=self.name)


@dataclass(frozen=True)
class ScaleFreeBarrier(Regularizer):
    r"""A barrier that no change of scale can satisfy, on RMS-normalised embeddings with a fixed repulsive coupling.

    $$ L = CE - \lambda\, \mathrm{mean}_t \tfrac1D \log\det(I + c\, \Sigma_t), \qquad
       \hat x_t = x_t / \mathrm{rms}(x_t), $$

    with $\Sigma_t$ the covariance of the past $\hat x_s$ under $\alpha_{ts} \propto \exp(-c\, \hat x_t^T \hat x_s)$:
    the paper's law with the coupling $A = -c I$. The determinant is never below one, so the map never folds, and
    $\mathrm{tr}\, \Sigma_t \le D$ bounds the gain, which growing embeddings do not change. It is stated per dimension,
    so that a weight means the same at every width.

    Args:
        weight: $\lambda$, nats per nat and dimension.
        coupling: $c\sqrt D$, as in `Spread`.
        positions: Positions of each sequence that count in a step, drawn anew; 0: all.
        at: As in `Barrier`.
        every: The penalty counts at every so many steps, with so many times its weight.
    """

    name: ClassVar[str] = "scale-free"
    kind: ClassVar = "law"
    summary: ClassVar[str] = "cross-entropy and a barrier on embeddings of unit RMS"

    weight: float = option(1.0, "weight of the barrier in the loss, per dimension")
    coupling: float = option(0.8, "standard deviation of the attention scores of the law")
    positions: int = option(32, "positions of a sequence that count in a step; 0: all")
    at: str = option("clean", "embeddings that it reads: clean, noisy or adversarial", choices=AT)
    every: int = option(1, "count at every so many steps", least=1)

    def bind(self, site: Decoder, watcher: ForwardWatcher, seed: int) -> Term:
        """See `Regularizer.bind`.

        Raises:
            CaptureError: No parameter that shapes the embeddings is trained.
        """
        check_embeddings_train(site, None, self.name)
        return _ScaleFreeTerm(self, site, seed)


class _ScaleFreeTerm(Term):
    def __init__(self, barrier: ScaleFreeBarrier, site: Decoder, seed: int) -> None:
        super().__init__(barrier.name, barrier.weight, barrier.every)
        self.coupling, self.positions, self.at = barrier.coupling, barrier.positions, barrier.at
        self.generator = torch.Generator().manual_seed(seed)
        self._site = (site,)

    def penalty(self, forward: Pass) -> Tensor:
        """Minus the mean of log det per dimension."""
        x = forward.embeddings_at(self.at)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            check_embeddings_train(self._site[0], x, self.name)
        valid = forward.valid(x)
        with full_precision(x):
            state = repulsive_state(x, self.coupling / x.shape[-1] ** 0.5, valid, segments=forward.segments(x.shape[0]))
            drawn = self._draw(valid) if self.positions else None  # type: ignore[call-arg,arg-type]
            margins = state_margins(state, positions=drawn)  # type: ignore[arg-type]
            return forward.mean(-margins.log_abs_det / x.shape[-1], margins.valid, valid)

    @torch.compiler.disable
    def _draw(self, valid: Tensor) -> Tensor:
        generator = self.generator
        if not torch.is_grad_enabled():
            generator = torch.Generator()
            generator.set_state(self.generator.get_state())
        return sample_positions(valid, self.positions, generator)

    def tensors(self) -> dict[str, Tensor]:
        """State of the position sampler."""
        return {"positions.rng": self.generator.get_state()}

    def load(self, tensors) -> None:
        """Takes up the state of the position sampler."""
        self.generator.set_state(tensors["positions.rng"].cpu())


def repulsive_state(x: Tensor, coupling: float, valid: Tensor, segments: Tensor | None = None) -> AttentionState:
    r"""Attention of the law with coupling $-c I$ on embeddings of unit RMS at each position.

    Args:
        x: `(B, T, D)`; 16-bit embeddings are read in float32.
        coupling: $c$, at least 0.
        valid: `(B, T)`, False at padding.
        segments: Document of each token `(B, T)`; None: one document a sequence.

    Example:
        >>> state = repulsive_state(torch.randn(2, 5, 4), 0.1, torch.ones(2, 5, dtype=torch.bool))
        >>> bool((state_margins(state).log_abs_det >= 0).all())
        True
    """
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    unit = x * x.square().mean(-1, keepdim=True).clamp_min(1e-12).rsqrt()
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).unsqueeze(0)
    return state_from_weights(unit, -identity, identity, scale=coupling, key_padding_mask=~valid, segments=segments)
