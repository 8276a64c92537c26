"""Hooks that record one layer in a forward pass; they pickle, deep-copy, and ignore recomputation."""

__all__ = ["LayerRecorder", "NormRecorder"]

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from support_tokens.errors import CaptureError, UnsupportedModelError
from support_tokens.models.architectures.table import Architecture, Norm
from support_tokens.models.architectures.weights import effective_weight, on_device, outlives_forward
from support_tokens.models.compat import is_patched, is_replica, recomputing


class _Recorder:
    """Holds tensors of an autograd graph, which are left out of copies and pickles."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def __getstate__(self) -> dict:
        return {**self.__dict__, "tensors": {}}


class NormRecorder(_Recorder):
    """Records the input and the gain of one norm.

    Args:
        norm: Its table entry.
        module: The norm of this layer.
        owner: The module that holds it, of the family's own class.

    Raises:
        UnsupportedModelError: The norm is neither of the family's file nor of torch.
    """

    def __init__(self, norm: Norm, module: nn.Module, owner: nn.Module) -> None:
        super().__init__()
        self.norm = _described(norm, module, owner)
        epsilon = self.norm.epsilon
        value = getattr(module, epsilon) if isinstance(epsilon, str) else epsilon
        self._epsilon = None if value is None else float(value)

    @property
    def epsilon(self) -> float:
        """Epsilon inside the root; torch takes that of the input's dtype where a norm has None."""
        return torch.finfo(self.tensors["input"].dtype).eps if self._epsilon is None else self._epsilon

    def after(self, module: nn.Module, args: tuple, _output: Tensor) -> None:
        """Forward hook of the norm, which runs after any pre-hook that computes its weight."""
        gain = getattr(module, "weight", None)
        if gain is not None:
            with on_device(module):
                gain = outlives_forward(module.weight)  # type: ignore[arg-type]
        if not recomputing():
            self.tensors["input"] = args[0]
            if gain is not None:
                self.tensors["gain"] = gain


