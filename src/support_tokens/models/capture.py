r"""Captures queries, keys and values of a Hugging Face model as attention states.

Transformers lets a program register an attention function. The one registered here records query, key, value and mask,
and calls the function that the model used before, so the outputs of the model do not change by a bit. Only captured
modules use it, through a configuration of their own: no other layer, model or global setting changes.
"""

__all__ = ["AttentionCapture", "capture_attention"]

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from support_tokens.errors import ArgumentError, CaptureError, UnsupportedModelError
from support_tokens.margins import AttentionState
from support_tokens.models.architectures import architecture_of, has_attention
from support_tokens.models.compat import attention_implementation, recomputing, set_attention_implementation
from support_tokens.models.hooks import decoder_blocks
from support_tokens.models.recorder import LayerRecorder
from support_tokens.models.states import attention_state

_IMPLEMENTATION = "support_tokens"
_TAP = "_support_tokens_tap"
# These two receive a mask that states which keys each query attends to; flash and flex kernels receive other arguments.
_READABLE = ("sdpa", "eager")


class AttentionCapture:
    r"""Captures attention at `layers` in the last forward pass of `model`, until it is removed.

    Its hooks pickle and deep-copy with the model; a copy belongs to the copied model and holds no tensors.
    Recomputation for gradient checkpointing is not recorded. Attention dropout is ignored: a state describes
    the map without dropout at the activations of the pass.

    Args:
        model: A causal language model of transformers; it may be wrapped by PEFT, DDP, FSDP or `torch.compile`.
        layers: Indices of blocks; negative ones count from the last.

    Raises:
        UnsupportedModelError: No table describes the model, or its attention is neither `sdpa` nor `eager`.
        ArgumentError: A layer does not exist, is given twice, or none is given.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8))
        >>> capture = AttentionCapture(model, layers=(0, -1))
        >>> _ = model(torch.zeros(1, 4, dtype=torch.long))
        >>> {layer: tuple(state.query.shape) for layer, state in capture.states().items()}
        {0: (1, 2, 4, 4), 1: (1, 2, 4, 4)}
        >>> capture.remove()
    """

    def __init__(self, model: nn.Module, layers: Sequence[int] = (0,)) -> None:
        self.architecture = architecture_of(model)
        self._name = type(model).__name__
        blocks = decoder_blocks(model)
        self.layers: tuple[int, ...] = _indices(layers, len(blocks))
        repeated = [index for index in self.layers if sum(block is blocks[index] for block in blocks) > 1]
        if repeated:
            raise UnsupportedModelError(
                f"layer {repeated[0]} of {self._name} must be a block that stands at one depth, received one at "
                "several; copy the block."
            )
        bare = [index for index in self.layers if not has_attention(self.architecture, blocks[index])]
        if bare:
            raise UnsupportedModelError(
                f"layer {bare[0]} of {self._name} has no attention where a layer with one is required; name one that "
                f"has a module {self.architecture.attention!r}."
            )
        self._recorders = {index: LayerRecorder(self.architecture, blocks[index], index) for index in self.layers}
        self._grad_outside = False
        attentions = {index: blocks[index].get_submodule(self.architecture.attention) for index in self.layers}
        for attention in attentions.values():
            _check_readable(self._name, attention)
        owner = next(m for m in model.modules() if any(child is blocks for child in m.children()))
        self._handles = [owner.register_forward_pre_hook(self._before)]
        self._attentions: dict[int, nn.Module] = {}
        try:
            for index, attention in attentions.items():
                self._handles += self._recorders[index].attach(blocks[index])
                _tap(attention, self._recorders[index])
                self._attentions[index] = attention
        except BaseException:
            self.remove()
            raise

    def _before(self, module: nn.Module, args: tuple) -> None:
        # Tensors of a pass that failed must not be taken for those of this one.
        if not recomputing():
            self.clear()
            self._grad_outside = torch.is_grad_enabled()

    def pause(self, paused: bool = True) -> None:
        """Stops recording forward passes, or starts again."""
        for recorder in self._recorders.values():
            recorder.paused = paused

    def clear(self) -> None:
        """Drops the tensors of the last forward pass and their part of the autograd graph."""
        for recorder in self._recorders.values():
            recorder.clear()

    def states(self, attention_mask: Tensor | None = None) -> dict[int, AttentionState]:
        """The states of the last forward pass by layer, differentiable with respect to parameters and activations.

        Args:
            attention_mask: The mask that the model received, 1 at real tokens, `(B, S)`; of a longer one the last S
                columns are used. None, or a mask of 4 dimensions: a position is valid if it attends to itself.

        Returns:
            Layer index to state, in float64 for a model in float64, else in float32.

        Raises:
            CaptureError: No pass was captured, it ran under reentrant checkpointing, or its mask is not causal.
            ArgumentError: `attention_mask` does not fit the captured tensors.
        """
        return {index: self._state(index, recorder, attention_mask) for index, recorder in self._recorders.items()}

    def _state(self, index: int, recorder: LayerRecorder, attention_mask: Tensor | None) -> AttentionState:
        where = f"layer {index} of {self._name}"
        if not recorder.complete:
            raise CaptureError(
                f"{where} must have run in a forward pass of the model, received none; call the model first, and call "
                "torch.compile after the capture began."
            )
        if self._grad_outside and not recorder.grad_enabled:
            raise CaptureError(
                f"{where} must run with gradients inside a pass with gradients, received one without, as in reentrant "
                "checkpointing; checkpoint with use_reentrant=False."
            )
        return attention_state(recorder, attention_mask, where)

    def remove(self) -> None:
        """Removes the hooks; states that were returned stay valid."""
        for handle in self._handles:
            handle.remove()
        for index, attention in self._attentions.items():
            _untap(attention, self._recorders[index])
        self._handles, self._attentions = [], {}


