"""Where regularizers act on a model, and putting terms there."""

__all__ = ["join", "slot_of"]

from collections.abc import Sequence

from torch import nn

from support_tokens._lazy import install_hint
from support_tokens.errors import ArgumentError, UnsupportedModelError
from support_tokens.models import Decoder, find_decoder
from support_tokens.regularizers.base import Term
from support_tokens.regularizers.slot import SLOT, RegularizerSlot


def slot_of(model: nn.Module) -> tuple[Decoder, RegularizerSlot]:
    """Where regularizers act on a model, and the slot that holds them, not yet installed where it is new.

    Raises:
        UnsupportedModelError: No causal language model of transformers is inside.
    """
    for module in model.modules():
        if isinstance(slot := getattr(module, SLOT, None), RegularizerSlot):
            return slot.site, slot
    try:
        site = find_decoder(model)
    except ModuleNotFoundError as error:
        raise UnsupportedModelError(
            f"model must be a causal language model of transformers, which is not installed, received "
            f"{type(model).__name__}; run `{install_hint('transformers')}` and load one."
        ) from error
    return site, RegularizerSlot(site)


def join(model: nn.Module, site: Decoder, slot: RegularizerSlot, terms: Sequence[Term]) -> None:
    """Puts terms on a model; a new slot takes its place only now, so that a failure before leaves no trace.

    Raises:
        ArgumentError: The model is wrapped already, and a term has parameters.
    """
    if any(True for term in terms for _ in term.parameters()):
        _check_unwrapped(model)
    if not hasattr(site.causal_model, SLOT):
        slot.install()
    for term in terms:
        slot.add(term)
    slot.train(site.causal_model.training)


def _check_unwrapped(model: nn.Module) -> None:
    """Parameters added after wrapping are not synchronised across processes."""
    sharded = (type(p).__name__ == "DTensor" for p in model.parameters())
    wrappers = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")
    if any(sharded) or any(type(m).__name__ in wrappers for m in model.modules()):
        raise ArgumentError(
            "model must not yet be wrapped by DistributedDataParallel or sharded by FSDP, since the law's parameters "
            "would differ between processes, and it is; attach the barrier before accelerator.prepare, DDP or "
            "fully_shard."
        )
