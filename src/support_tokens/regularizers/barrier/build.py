r"""The term of a barrier from its options."""

__all__ = ["barrier_term"]

import math
from numbers import Integral, Real

import torch

from support_tokens.errors import ArgumentError
from support_tokens.law import EmbeddingPrior
from support_tokens.margins import view_sign
from support_tokens.models import Decoder, execution_device, text_config
from support_tokens.regularizers.barrier.penalties import PENALTIES, Weight
from support_tokens.regularizers.barrier.sources import AttentionSource, PriorSource
from support_tokens.regularizers.barrier.term import BarrierTerm
from support_tokens.regularizers.handle import checked_weight
from support_tokens.regularizers.watcher import ForwardWatcher


def barrier_term(
    site: Decoder,
    watcher: ForwardWatcher,
    weight: Weight,
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
    at: str = "clean",
    name: str = "barrier",
) -> BarrierTerm:
    """The term of a barrier, not yet on its model.

    `site` and `watcher` are those of the model, `at` says which embeddings the law reads (`clean`, `noisy` or
    `adversarial`), `name` stands before its figures; the other arguments, and errors, are those of `attach_barrier`.
    """
    weight = checked_weight(weight)
    law_options = rank is not None or noise_scale != 1.0
    _check_options(source, penalty, view, layer, target_margin, noise_scale, law_options)
    _check_positions(positions, candidates)
    _check_whole("every", every, 4)
    if rank is not None:
        _check_whole("rank", rank, 32)
    _check_whole("seed", seed, 0, least=None)
    if source == "model":
        layers = layer if isinstance(layer, tuple) else (layer,)
        chosen: PriorSource | AttentionSource = AttentionSource(site, watcher, layers, view)
    else:
        width = text_config(site.causal_model).hidden_size
        generator = torch.Generator().manual_seed(seed)
        law = EmbeddingPrior(width, min(width, 32) if rank is None else rank, noise_scale, generator=generator)
        # No parameter: the penalty has no normaliser that would keep a learned sigma finite, and FSDP shards no scalar.
        sigma = law.log_noise_scale.detach()
        del law.log_noise_scale
        law.register_buffer("log_noise_scale", sigma)
        law.to(execution_device(site.embedding))
        chosen = PriorSource(site, law, at)
    return BarrierTerm(chosen, weight, penalty, target_margin, positions, candidates, seed, every, name)


def _check_options(
    source: str,
    penalty: str,
    view: str,
    layer: object,
    target_margin: float,
    noise_scale: float,
    law_options: bool,
) -> None:
    view_sign(view)
    if source not in ("prior", "model"):
        raise ArgumentError(f"source must be 'prior' or 'model', received {source!r}; choose one of the two.")
    if penalty not in PENALTIES:
        raise ArgumentError(f"penalty must be one of {', '.join(PENALTIES)}, received {penalty!r}; choose one of them.")
    if source == "prior" and (view != "noise" or layer != 0):
        raise ArgumentError(
            f"the law acts on the noise view of layer 0, received view={view!r}, layer={layer}; leave both at their "
            f"defaults, or use source='model'."
        )
    if source == "model" and penalty == "map":
        raise ArgumentError(
            "the penalty 'map' needs the squared error of a law, received source='model', which has none; use 'log' or "
            "'hinge', or source='prior'."
        )
    if source == "model" and law_options:
        raise ArgumentError("rank and noise_scale belong to the law of source='prior', received source='model'.")
    if not isinstance(target_margin, Real) or not math.isfinite(target_margin):
        raise ArgumentError(
            f"target_margin must be a finite number of nats, received {target_margin!r}; pass 0.0, say."
        )
    if not isinstance(noise_scale, Real):
        raise ArgumentError(f"noise_scale must be a positive finite number, received {noise_scale!r}; pass 1.0, say.")
    if target_margin and penalty != "hinge":
        raise ArgumentError(
            f"target_margin belongs to the penalty 'hinge', received {target_margin} with {penalty!r}; use 'hinge'."
        )


def _check_positions(positions: object, candidates: object) -> None:
    whole = isinstance(positions, int) and not isinstance(positions, bool) and positions >= 1
    if not (positions is None or positions == "support" or whole):
        raise ArgumentError(
            f"positions must be at least 1, or 'support', received {positions!r}; leave it None for all positions."
        )
    _check_whole("candidates", candidates, 16)


def _check_whole(name: str, value: object, example: int, least: int | None = 1) -> None:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or (least is not None and value < least):  # type: ignore[operator]
        required = "a whole number" if least is None else f"a whole number of at least {least}"
        raise ArgumentError(f"{name} must be {required}, received {value!r}; pass {example}, say.")
