r"""What a barrier acts on: the paper's law with a coupling of its own, or the model's own attention.

A source listens to forward passes in train mode and afterwards gives margins. It is a module of the model, so that the
optimiser sees its parameters and `deepcopy`, `to` and `train` reach it; what it holds of the last forward pass never
leaves the process.
"""

import copy
import inspect
from typing import NamedTuple

import torch
from torch import Tensor, nn

from support_tokens.errors import CaptureError
from support_tokens.law import EmbeddingPrior
from support_tokens.margins import Margins
from support_tokens.sites import hook_embeddings

__all__ = ["Observation", "PriorSource", "TokenMask"]


class Observation(NamedTuple):
    r"""Margins of one forward pass, with $|x_t - \mu_t|^2$ `(B, n)` where the source has it."""

    margins: Margins
    squared_error: Tensor | None


class TokenMask(nn.Module):
    """Listens to what a decoder is called with: which tokens are real, and which document each belongs to.

    Args:
        decoder: The base model (without head) of a causal language model; it is called through `__call__` under every
            wrapper.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.attention_mask: Tensor | None = None
        self.position_ids: Tensor | None = None
        self._names = tuple(inspect.signature(decoder.forward).parameters)
        self.hook = decoder.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, _decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        called = {**dict(zip(self._names, args, strict=False)), **kwargs}
        mask = called.get("attention_mask")
        self.attention_mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        self.position_ids = called.get("position_ids")

    def segments(self) -> Tensor | None:
        """Document of each token `(B, T)` where positions restart within a sequence that has no padding mask; else
        None."""
        if self.attention_mask is not None or self.position_ids is None:
            return None
        restart = self.position_ids.diff(dim=-1, prepend=self.position_ids[..., :1] - 1) != 1
        return restart.cumsum(-1)


class PriorSource(nn.Module):
    """The paper's law on the embeddings that enter the first block; its W_Q and W_K learn with the model.

    Args:
        model: A causal language model of transformers.
        decoder: Its base model, without head.
        law: The law.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module, law: EmbeddingPrior) -> None:
        super().__init__()
        self.law = law
        self._mask = TokenMask(decoder)
        self._start = decoder.register_forward_pre_hook(self._expect)
        self._hook = hook_embeddings(model, self._listen)
        # In a tuple, since a module held as an attribute would be registered a second time.
        self._embedding = (model.get_input_embeddings(),)  # type: ignore[operator]
        self._x: Tensor | None = None
        self._expecting = False

    def _expect(self, _decoder: nn.Module, _args: tuple) -> None:
        # The decoder is called once a forward pass; gradient checkpointing calls its blocks again in the backward
        # pass, and what they see there must not be taken for a new pass.
        self._expecting, self._x = self.training, None

    def _listen(self, x: Tensor) -> None:
        if self._expecting:
            self._expecting, self._x = False, x

    def observe(self, positions: Tensor | None = None) -> Observation:
        """Margins of the last forward pass, at all positions or at `positions` `(B, n)`."""
        x = self.embeddings()
        mask, segments = self._mask.attention_mask, self._mask.segments()
        margins = self.law.margins(x, mask, segments=segments, positions=positions)
        error = (x - self.law.mean(x, mask, segments=segments)).square().sum(-1)
        return Observation(margins, error if positions is None else error.gather(1, positions))

    def embeddings(self) -> Tensor:
        """The embeddings `(B, T, D)` of the last forward pass."""
        if self._x is None:
            raise CaptureError(
                "the barrier of the law saw no embeddings enter the first block in this training step; call the model "
                "through its "
                "forward pass in train mode, once for every loss, or remove the barrier."
            )
        trains = any(p.requires_grad for p in self._embedding[0].parameters())
        if torch.is_grad_enabled() and trains and not self._x.requires_grad:
            raise CaptureError(
                "the embeddings that the barrier saw carry no gradient although the model trains: reentrant gradient "
                "checkpointing "
                "drops it; use gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        return self._x

    def valid(self) -> Tensor:
        """True at real tokens of the last forward pass, `(B, T)`."""
        x = self.embeddings()
        mask = self._mask.attention_mask
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask != 0

    def __deepcopy__(self, memo: dict) -> "PriorSource":
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        for name, value in self.__dict__.items():
            copied.__dict__[name] = None if name == "_x" else copy.deepcopy(value, memo)
        return copied

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_x": None}

    def forget(self) -> None:
        """Let go of the last forward pass."""
        self._x = None

    def remove(self) -> None:
        """Stop listening."""
        for hook in (self._mask.hook, self._start, self._hook):
            hook.remove()
