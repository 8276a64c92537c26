"""The contract between perturbations and measurement: batches, and the loss of a model on them."""

__all__ = [
    "Batch",
    "Clean",
    "Perturbation",
    "Read",
    "Spelling",
    "check_seed",
    "check_share",
    "token_logits",
    "token_nats",
]

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn

from support_tokens.errors import ArgumentError


class Spelling(Protocol):
    """Maps tokens to text and text to tokens, for typos in tokens of more than one character."""

    def text(self, token: int) -> str:
        """Text of the token."""
        ...

    def tokens(self, text: str) -> list[int]:
        """A tokenization of the text, without special tokens."""
        ...


@dataclass(frozen=True)
class Batch:
    r"""Sequences of the evaluation data as a model reads them.

    Args:
        indices: `(B,)` index of each sequence in the evaluation data; random draws for a sequence depend on it alone.
        input_ids: `(B, T)` token ids that the model reads.
        attention_mask: `(B, T)` 1 at tokens, 0 at padding (on the right).
        labels: `(B, T)` token ids that the model is scored on, aligned with `input_ids`: the one at t is predicted from
            the tokens before t; -100 is not scored.
        units: `(B, T)` number of characters (or tokens) of each label; None: one.
        spelling: Texts of the tokens; None if each is one character.
        prefix: Special tokens at the beginning of each sequence, such as BOS; perturbations of the text keep them.
    """

    indices: Tensor
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    units: Tensor | None = None
    spelling: Spelling | None = None
    prefix: int = 0

    @property
    def scored(self) -> Tensor:
        """`(B, T - 1)`, True where a label is scored; the first token has no context."""
        return self.labels[:, 1:] != -100


Read = Callable[[Batch], Batch]


@runtime_checkable
class Perturbation(Protocol):
    """A perturbation: its name, its place on a curve of degradation, its record and its effect."""

    kind: ClassVar[str]

    @property
    def name(self) -> str:
        """Short, unique in a set, stable: the key in tables and JSON."""
        ...

    @property
    def family(self) -> str:
        """The curve of degradation that it belongs to; `clean` for none."""
        ...

    @property
    def strength(self) -> float:
        """Its position on that curve; 0 is clean."""
        ...

    @property
    def axis(self) -> str:
        """Meaning and unit of the strength, for an axis or a table header."""
        ...

    def record(self) -> dict[str, Any]:
        """Everything that defines it, as plain JSON; `kind` is its first key."""
        ...

    def applied(self, model: nn.Module, rms: float) -> AbstractContextManager[Read]:
        """A context in which `model`, whose clean embeddings have this `rms`, is perturbed."""
        ...


@dataclass(frozen=True)
class Clean:
    """No perturbation: the reference of every ratio.

    Example:
        >>> Clean().record()
        {'kind': 'clean'}
    """

    kind: ClassVar[str] = "clean"

    @property
    def name(self) -> str:
        """`clean`."""
        return self.kind

    @property
    def family(self) -> str:
        """`clean`: the beginning of every curve."""
        return self.kind

    @property
    def strength(self) -> float:
        """0."""
        return 0.0

    @property
    def axis(self) -> str:
        """`no perturbation`."""
        return "no perturbation"

    def record(self) -> dict[str, Any]:
        """`{"kind": "clean"}`."""
        return {"kind": self.kind}

    @contextmanager
    def applied(self, model: nn.Module, rms: float) -> Iterator[Read]:
        """Leaves model and batches as they are."""
        del model, rms
        yield lambda batch: batch


def token_logits(model: nn.Module, batch: Batch, *, masked: bool = True) -> Tensor:
    """Logits `(B, T - 1, V)`, float32, for the labels from the second on.

    Args:
        model: A causal language model of transformers.
        batch: The batch to read.
        masked: Whether to pass the attention mask. Padding on the right does not change a causal model's loss.
    """
    device = next(model.parameters()).device
    mask = {"attention_mask": batch.attention_mask.to(device)} if masked else {}
    return model(input_ids=batch.input_ids.to(device), **mask).logits[:, :-1].float()


def token_nats(logits: Tensor, batch: Batch) -> Tensor:
    r"""$-\log p$ of each label from the second on, `(B, T - 1)`, in nats; 0 where it is not scored.

    Example:
        >>> import torch
        >>> ids = torch.zeros(1, 3, dtype=torch.long)
        >>> token_nats(torch.zeros(1, 2, 4), Batch(torch.tensor([0]), ids, ids + 1, ids))
        tensor([[1.3863, 1.3863]])
    """
    labels = batch.labels[:, 1:].to(logits.device)
    return nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)


def check_seed(seed: object, whose: str) -> None:
    """Raises an ArgumentError unless `seed` is a whole number of at least 0."""
    if not (isinstance(seed, int) and seed >= 0):
        raise ArgumentError(f"The seed of {whose} must be a whole number of at least 0, received {seed!r}; pass 0.")


def check_share(share: object, whose: str) -> None:
    """Raises an ArgumentError unless `share` is a number above 0 and at most 1."""
    if not (isinstance(share, int | float) and math.isfinite(share) and 0 < share <= 1):
        raise ArgumentError(
            f"The share of {whose} must be a number above 0 and at most 1, received {share!r}; pass 0.05 for 5 %, or "
            "use Clean() for none."
        )
