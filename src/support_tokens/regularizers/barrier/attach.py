r"""One line that puts the log-barrier on a causal language model of transformers: `attach_barrier(model,
weight=0.02)`."""

__all__ = ["BarrierHandle", "attach_barrier", "attached_barriers"]

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn

from support_tokens._lazy import install_hint
from support_tokens.errors import ArgumentError, UnsupportedModelError
from support_tokens.law import EmbeddingPrior
from support_tokens.margins import view_sign
from support_tokens.regularizers.barrier.handle import BarrierHandle, checked_weight
from support_tokens.regularizers.barrier.penalties import PENALTIES, Weight
from support_tokens.regularizers.barrier.sources import SLOT, ModelSource, PriorSource


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
        penalty: `log`, `hinge` or `map`; see `per_token_penalty`. `log` is unbounded below: watch `handle.last`.
        view: `noise` ($J = I - D$) or `block` ($J = I + D$); the law has the noise view only.
        layer: Block, or several whose mean counts, for the source `model`; negative ones count from the last.
        positions: Number of positions of each sequence, drawn uniformly at every step: the penalty stays unbiased.
            `support`: those that a cheap screen takes for support tokens, a mean over the worst; see `screen`. None:
            all.
        candidates: Number of positions of each sequence for `support`.
        rank: R of the law; None: min(D, 32).
        noise_scale: $\sigma$ of the law, for the penalty `map`.
        target_margin: $m^*$ in nats, for the penalty `hinge`.
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
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8))
        >>> handle = attach_barrier(model, weight=0.02)
        >>> ids = torch.arange(8).unsqueeze(0)
        >>> loss = model.train()(input_ids=ids, labels=ids).loss
        >>> sorted(handle.last)
        ['ce', 'log_margin_mean', 'log_margin_min', 'negative_share', 'penalty']
        >>> handle.remove()
    """
    weight = checked_weight(weight)
    law_options = rank is not None or noise_scale != 1.0
    _check_options(source, penalty, view, layer, target_margin, noise_scale, law_options)
    _check_positions(positions, candidates)
    if rank is not None:
        _check_whole("rank", rank, 32)
    _check_whole("seed", seed, 0, least=None)
    causal_model, decoder = _causal_model(model)
    # Here and not above: it brings in the compiler of torch, which transformers has brought in by now.
    from support_tokens.regularizers.barrier.objective import BarrierSlot, BarrierTerm

    slot = getattr(causal_model, SLOT, None) or BarrierSlot(causal_model, decoder)
    if source == "model":
        layers = layer if isinstance(layer, tuple) else (layer,)
        chosen = ModelSource(causal_model, decoder, slot.watch, layers, view)
    else:
        _check_unwrapped(model)
        width = causal_model.config.get_text_config(decoder=True).hidden_size
        generator = torch.Generator().manual_seed(seed)
        law = EmbeddingPrior(width, min(width, 32) if rank is None else rank, noise_scale, generator=generator)
        # No parameter: the penalty has no normaliser that would keep a learned sigma finite, and FSDP shards no scalar.
        sigma = law.log_noise_scale.detach()
        del law.log_noise_scale
        law.register_buffer("log_noise_scale", sigma)
        law.to(_execution_device(causal_model.get_input_embeddings()))
        chosen = PriorSource(causal_model, decoder, slot.watch, law)
    if not hasattr(causal_model, SLOT):
        slot.install(causal_model, decoder)
    barrier = BarrierTerm(chosen, weight, penalty, target_margin, positions, candidates, seed)
    slot.add(barrier)
    slot.train(causal_model.training)
    return BarrierHandle(barrier, causal_model)


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
    slot = getattr(causal_model, SLOT, None)
    return [] if slot is None else [BarrierHandle(barrier, causal_model) for barrier in slot.barriers()]


def _causal_model(model: nn.Module) -> tuple[Any, nn.Module]:
    """The transformers model that computes the loss, under any wrapper, and its base model."""
    try:
        from transformers import PreTrainedModel
    except ModuleNotFoundError as error:
        raise UnsupportedModelError(
            f"model must be a causal language model of transformers, which is not installed, received "
            f"{type(model).__name__}; run `{install_hint('transformers')}` and load one."
        ) from error
    found = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if (
        found is None
        or found.base_model is found
        or found.get_output_embeddings() is None
        or not found.can_generate()
        or found.config.is_encoder_decoder
    ):
        raise UnsupportedModelError(
            f"model must be a causal language model of transformers with a language-model head, received "
            f"{type(model if found is None else found).__name__}; load it with AutoModelForCausalLM."
        )
    return found, found.base_model


def _check_unwrapped(model: nn.Module) -> None:
    """Parameters that join after these wrappers are kept equal between processes by nobody."""
    sharded = (type(p).__name__ == "DTensor" for p in model.parameters())
    wrappers = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")
    if any(sharded) or any(type(m).__name__ in wrappers for m in model.modules()):
        raise ArgumentError(
            "model must not yet be wrapped by DistributedDataParallel or sharded by FSDP, since the law's parameters "
            "would differ between processes, and it is; attach the barrier before accelerator.prepare, DDP or "
            "fully_shard."
        )


def _execution_device(embedding: nn.Module) -> torch.device | int | str:
    """Where the model computes embeddings; what accelerate offloads has its parameters elsewhere."""
    device = next(embedding.parameters()).device
    if device.type != "meta":
        return device
    device = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    if device is None:
        raise ArgumentError(
            "model must have its weights loaded, and its embeddings are on the device 'meta'; attach the barrier after "
            "the weights are there."
        )
    return device


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