@contextmanager
def capture_attention(model: nn.Module, layers: Sequence[int] = (0,)) -> Iterator[AttentionCapture]:
    r"""Captures attention inside a `with` block; states can be read inside and after it.

    Args:
        model: A causal language model of transformers.
        layers: Indices of blocks; negative ones count from the last.

    Returns:
        Context with the `AttentionCapture`.

    Raises:
        UnsupportedModelError, ArgumentError: As `AttentionCapture`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from support_tokens.margins import state_margins
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8)).eval()
        >>> with torch.no_grad(), capture_attention(model, layers=(1,)) as captured:
        ...     _ = model(torch.arange(5).reshape(1, 5))
        >>> state_margins(captured.states()[1]).log_abs_det.shape
        torch.Size([1, 5])
    """
    captured = AttentionCapture(model, layers)
    try:
        yield captured
    finally:
        captured.remove()


class _Tap:
    """The former configuration, the eager function and the recorders of one captured attention module."""

    def __init__(self, attention: nn.Module) -> None:
        self.config = attention.config
        self.eager = _eager_function(attention)
        self.recorders: list[LayerRecorder] = []


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs):
    """The registered attention function: records its arguments and calls the former function."""
    tap = getattr(module, _TAP)
    # Read at every call, since the caller may set another implementation, which decides the form of the mask.
    implementation = attention_implementation(tap.config)
    if implementation not in _READABLE:
        _refuse(type(module).__name__, implementation)
    for recorder in tap.recorders:
        recorder.on_attention(query, key, value, attention_mask, kwargs)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, tap.eager)
    return function(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(_IMPLEMENTATION, _attention)


def _tap(attention: nn.Module, recorder: LayerRecorder) -> None:
    if not hasattr(attention, _TAP):
        own = copy.copy(attention.config)
        set_attention_implementation(own, _IMPLEMENTATION)
        setattr(attention, _TAP, _Tap(attention))
        attention.config = own
    getattr(attention, _TAP).recorders.append(recorder)


def _untap(attention: nn.Module, recorder: LayerRecorder) -> None:
    tap = getattr(attention, _TAP)
    tap.recorders.remove(recorder)
    if not tap.recorders:
        attention.config = tap.config
        delattr(attention, _TAP)


def _eager_function(attention: nn.Module):
    """The eager attention function of the model's own file, which no registry of transformers holds."""
    for cls in type(attention).__mro__:
        function = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
        if function is not None:
            return function
    raise UnsupportedModelError(
        f"{type(attention).__name__} must use the attention interface of transformers, received a class that does "
        "not; use the class that transformers ships for this model_type."
    )


def _check_readable(name: str, attention: nn.Module) -> None:
    config = getattr(attention, _TAP).config if hasattr(attention, _TAP) else attention.config
    implementation = attention_implementation(config)
    if implementation not in _READABLE:
        _refuse(name, implementation)
    if not getattr(attention, "is_causal", True):
        raise UnsupportedModelError(
            f"{name} must use causal attention, received attention in both directions; use a causal language model."
        )


def _refuse(name: str, implementation: str) -> None:
    raise UnsupportedModelError(
        f"{name} must use the attention implementation 'sdpa' or 'eager', received {implementation!r}; load the model "
        "with attn_implementation='sdpa'."
    )


def _indices(layers: Sequence[int], depth: int) -> tuple[int, ...]:
    found = []
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int) or not -depth <= layer < depth:
            raise ArgumentError(
                f"layers must be integers from {-depth} to {depth - 1}, received {layer!r}; pass indices of blocks."
            )
        found.append(layer % depth)
    if not found or len(set(found)) < len(found):
        raise ArgumentError(f"layers must name one block or more, each once, received {tuple(layers)}; pass each once.")
    return tuple(found)
