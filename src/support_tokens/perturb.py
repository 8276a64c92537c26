r"""Seeded, frozen perturbations under which models are compared: every arm meets exactly the same ones.

A perturbation is a frozen value with a `record()` of plain JSON and one method, `applied(model, rms)`: a context in
which the model is perturbed, that gives a function from the batch of the data to the batch which the model is to read.
Embeddings are perturbed by a hook, texts by the returned batch, weights by the context itself.
"""

__all__ = [
    "Batch",
    "Clean",
    "EmbeddingNoise",
    "Perturbation",
    "Read",
    "standard_noise",
]

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.sites import hook_embeddings


@dataclass(frozen=True)
class Batch:
    r"""Sequences of the evaluation data on their way into a model.

    Args:
        indices: `(B,)` place of each sequence in the evaluation data; what is drawn for a sequence depends on it alone.
        input_ids: `(B, T)` token ids that the model reads.
        attention_mask: `(B, T)` 1 at tokens, 0 at padding (on the right).
        labels: `(B, T)` token ids that the model is scored on, aligned with `input_ids`; -100 is not scored.
    """

    indices: Tensor
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


Read = Callable[[Batch], Batch]


@runtime_checkable
class Perturbation(Protocol):
    """What a perturbation offers: its name, the curve and the place on it where it belongs, its record, its effect."""

    kind: ClassVar[str]

    @property
    def name(self) -> str:
        """Short, unique in a set, stable: the key in tables and JSON."""
        ...

    @property
    def family(self) -> str:
        """The curve of degradation that it is a point of; `clean` for none."""
        ...

    @property
    def strength(self) -> float:
        """Its place on that curve; 0 is clean."""
        ...

    @property
    def axis(self) -> str:
        """What strength means, with its unit, for an axis or the head of a table."""
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
        """Nothing is measured."""
        return "no perturbation"

    def record(self) -> dict[str, Any]:
        """`{"kind": "clean"}`."""
        return {"kind": self.kind}

    @contextmanager
    def applied(self, model: nn.Module, rms: float) -> Iterator[Read]:
        """Leaves model and batches as they are."""
        del model, rms
        yield lambda batch: batch


@dataclass(frozen=True)
class EmbeddingNoise:
    r"""Gaussian noise on the embeddings that enter the first block.

    $$ x'_t = x_t + \sigma\, s\, \epsilon_t, \qquad \epsilon_t \sim N(0, I), $$

    with $s = 1$ (`absolute`) or the root mean square of the model's own clean embeddings on the evaluation data
    (`matched`), without which larger embeddings alone would look robust. $\epsilon$ depends on `seed`, on the place
    of the sequence in the data and on the position, and on nothing else: not on the arm, the batch or $\sigma$.

    Args:
        sigma: Standard deviation, in units of the embeddings (`absolute`) or of their root mean square (`matched`).
        scale: What `sigma` is measured in.
        seed: Seed of the noise, a whole number of at least 0.

    Raises:
        ArgumentError: A `sigma` that is not finite and positive, an unknown `scale`, a negative `seed`.

    References:
        arXiv:2602.22271, experiments (absolute noise); the scale-matched form is this package's own check.

    Example:
        >>> EmbeddingNoise(0.5).name, EmbeddingNoise(0.5, "matched").name
        ('noise 0.5', 'noise 0.5 x RMS')
    """

    sigma: float
    scale: Literal["absolute", "matched"] = "absolute"
    seed: int = 0
    kind: ClassVar[str] = "embedding_noise"

    def __post_init__(self) -> None:
        if not (isinstance(self.sigma, int | float) and math.isfinite(self.sigma) and self.sigma > 0):
            raise ArgumentError(
                f"The sigma of embedding noise must be a finite number above 0, not {self.sigma!r}; pass 0.5, say, "
                "or use Clean() for none."
            )
        if self.scale not in ("absolute", "matched"):
            raise ArgumentError(
                f"The scale of embedding noise must be 'absolute' or 'matched', not {self.scale!r}; "
                "'matched' measures sigma in units of the root mean square of the embeddings."
            )
        if not (isinstance(self.seed, int) and self.seed >= 0):
            raise ArgumentError(
                f"The seed of embedding noise must be a whole number of at least 0, not {self.seed!r}; pass 0."
            )

    @property
    def name(self) -> str:
        """`noise SIGMA` or `noise SIGMA x RMS`."""
        return f"noise {self.sigma:g}" + (" x RMS" if self.scale == "matched" else "")

    @property
    def family(self) -> str:
        """One curve for absolute, one for scale-matched noise."""
        return f"{self.kind}/{self.scale}"

    @property
    def strength(self) -> float:
        """Sigma."""
        return float(self.sigma)

    @property
    def axis(self) -> str:
        """Sigma with its unit."""
        return "sigma" if self.scale == "absolute" else "sigma / RMS of the embeddings"

    def record(self) -> dict[str, Any]:
        """Kind, sigma, scale and seed."""
        return {"kind": self.kind, **asdict(self)}

    @contextmanager
    def applied(self, model: nn.Module, rms: float) -> Iterator[Read]:
        """Adds the noise in every forward pass on a batch that went through the yielded function."""
        deviation = self.sigma * (rms if self.scale == "matched" else 1.0)
        waiting: list[Batch] = []

        def read(batch: Batch) -> Batch:
            waiting[:] = [batch]
            return batch

        def add(x: Tensor) -> Tensor:
            noise = standard_noise(self.seed, waiting[0].indices, x.shape[1], x.shape[2])
            return x + deviation * noise.to(device=x.device, dtype=x.dtype)

        handle = hook_embeddings(model, add)
        try:
            yield read
        finally:
            handle.remove()


def standard_noise(seed: int, indices: Tensor | Sequence[int], length: int, width: int) -> Tensor:
    r"""Standard normal noise that depends on seed, sequence and position only.

    Each sequence has a stream of its own, read position by position, so neither the other sequences of a batch nor
    what follows in the sequence changes it.

    Args:
        seed: Seed of the perturbation.
        indices: `(B,)` places of the sequences in the evaluation data.
        length: $T$.
        width: $D$.

    Returns:
        `(B, T, D)`, float32, on the CPU.

    Example:
        >>> whole, part = standard_noise(0, [3, 5], 7, 4), standard_noise(0, [5], 6, 4)
        >>> bool((whole[1, :6] == part[0]).all())
        True
    """
    # numpy's generators are used because their stream is one number after another: torch's fills in blocks, so that a
    # longer sequence would change the noise at its beginning.
    rows = [
        np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, int(index))))).standard_normal(
            (length, width), dtype=np.float32
        )
        for index in indices
    ]
    return torch.from_numpy(np.stack(rows))