class LayerRecorder(_Recorder):
    """Records query, key, value, mask, rotation and weights of one attention layer, and its norms.

    Args:
        architecture: The table of the model.
        block: The block that holds the layer.
        index: Index of the block.
    """

    def __init__(self, architecture: Architecture, block: nn.Module, index: int) -> None:
        super().__init__()
        self.architecture = architecture
        self.index = index
        attention = block.get_submodule(architecture.attention)
        self.norms: dict[str, NormRecorder] = {}
        for role in ("input_norm", "output_norm", "query_norm", "key_norm"):
            norm: Norm | None = getattr(architecture, role)
            home = attention if role in ("query_norm", "key_norm") else block
            if norm is None or (norm.switch and not getattr(home, norm.switch)):
                continue
            module = home.get_submodule(norm.path)
            if not isinstance(module, nn.Identity):
                self.norms[role] = NormRecorder(norm, module, home)
        self.query_factor = _number(attention, architecture.query_factor)
        self.value_factor = _number(attention, architecture.value_factor)
        self.residual_factor = _number(block, architecture.residual_factor)
        self.rotates = architecture.rotation is not None and _any_holds(attention, architecture.rotation_switch)
        self.options: dict[str, object] = {}
        self.grad_enabled = False
        self.paused = False

    @property
    def complete(self) -> bool:
        """Whether a forward pass has been recorded completely."""
        wanted = ("query", *self._projections)
        return all(name in self.tensors for name in wanted) and all(norm.tensors for norm in self.norms.values())

    def clear(self) -> None:
        """Drops the tensors of the last forward pass."""
        self.tensors = {}
        for recorder in self.norms.values():
            recorder.tensors = {}

    def attach(self, block: nn.Module) -> list[RemovableHandle]:
        """Registers hooks on the norms and the attention of `block`."""
        attention = block.get_submodule(self.architecture.attention)
        handles = [attention.register_forward_pre_hook(self.before, with_kwargs=True)]
        for role, recorder in self.norms.items():
            home = attention if role in ("query_norm", "key_norm") else block
            handles.append(home.get_submodule(recorder.norm.path).register_forward_hook(recorder.after))
        for path in self._projections:
            hook = partial(self.after_projection, path)
            handles.append(attention.get_submodule(path).register_forward_hook(hook, with_kwargs=True))
        return handles

    def before(self, attention: nn.Module, args: tuple, kwargs: dict) -> None:
        """Forward pre-hook of attention: records the rotation."""
        if self.paused or recomputing():
            return
        if "query" in self.tensors:
            raise CaptureError(
                f"layer {self.index} must run once in a forward pass, received a second call; use a model that does "
                "not repeat its layers."
            )
        if is_replica(attention):
            raise CaptureError(
                f"layer {self.index} must run in one process per device, received a thread of torch.nn.DataParallel; "
                "start with torchrun or accelerate launch."
            )
        cache = next((kwargs[name] for name in ("cache", "layer_past") if kwargs.get(name) is not None), None)
        if getattr(cache, "is_compileable", False):
            raise CaptureError(
                f"layer {self.index} must write into a cache without empty slots, received a {type(cache).__name__} "
                "of fixed size; use a DynamicCache."
            )
        if self.rotates and "position_embeddings" not in kwargs:
            raise CaptureError(
                f"layer {self.index} must receive position_embeddings, since it rotates queries, received none; "
                "use the class that transformers ships for this model_type."
            )
        if self.rotates and kwargs["position_embeddings"] is not None:
            self.tensors["cos"], self.tensors["sin"] = kwargs["position_embeddings"]

    def after_projection(self, path: str, layer: nn.Module, _args: tuple, kwargs: dict, _output: Tensor) -> None:
        """Forward hook of a projection: records the weight that it used, which its own pre-hooks may compute."""
        if self.paused:
            return
        if kwargs.get("adapter_names") is not None:
            raise CaptureError(
                f"layer {self.index} must use one adapter for the whole batch, received adapter_names; call "
                "set_adapter and run the rows of each adapter alone."
            )
        # A recomputation forms the sums with LoRA too, since it must save as many tensors as the pass that it repeats.
        weight = effective_weight(layer)
        if not recomputing():
            self.tensors[path] = weight

    @property
    def _projections(self) -> tuple[str, ...]:
        return (*self.architecture.projections, self.architecture.output)

    def on_attention(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict) -> None:
        """Records the arguments of the attention function."""
        if self.paused or recomputing():
            return
        if kwargs.get("position_bias") is not None or kwargs.get("is_causal") is False:
            raise CaptureError(
                f"layer {self.index} must use plain causal attention, received a position bias or attention in both "
                "directions; use a model and a call without."
            )
        self.tensors.update(query=query, key=key, value=value)
        if mask is not None:
            self.tensors["mask"] = mask
        if kwargs.get("s_aux") is not None:
            self.tensors["sinks"] = kwargs["s_aux"]
        self.options = {"scaling": kwargs.get("scaling"), "softcap": kwargs.get("softcap")}
        self.grad_enabled = torch.is_grad_enabled()


def _any_holds(module: nn.Module, switches: tuple[str, ...]) -> bool:
    holds = (
        not getattr(module, s.removeprefix("not ")) if s.startswith("not ") else getattr(module, s) for s in switches
    )
    return not switches or any(holds)


def _number(module: nn.Module, attribute: str) -> float:
    return float(getattr(module, attribute)) if attribute else 1.0


def _described(norm: Norm, module: nn.Module, owner: nn.Module) -> Norm:
    """The table entry, or that of a norm of torch which somebody put in the place of the family's."""
    kind = type(module)
    if not is_patched(module):
        for torch_norm in (nn.LayerNorm, nn.RMSNorm):
            if kind.forward is torch_norm.forward and len(module.normalized_shape) == 1:  # type: ignore[arg-type]
                return replace(norm, centered=torch_norm is nn.LayerNorm, gain_offset=0.0, epsilon="eps")
        if kind.__module__ == type(owner).__module__:
            return norm
    raise UnsupportedModelError(
        f"{type(owner).__name__} must have a norm of its own family, torch.nn.LayerNorm or torch.nn.RMSNorm over one "
        f"dimension at {norm.path!r}, received {kind.__module__}.{kind.__name__}"
        f"{' with a forward of its own' if is_patched(module) else ''}; use one of these."
    )
