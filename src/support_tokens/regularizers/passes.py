"""One forward pass of a model in training: what the hooked modules produced, and further passes of the same batch."""

__all__ = ["ExtraPass", "Pass"]

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from support_tokens.errors import CaptureError
from support_tokens.margins import AttentionState

Change = Callable[[Tensor], Tensor]
"""What becomes of the embeddings `(B, T, D)` that enter the first block."""


class ExtraPass:
    """A further forward pass of a batch, with a change of the embeddings of its own and without labels.

    Args:
        change: What becomes of the embeddings; None: nothing.

    Attributes:
        clean: `(B, T, D)`, embeddings before the change.
        embeddings: `(B, T, D)`, after it.
        logits: `(B, T, V)`.
        loss: What a regularizer made of it, a scalar.
    """

    loss: Tensor

    def __init__(self, change: Change | None = None) -> None:
        self.change = change
        self.clean: Tensor | None = None
        self.embeddings: Tensor | None = None
        self.logits: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """The embeddings that go on into the first block."""
        self.clean = x
        self.embeddings = x if self.change is None else self.change(x)
        return self.embeddings


class Pass(ExtraPass):
    """The forward pass whose cross-entropy is trained; every penalty is a function of it.

    Args:
        change: What training noise makes of the embeddings.
        inputs: What the causal model was called with, by name.
        attention_mask: `(B, L)`, non-zero at real tokens, as the decoder received it; None: there is no such mask.
        mask_kind: Type of a mask of another shape, or the empty string.
        position_ids: As the decoder received them.
        run: Makes a further pass: from an `ExtraPass`, the inputs and parameters by name to the logits.

    Attributes:
        states: Layer to attention state, of the layers that are captured.
        cross_entropy: Loss of the model itself, a scalar.
        targets: `(B, n)`, the token that each scored position predicts, -100 where there is none; None: unknown.
        num_items: Number of targets of the whole batch, of which this may be a part; None: this is the whole.
        spared: Whether no gradient is wanted through the cross-entropy, since another loss takes all of its place.
        alone: Whether one penalty alone is read of it.
        adversary: Gives the further pass under the adversary of the model's adversarial term, if it has one.
    """

    def __init__(
        self,
        change: Change | None,
        inputs: Mapping[str, Any],
        attention_mask: Tensor | None,
        mask_kind: str,
        position_ids: Tensor | None,
        run: Callable[[ExtraPass, Mapping[str, Any], Mapping[str, Tensor] | None], Tensor],
    ) -> None:
        super().__init__(change)
        self.inputs = inputs
        self.attention_mask, self.mask_kind, self.position_ids = attention_mask, mask_kind, position_ids
        self.states: Mapping[int, AttentionState] = {}
        self.cross_entropy: Tensor | None = None
        self.targets: Tensor | None = None
        self.num_items: Tensor | int | None = None
        self.spared = self.alone = False
        self.adversary: Callable[[Pass], ExtraPass] | None = None
        self._run = run
        self._extra: dict[object, ExtraPass] = {}

    def again(self, key: object, make: Callable[[], ExtraPass]) -> ExtraPass:
        """The further pass of a key; two regularizers that need the same one share it."""
        if key not in self._extra:
            self._extra[key] = make()
        return self._extra[key]

    def rerun(self, change: Change | None = None, parameters: Mapping[str, Tensor] | None = None) -> ExtraPass:
        """Runs the model once more on the batch, free of any other regularizer.

        Args:
            change: What becomes of the embeddings.
            parameters: Tensors by name in place of parameters of the causal model.
        """
        extra = ExtraPass(change)
        extra.logits = self._run(extra, self.inputs, parameters)
        return extra

    def embeddings_at(self, at: str) -> Tensor:
        """The embeddings that a penalty reads, `(B, T, D)`.

        Args:
            at: `clean`, before any noise; `noisy`, as they entered the first block; `adversarial`, with the noise of
                the adversary.
        """
        clean = self.clean_embeddings()
        if at == "clean":
            return clean
        passed = self if at == "noisy" or self.adversary is None else self.adversary(self)
        return clean if passed.embeddings is None else passed.embeddings

    def clean_embeddings(self) -> Tensor:
        """The embeddings before any noise, `(B, T, D)`.

        Raises:
            CaptureError: No embeddings entered the first block in this pass.
        """
        if self.clean is None:
            raise CaptureError(
                "embeddings must enter the first block through its forward pass, received none in this pass; call the "
                "model as a whole, once for every loss, or remove the regularizer."
            )
        return self.clean

    def padding_mask(self, length: int) -> Tensor | None:
        """The mask `(B, length)`, non-zero at real tokens, without what it says of a cache; None: all are real.

        Raises:
            CaptureError: The model received a mask of another kind.
        """
        if self.mask_kind:
            raise CaptureError(
                f"attention_mask must be of shape (B, T) for a penalty on embeddings, received a {self.mask_kind} of "
                "another shape; pass attention_mask (B, T), or position_ids that restart at every document."
            )
        return None if self.attention_mask is None else self.attention_mask[:, -length:]

    def valid(self, x: Tensor) -> Tensor:
        """Which positions of embeddings `(B, T, D)` hold a token, `(B, T)`."""
        mask = self.padding_mask(x.shape[1])
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else (mask != 0).to(x.device)

    def segments(self, batch: int) -> Tensor | None:
        """Document of each token `(batch, T)` where positions restart and no mask pads; else None."""
        if self.attention_mask is not None or self.position_ids is None or self.position_ids.dim() != 2:
            return None
        restart = self.position_ids.diff(dim=-1, prepend=self.position_ids[..., :1] - 1) != 1
        return restart.cumsum(-1).expand(batch, -1)

    def sequence_weights(self, real: Tensor, like: Tensor) -> Tensor:
        """Weight of each sequence in a mean over tokens, `(B,)`.

        Of a whole batch it is the sequence's share of the real tokens. Under gradient accumulation the cross-entropy of
        a micro-batch is its sum over the items of the whole batch; the penalty is split alike, each sequence weighing
        as much as its items, so that every split has one gradient.

        Args:
            real: `(B, T)`, which positions hold a token.
            like: Gives dtype and device.
        """
        if self.num_items is None or self.targets is None:
            return real.sum(-1).to(like) / real.sum().clamp_min(1)
        return (self.targets != -100).flatten(1).sum(-1).to(like) / _on(self.num_items, like.device)

    def mean(self, per_token: Tensor, counted: Tensor, real: Tensor) -> Tensor:
        """Mean of a figure over the counted positions, by sequence weights.

        Args:
            per_token: `(B, n)`.
            counted: `(B, n)`, which of them count.
            real: `(B, T)`, which positions of the batch hold a token.
        """
        weight = self.sequence_weights(real, per_token)
        each = per_token.masked_fill(~counted, 0.0).sum(-1) / counted.sum(-1).clamp_min(1)
        return (weight * each).sum()

    def scored(self, logits: Tensor | None) -> Tensor:
        """Logits at the scored positions, `(n, V)`, float32 or better.

        Raises:
            CaptureError: The logits were not seen, or do not fit the labels.
        """
        return _full(self._aligned(logits)[self._scored_positions(logits)])

    def scored_targets(self, logits: Tensor | None) -> Tensor:
        """Targets of the scored positions, `(n,)`."""
        if self.targets is None:
            raise CaptureError(
                "labels must be given for a loss under a change of embeddings, received none; pass labels to the model "
                "or to handle.weighted_penalty(labels)."
            )
        return self.targets[self._scored_positions(logits)]

    def item_mean(self, per_item: Tensor) -> Tensor:
        """Mean of a figure over scored positions `(n,)`, or its part of the mean over the whole batch."""
        if self.num_items is None:
            return per_item.sum() / max(1, per_item.numel())
        return per_item.sum() / _on(self.num_items, per_item.device)

    def loss_of(self, logits: Tensor | None) -> Tensor:
        """Cross-entropy of further logits against the targets of this pass, in nats."""
        losses = nn.functional.cross_entropy(self.scored(logits), self.scored_targets(logits), reduction="none")
        return self.item_mean(losses)

    def baseline(self) -> Tensor:
        """Cross-entropy of this pass, which a loss that takes its place is compared with."""
        value = self.loss_of(self.logits) if self.cross_entropy is None else self.cross_entropy
        return value.detach() if self.spared else value

    def _aligned(self, logits: Tensor | None) -> Tensor:
        if logits is None or self.logits is None:
            raise CaptureError(
                "the model must return logits for a penalty on its predictions, received none; call it as a whole, and "
                "leave fused losses that never form logits (Liger, chunked losses) off."
            )
        if self.targets is None or self.targets.shape[1] == logits.shape[1] - 1:
            return logits[:, :-1]
        if self.targets.shape[1] != logits.shape[1]:
            raise CaptureError(
                f"logits must be given at every position of the labels, received {logits.shape[1]} positions for "
                f"{self.targets.shape[1]} targets; leave logits_to_keep at its default."
            )
        return logits

    def _scored_positions(self, logits: Tensor | None) -> Tensor:
        aligned = self._aligned(logits)
        if self.targets is not None:
            return (self.targets != -100).to(aligned.device)
        mask = self.padding_mask(aligned.shape[1] + 1)
        if mask is None:
            return torch.ones(aligned.shape[:2], dtype=torch.bool, device=aligned.device)
        return ((mask[:, 1:] != 0) & (mask[:, :-1] != 0)).to(aligned.device)


def _full(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _on(count: Tensor | int, device: torch.device) -> Tensor | int:
    return count.to(device) if isinstance(count, Tensor) else count
