"""Hooks that record one layer in a forward pass; they pickle, deep-copy, and ignore recomputation."""

__all__ = ["LayerRecorder", "NormRecorder", "recomputing"]

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from support_tokens.errors import CaptureError
from support_tokens.models.architectures.table import Architecture, Norm
from support_tokens.models.architectures.weights import effective_weight, on_device, outlives_forward
from support_tokens.models.compat import inside_backward, is_replica


def recomputing() -> bool:
    """Whether this runs inside a backward pass, where gradient checkpointing repeats an earlier forward pass."""
    # The compiler plans recomputation itself, without running Python.
    return not torch.compiler.is_compiling() and inside_backward()


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
    """

    def __init__(self, norm: Norm, module: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        epsilon = norm.epsilon
        self.epsilon = float(getattr(module, epsilon) if isinstance(epsilon, str) else epsilon)

    def before(self, module: nn.Module, args: tuple) -> None:
        """Forward pre-hook of the norm."""
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
            if norm is not None and (not norm.switch or getattr(home, norm.switch)):
                self.norms[role] = NormRecorder(norm, home.get_submodule(norm.path))
        self.query_factor = _number(attention, architecture.query_factor)
        self.residual_factor = _number(block, architecture.residual_factor)
        switch = architecture.rotation_switch
        self.rotates = architecture.rotation is not None and (not switch or bool(getattr(attention, switch)))
        self.options: dict[str, object] = {}
        self.grad_enabled = False
        self.paused = False

    @property
    def complete(self) -> bool:
        """Whether a forward pass has been recorded completely."""
        wanted = ("query", "cos", "sin") if self.rotates else ("query",)
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
            handles.append(home.get_submodule(recorder.norm.path).register_forward_pre_hook(recorder.before))
        return handles

    def before(self, attention: nn.Module, args: tuple, kwargs: dict) -> None:
        """Forward pre-hook of attention: records weights and rotation, which may exist only while it runs."""
        if self.paused:
            return
        # A recomputation forms the sums with LoRA too, since it must save as many tensors as the pass that it repeats.
        weights = {path: effective_weight(attention.get_submodule(path)) for path in self._projections}
        if recomputing():
            return
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
        self.tensors.update(weights)
        if self.rotates and kwargs.get("position_embeddings") is not None:
            self.tensors["cos"], self.tensors["sin"] = kwargs["position_embeddings"]

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


def _number(module: nn.Module, attribute: str) -> float:
    return float(getattr(module, attribute)) if attribute else 1.0
