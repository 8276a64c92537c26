r"""What a barrier acts on: the paper's law with a coupling of its own, or the model's own attention.

A source sees every forward pass of its model through a `PassWatch` and afterwards gives margins. It is a module of the
model, so that the optimiser sees its parameters and `deepcopy` and `to` reach it; what it holds of a forward pass never
leaves the process.
"""

__all__ = ["SLOT", "ModelSource", "PassWatch", "PriorSource"]

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from support_tokens.errors import CaptureError
from support_tokens.law import EmbeddingPrior
from support_tokens.margins import AttentionState, gather_positions, moments
from support_tokens.margins.linalg import full_precision
from support_tokens.models import decoder_blocks, hook_embeddings, trains_before

SLOT = "support_tokens"
"""Attribute of a causal language model under which its barriers sit."""


class Listener(Protocol):
    """What a watch tells: a pass begins, and whether it is one to look at; a pass ended."""

    def begin(self, look: bool) -> None: ...

    def end(self) -> None: ...


class PassWatch:
    """Sees every call of a decoder: which tokens are real, which document each belongs to, when it begins and ends.

    Args:
        decoder: The base model (without head) of a causal language model; it is called through `__call__`, once a
            forward pass, under every wrapper.
        choose: Called at the beginning of a pass; says whether the listeners look at it.
    """

    def __init__(self, decoder: nn.Module, choose: Callable[[nn.Module], bool]) -> None:
        self.listeners: list[Listener] = []
        self.attention_mask: Tensor | None = None
        self.position_ids: Tensor | None = None
        self.seen = False
        self.looking = False
        self._mask_kind = ""
        self._choose = choose
        self._names = tuple(inspect.signature(decoder.forward).parameters)
        self._hooks: list[RemovableHandle] = []

    def start(self, decoder: nn.Module) -> None:
        """Begin to watch."""
        self._hooks = [
            decoder.register_forward_pre_hook(self._before, with_kwargs=True),
            decoder.register_forward_hook(self._after),
        ]

    def _before(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        self.seen, self.looking = True, self._choose(decoder)
        for listener in self.listeners:
            listener.begin(self.looking)
        if not self.looking:
            return
        called = {**dict(zip(self._names, args, strict=False)), **kwargs}
        mask = called.get("attention_mask")
        self.attention_mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        self._mask_kind = "" if mask is self.attention_mask else type(mask).__name__
        self.position_ids = called.get("position_ids")

    def _after(self, _decoder: nn.Module, _args: tuple, _output: object) -> None:
        for listener in self.listeners:
            listener.end()

    def padding_mask(self, length: int) -> Tensor | None:
        """The mask `(B, length)` of the last pass, non-zero at real tokens, without what it says of a cache; or None.

        Raises:
            CaptureError: The model received a mask of another kind.
        """
        if self._mask_kind:
            raise CaptureError(
                f"the model received its attention mask as a {self._mask_kind} that is not of shape (B, T), which the "
                "barrier of the law cannot read; pass attention_mask (B, T), or position_ids that restart at every "
                "document."
            )
        return None if self.attention_mask is None else self.attention_mask[:, -length:]

    def segments(self, batch: int) -> Tensor | None:
        """Document of each token `(batch, T)` where positions restart within a sequence that has no padding mask; else
        None."""
        if self.attention_mask is not None or self.position_ids is None or self.position_ids.dim() != 2:
            return None
        restart = self.position_ids.diff(dim=-1, prepend=self.position_ids[..., :1] - 1) != 1
        return restart.cumsum(-1).expand(batch, -1)

    def stop(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()

    def __deepcopy__(self, memo: dict) -> "PassWatch":
        return _copy_without(self, memo)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "attention_mask": None, "position_ids": None}


class PriorSource(nn.Module):
    """The paper's law on the embeddings that enter the first block; its W_Q and W_K learn with the model.

    Args:
        model: A causal language model of transformers.
        decoder: Its base model, without head.
        watch: Tells of the calls of `decoder`.
        law: The law.
    """

    view = "noise"

    def __init__(self, model: nn.Module, decoder: nn.Module, watch: PassWatch, law: EmbeddingPrior) -> None:
        super().__init__()
        self.law = law
        self._watch = watch
        self._hook = hook_embeddings(model, self._listen)
        # In a tuple, since a module held as an attribute would be registered a second time.
        self._site = (decoder, decoder_blocks(model))
        self._x: Tensor | None = None
        self._expecting = False
        self._warned = False

    @property
    def waiting(self) -> bool:
        """Whether a forward pass was seen and not yet forgotten."""
        return self._x is not None

    def begin(self, look: bool) -> None:
        """A forward pass begins."""
        # Gradient checkpointing calls the blocks again in the backward pass, without the decoder; what they see there
        # is no new pass.
        self._expecting = look
        if look:
            self._x = None

    def end(self) -> None:
        """A forward pass ended."""
        self._expecting = False

    def _listen(self, x: Tensor) -> None:
        if self._expecting:
            self._expecting, self._x = False, x

    def states(self) -> tuple[AttentionState, ...]:
        """The attention of the law on the last forward pass.

        Raises:
            CaptureError: There was no such pass, or the penalty could move nothing of the model.
        """
        x = self._embeddings()
        self._check_gradients(x)
        mask, segments = self._watch.padding_mask(x.shape[1]), self._watch.segments(x.shape[0])
        with full_precision(x):
            return (self.law.state(x, mask, segments=segments),)

    @staticmethod
    def squared_error(state: AttentionState, positions: Tensor | None = None) -> Tensor:
        r"""$|x_t - \mu_t|^2$ of a state of the law, `(B, n)`, at all positions or at `positions`; 0 at padding."""
        rows = slice(0, state.length) if positions is None else positions
        with full_precision(state.query):
            mean = moments(state, rows, covariance=False).mean[:, 0]
            return (gather_positions(state.value[:, 0], rows, 1) - mean).square().sum(-1)

    def _embeddings(self) -> Tensor:
        if self._x is None:
            raise CaptureError(
                "the barrier of the law saw no embeddings enter the first block for this loss; call the model through "
                "its forward pass in train mode, once for every loss, or remove the barrier."
            )
        return self._x

    def _check_gradients(self, x: Tensor) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if self.law.w_q.is_meta:
            raise CaptureError(
                "the law of the barrier has no data, on the device 'meta'; attach the barrier after the model was "
                "dispatched, and leave fsdp_cpu_ram_efficient_loading off."
            )
        if not trains_before(*self._site, 0):
            raise CaptureError(
                "no parameter that shapes the embeddings is trained (LoRA freezes them), so the barrier of the law "
                "would move nothing of the model; use source='model', or train the embeddings and attach after "
                "get_peft_model."
            )
        if not self._warned and not self.law.w_q.requires_grad:
            self._warned = True
            warnings.warn(
                "The law of the barrier is frozen, as get_peft_model does to what was there before, and its coupling "
                "stays as it was drawn; attach the barrier after get_peft_model, unless this is meant.",
                stacklevel=2,
            )
        if not x.requires_grad:
            raise CaptureError(
                "the embeddings that entered the first block carry no gradient although the model trains its own, so "
                "the barrier would move nothing of it; pass input_ids, or inputs_embeds with a gradient, and "
                "checkpoint with activation_checkpointing_kwargs={'use_reentrant': False}."
            )

    def forget(self) -> None:
        """Let go of the last forward pass."""
        self._x = None

    def remove(self) -> None:
        """Stop listening."""
        self._hook.remove()

    def __deepcopy__(self, memo: dict) -> "PriorSource":
        return _copy_without(self, memo)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_x": None}


class ModelSource(nn.Module):
    """The model's own attention at some layers; it has no parameter of its own.

    Args:
        model: A causal language model of transformers.
        decoder: Its base model, without head.
        watch: Tells of the calls of `decoder`.
        layers: Indices of blocks; of several, positions of all count alike.
        view: `noise` or `block`.

    Raises:
        UnsupportedModelError: The attention of this model cannot be read exactly.
        ArgumentError: A layer does not exist.
    """

    def __init__(
        self, model: nn.Module, decoder: nn.Module, watch: PassWatch, layers: tuple[int, ...], view: str
    ) -> None:
        super().__init__()
        # Here and not above: it needs transformers.
        from support_tokens.models import AttentionCapture

        self._capture = AttentionCapture(model, layers)
        self._watch = watch
        self.view = view
        self._site = (decoder, decoder_blocks(model))
        self._states: tuple[AttentionState, ...] = ()
        self._expecting = False

    @property
    def waiting(self) -> bool:
        """Whether a forward pass was seen and not yet forgotten."""
        return bool(self._states)

    def begin(self, look: bool) -> None:
        """A forward pass begins."""
        # In eval mode nothing is read, and what cannot be read (a static cache) is nobody's trouble.
        self._capture.pause(not self.training)
        self._expecting = look
        if look:
            self._states = ()

    def end(self) -> None:
        """A forward pass ended."""
        if self._expecting:
            self._states = tuple(self._capture.states(self._watch.attention_mask).values())
        self._expecting = False
        self._capture.clear()

    def states(self) -> tuple[AttentionState, ...]:
        """The attention of each layer in the last forward pass.

        Raises:
            CaptureError: There was no such pass, or the penalty could move nothing of the model.
        """
        if not self._states:
            raise CaptureError(
                "the barrier saw no attention of the model for this loss; call the model through its forward pass in "
                "train mode, once for every loss, or remove the barrier."
            )
        self._check_gradients()
        return self._states

    def _check_gradients(self) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        last, table = max(self._capture.layers), self._capture.architecture
        attention = self._site[1][last].get_submodule(table.attention)
        if not any(p.requires_grad for p in attention.parameters()) and not trains_before(*self._site, last):
            raise CaptureError(
                f"no parameter is trained that shapes the attention of layer {last}, so its barrier would move "
                "nothing; train its projections (LoRA on them will do), or choose a later layer."
            )

    def forget(self) -> None:
        """Let go of the last forward pass."""
        self._states = ()

    def remove(self) -> None:
        """Stop listening."""
        self._capture.remove()

    def __deepcopy__(self, memo: dict) -> "ModelSource":
        return _copy_without(self, memo)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_states": ()}


def _copy_without(original, memo: dict):
    """A deep copy of what its `__getstate__` gives: tensors of a graph can be copied by nobody."""
    copied = original.__class__.__new__(original.__class__)
    memo[id(original)] = copied
    for name, value in original.__getstate__().items():
        copied.__dict__[name] = copy.deepcopy(value, memo)
    return copied
