"""The matrix a projection effectively multiplies by: plain, transposed, adapted by LoRA, or offloaded."""

__all__ = ["effective_weight", "on_device", "outlives_forward"]

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from support_tokens.errors import UnsupportedModelError
from support_tokens.margins.linalg import full_precision
from support_tokens.models.compat import is_offloaded, is_patched

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def effective_weight(layer: nn.Module) -> Tensor:
    r"""The matrix `(out, in)` of a linear layer, differentiable to every parameter in it.

    $$ W = W_0 + \sum_{\text{active adapters}} \frac{\alpha}{r} B A $$

    for a layer with LoRA adapters (dropout on their input is noise and left out), $W_0$ alone otherwise. Call it after
    the layer: pruning and hook-based norms compute the weight in a pre-hook of the layer.

    Args:
        layer: `torch.nn.Linear`, the `Conv1D` of transformers (stored transposed), or a LoRA layer of PEFT around one.

    Returns:
        `(out, in)` in the dtype of the layer, or float32 where a 16-bit weight carries an adapter.

    Raises:
        UnsupportedModelError: The layer is quantised, sharded, has a forward of its own, or is adapted in another way
            than by plain LoRA.

    Example:
        >>> effective_weight(nn.Linear(3, 2, bias=False)).shape
        torch.Size([2, 3])
    """
    if hasattr(layer, "base_layer"):
        return _lora_weight(layer)
    with on_device(layer):
        weight = getattr(layer, "weight", None)
        _check(layer, weight)
        return outlives_forward(weight.T if _stored_transposed(layer) else weight)  # type: ignore[union-attr]


def on_device(module: nn.Module):
    """Context in which the parameters of a module that accelerate keeps elsewhere are where it computes."""
    if not is_offloaded(module):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


def outlives_forward(tensor: Tensor) -> Tensor:
    """The tensor, copied where a wrapper of distributed training (FSDP) may free its memory after the forward pass."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return tensor.clone() if distributed else tensor


def _stored_transposed(layer: nn.Module) -> bool:
    return isinstance(layer, Conv1D)


def _lora_weight(layer: nn.Module) -> Tensor:
    weight = effective_weight(layer.base_layer)  # type: ignore[arg-type]
    kind = type(layer).__name__
    if getattr(layer, "disable_adapters", False) or getattr(layer, "merged", False):
        return weight
    lora_a = getattr(layer, "lora_A", None)
    if not isinstance(lora_a, nn.ModuleDict):
        raise UnsupportedModelError(
            f"{type(layer).__module__}.{kind} adapts a projection of attention in a way whose effective weight is not "
            "known; use LoRA, or merge the adapter first."
        )
    active = [name for name in layer.active_adapters if name in lora_a]  # type: ignore[union-attr]
    special = [name for name in active if name in getattr(layer, "lora_variant", {})]
    if special:
        raise UnsupportedModelError(
            f"adapter {special[0]!r} of {kind} is a variant of LoRA (DoRA, for one) whose effective weight is not the "
            "sum of base and product; use plain LoRA, or merge the adapter first."
        )
    for name in active:
        a, b = effective_weight(lora_a[name]), effective_weight(layer.lora_B[name])  # type: ignore[index]
        dtype = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
        with full_precision(a):
            weight = weight.to(dtype) + layer.scaling[name] * (b.to(dtype) @ a.to(dtype))  # type: ignore[index]
    return weight


def _check(layer: nn.Module, weight: object) -> None:
    kind = type(layer).__name__
    if not isinstance(weight, Tensor) or weight.dtype not in _FLOATING or weight.dim() != 2:
        raise UnsupportedModelError(
            f"{kind} holds a quantised or packed weight where a plain 16-, 32- or 64-bit matrix is required; load the "
            "model without quantisation."
        )
    if type(weight) not in (Tensor, nn.Parameter):
        raise UnsupportedModelError(
            f"{kind} holds its weight as {type(weight).__name__} where a whole, plain matrix is required; load the "
            "model without quantisation and without tensor parallelism."
        )
    if type(layer).forward not in (nn.Linear.forward, Conv1D.forward) or is_patched(layer):
        raise UnsupportedModelError(
            f"{kind} must compute a projection of attention by the forward of torch.nn.Linear, received a forward of "
            "its own; replace the layer by a torch.nn.Linear."
        )
    stateful = parametrize.is_parametrized(layer, "weight") and _has_buffers(layer)
    if stateful and layer.training:
        raise UnsupportedModelError(
            f"{kind} must have a weight that reading does not change, received a parametrization with buffers in "
            "training (spectral norm, for example); use torch.nn.utils.spectral_norm, or evaluation mode."
        )


def _has_buffers(layer: nn.Module) -> bool:
    return next(layer.get_submodule("parametrizations.weight").buffers(), None) is not None
