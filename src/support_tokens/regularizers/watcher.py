"""Sees every forward pass of a model: its inputs, the embeddings that enter the first block, captured attention."""

__all__ = ["ForwardWatcher"]

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from support_tokens.errors import CaptureError
from support_tokens.models import Decoder, recomputing
from support_tokens.regularizers.passes import Change, ExtraPass, Pass

# What the causal model is called with and a further pass of the same batch must not repeat.
_OF_THE_LOSS = frozenset(
    {"labels", "shift_labels", "num_items_in_batch", "past_key_values", "use_cache", "return_dict", "logits_to_keep",
     "output_attentions", "output_hidden_states"}
)  # fmt: skip


class ForwardWatcher:
    """The hooks of one model, and the forward pass that waits for its loss.

    Args:
        site: Where they sit.
        choose: Called with the decoder when a pass begins; says whether penalties will be read of it.
        changes: Called with the padding mask: what training noise makes of the embeddings; None: nothing.
        ended: Called with what the decoder gave when a pass ended.
    """

    def __init__(
        self,
        site: Decoder,
        choose: Callable[[nn.Module], bool],
        changes: Callable[[Tensor | None], Change | None],
        ended: Callable[[Any], None],
    ) -> None:
        self._site, self._choose, self._changes, self._ended = site, choose, changes, ended
        self._captures: dict[tuple[int, ...], Any] = {}
        self._hooks: list[RemovableHandle] = []
        self._forget()

    def _forget(self) -> None:
        self.seen = self.looking = False
        self.current: Pass | None = None
        self._open: ExtraPass | None = None
        self._extra: ExtraPass | None = None
        self._inputs: Mapping[str, Any] | None = None
        self._autocast: tuple[str, bool, torch.dtype] | None = None
        # A checkpointed block runs again in the backward pass, on the same tensor, and must see it changed alike.
        self._changed = WeakTensorKeyDictionary()

    def start(self) -> None:
        """Begin to watch."""
        model, decoder = self._site.causal_model, self._site.module
        self._hooks = [
            model.register_forward_pre_hook(self._before_model, with_kwargs=True),
            decoder.register_forward_pre_hook(self._before, with_kwargs=True),
            self._site.blocks[0].register_forward_pre_hook(self._enter, with_kwargs=True),
            decoder.register_forward_hook(self._after),
            model.register_forward_hook(self._after_model),
        ]

    @property
    def running_again(self) -> bool:
        """Whether a further pass of a regularizer runs at this moment."""
        return self._extra is not None

    def stop(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self.keep_captures(set())

    def capture(self, layers: tuple[int, ...]) -> Any:
        """The capture of attention at some layers; who reads the same layers shares it.

        Raises:
            UnsupportedModelError: The attention of this model cannot be read exactly.
            ArgumentError: A layer does not exist.
        """
        if layers not in self._captures:
            # Here and not above: it needs transformers.
            from support_tokens.models import AttentionCapture

            capture = AttentionCapture(self._site.causal_model, layers)
            capture.pause()
            self._captures[layers] = capture
        return self._captures[layers]

    def keep_captures(self, needed: set[tuple[int, ...]]) -> None:
        """Take off the captures that nobody needs any more."""
        for layers in [layers for layers in self._captures if layers not in needed]:
            self._captures.pop(layers).remove()

    def _before_model(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._extra is None and not recomputing():
            names = tuple(inspect.signature(model.forward).parameters)
            self._inputs = {**dict(zip(names, args, strict=False)), **kwargs}

    def _before(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        if recomputing():
            return
        if self._extra is not None:
            self._open = self._extra
            return
        self.seen, self.looking, self._open = True, self._choose(decoder), None
        if not self.looking:
            return
        names = tuple(inspect.signature(decoder.forward).parameters)
        called = {**dict(zip(names, args, strict=False)), **kwargs}
        mask = called.get("attention_mask")
        plain = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        kind = "" if mask is plain else type(mask).__name__
        inputs = self._inputs or {}
        self.current = Pass(self._changes(plain), inputs, plain, kind, called.get("position_ids"), self.run)  # type: ignore[attr-defined]
        self._open = self.current
        if not torch.compiler.is_compiling():
            device = next(self._site.embedding.parameters()).device.type
            if device != "meta":
                self._autocast = (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for capture in self._captures.values():
            capture.pause(False)

    def _enter(self, _block: nn.Module, args: tuple, kwargs: dict):
        """Pre-hook of the first block."""
        x = args[0] if args else kwargs["hidden_states"]
        repeat = None if torch.compiler.is_compiling() else self._changed.get(x)
        if repeat is not None:
            entered = repeat(x)
        elif self._open is not None and self._open.clean is None and not recomputing():
            entered = self._open.enter(x)
            if self._open.change is not None and not torch.compiler.is_compiling():
                self._changed[x] = self._open.change
        else:
            return None
        if entered is x:
            return None
        return ((entered, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": entered})

    def _after(self, _decoder: nn.Module, _args: tuple, output) -> None:
        if recomputing():
            return
        opened, self._open = self._open, None
        if self._extra is not None:
            return
        if self.current is not None and opened is self.current and self._captures:
            states = {}
            for capture in self._captures.values():
                states.update(capture.states(self.current.attention_mask))
            self.current.states = states
        for capture in self._captures.values():
            capture.clear()
            capture.pause()
        self._ended(output)

    def _after_model(self, _model: nn.Module, _args: tuple, output) -> None:
        if self._extra is None and not recomputing():
            self._inputs = None
            if self.current is not None:
                self.current.logits = getattr(output, "logits", None)

    @torch.compiler.disable
    def run(self, extra: ExtraPass, inputs: Mapping[str, Any], parameters: Mapping[str, Tensor] | None) -> Tensor:
        """A further forward pass of the causal model; see `Pass.rerun`.

        Raises:
            CaptureError: The trainer called the decoder alone.
        """
        if not inputs:
            raise CaptureError(
                "the model must be called as a whole for a regularizer that needs a further forward pass, received a "
                "call of its decoder alone; switch fused losses of the trainer off."
            )
        model = self._site.causal_model
        kept = {name: value for name, value in inputs.items() if name not in _OF_THE_LOSS}
        if "use_cache" in inspect.signature(model.forward).parameters:
            kept["use_cache"] = False
        self._extra = extra
        try:
            with self._autocast_of_the_pass():
                if parameters is None:
                    output = model(**kept)
                else:
                    output = torch.func.functional_call(model, dict(parameters), kwargs=kept)
        finally:
            self._extra = self._open = None
        return output.logits

    @contextlib.contextmanager
    def _autocast_of_the_pass(self) -> Iterator[None]:
        # A trainer's autocast ends with the wrapper's forward pass, and this one may run after it.
        if self._autocast is None:
            yield
            return
        device, enabled, dtype = self._autocast
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            yield

    def __getstate__(self) -> dict:
        # What belongs to a pass exists in no copy and in no file.
        left = {"current", "_open", "_extra", "_inputs", "_autocast", "_changed", "seen", "looking"}
        return {name: value for name, value in self.__dict__.items() if name not in left}

    def __setstate__(self, state: dict) -> None:
        self._forget()
        self.__dict__.update(state)
