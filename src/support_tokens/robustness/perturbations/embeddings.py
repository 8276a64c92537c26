r"""Perturbations of the embeddings that enter the first block: Gaussian noise and dropped tokens."""

__all__ = ["EmbeddingNoise", "ScaledNoise", "TokenDrop", "check_scaled_sigma", "standard_noise", "stream"]

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.models import hook_embeddings
from support_tokens.robustness.perturbations.base import Batch, Read, check_seed, check_share


@dataclass(frozen=True)
class ScaledNoise:
    """Size and record of noise on embeddings.

    Args:
        sigma: Standard deviation, in units of the embeddings (`absolute`) or of their root mean square (`matched`).
        scale: What `sigma` is measured in.
    """

    sigma: float
    scale: Literal["absolute", "matched"] = "absolute"
    kind: ClassVar[str]

    @property
    def strength(self) -> float:
        """Sigma."""
        return float(self.sigma)

    @property
    def axis(self) -> str:
        """Sigma with its unit."""
        return "sigma" if self.scale == "absolute" else "sigma / RMS of the embeddings"

    def record(self) -> dict[str, Any]:
        """Kind, sigma, scale and whatever else defines it."""
        return {"kind": self.kind, **asdict(self)}

    def deviation(self, rms: float) -> float:
        """Standard deviation on a model whose clean embeddings have this `rms`."""
        return self.sigma * (rms if self.scale == "matched" else 1.0)


@dataclass(frozen=True)
class EmbeddingNoise(ScaledNoise):
    r"""Gaussian noise on the embeddings that enter the first block.

    $$ x'_t = x_t + \sigma\, s\, \epsilon_t, \qquad \epsilon_t \sim N(0, I), $$

    with $s = 1$ (`absolute`) or the root mean square of the model's own clean embeddings on the evaluation data
    (`matched`), without which larger embeddings alone would look robust. $\epsilon$ depends on `seed`, on the index of
    the sequence in the data and on the position only, not on the arm, the batch or $\sigma$.

    Args:
        sigma: Standard deviation, in units of the embeddings (`absolute`) or of their root mean square (`matched`).
        scale: What `sigma` is measured in.
        seed: Seed of the noise, a whole number of at least 0.

    Raises:
        ArgumentError: `sigma` is not finite and positive, `scale` is unknown, or `seed` is negative.

    References:
        arXiv:2602.22271, experiments (absolute noise); the scale-matched form is this package's own check.

    Example:
        >>> EmbeddingNoise(0.5).name, EmbeddingNoise(0.5, "matched").name
        ('noise 0.5', 'noise 0.5 x RMS')
    """

    seed: int = 0
    kind: ClassVar[str] = "embedding_noise"

    def __post_init__(self) -> None:
        check_scaled_sigma(self.sigma, self.scale, "embedding noise")
        check_seed(self.seed, "embedding noise")

    @property
    def name(self) -> str:
        """`noise SIGMA` or `noise SIGMA x RMS`."""
        return f"noise {self.sigma:g}" + (" x RMS" if self.scale == "matched" else "")

    @property
    def family(self) -> str:
        """One curve for absolute, one for scale-matched noise."""
        return f"{self.kind}/{self.scale}"

    @contextmanager
    def applied(self, model: nn.Module, rms: float) -> Iterator[Read]:
        """Adds the noise in every forward pass on a batch that went through the yielded function."""
        deviation = self.deviation(rms)
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


@dataclass(frozen=True)
class TokenDrop:
    r"""Dropped tokens: their embeddings entering the first block are zero.

    Each position is dropped with probability `share`, by one uniform number a position that depends on `seed`, on the
    index of the sequence and on the position, so a token dropped at one share is dropped at every larger one. Length,
    positions of the other tokens and targets stay the same: a dropped token is still predicted from the tokens before
    it, and later tokens are predicted without it. Special tokens in front, such as BOS, are never dropped.

    Args:
        share: Probability that a token is dropped, above 0 and at most 1.
        seed: Seed of the draws.

    Raises:
        ArgumentError: `share` is out of range, or `seed` is negative.

    Example:
        >>> TokenDrop(0.05).name
        'token drop 5 %'
    """

    share: float
    seed: int = 0
    kind: ClassVar[str] = "token_drop"

    def __post_init__(self) -> None:
        check_share(self.share, "dropped tokens")
        check_seed(self.seed, "token drop")

    @property
    def name(self) -> str:
        """`token drop SHARE %`."""
        return f"token drop {100 * self.share:g} %"

    @property
    def family(self) -> str:
        """One curve."""
        return self.kind

    @property
    def strength(self) -> float:
        """The share."""
        return float(self.share)

    @property
    def axis(self) -> str:
        """The share."""
        return "share of tokens dropped"

    def record(self) -> dict[str, Any]:
        """Kind, share and seed."""
        return {"kind": self.kind, **asdict(self)}

    @contextmanager
    def applied(self, model: nn.Module, rms: float) -> Iterator[Read]:
        """Zeroes embeddings in every forward pass on a batch that went through the yielded function."""
        del rms
        waiting: list[Batch] = []

        def read(batch: Batch) -> Batch:
            waiting[:] = [batch]
            return batch

        def drop(x: Tensor) -> Tensor:
            drawn = np.stack([stream(self.seed, index, 1).random(x.shape[1]) for index in waiting[0].indices])
            dropped = torch.from_numpy(drawn < self.share)
            dropped[:, : waiting[0].prefix] = False
            return x.masked_fill(dropped.to(x.device).unsqueeze(-1), 0.0)

        handle = hook_embeddings(model, drop)
        try:
            yield read
        finally:
            handle.remove()


def standard_noise(seed: int, indices: Tensor | Sequence[int], length: int, width: int) -> Tensor:
    r"""Standard normal noise that depends on seed, sequence and position only.

    Each sequence has its own stream, read position by position, so neither the other sequences of a batch nor later
    positions change it.

    Args:
        seed: Seed of the perturbation.
        indices: `(B,)` indices of the sequences in the evaluation data.
        length: $T$.
        width: $D$.

    Returns:
        `(B, T, D)`, float32, on the CPU.

    Example:
        >>> whole, part = standard_noise(0, [3, 5], 7, 4), standard_noise(0, [5], 6, 4)
        >>> bool((whole[1, :6] == part[0]).all())
        True
    """
    # numpy's generators yield one number after another. Torch's fill in blocks, so a longer sequence would change the
    # noise at its beginning.
    rows = [stream(seed, index).standard_normal((length, width), dtype=np.float32) for index in indices]
    return torch.from_numpy(np.stack(rows))


def stream(seed: int, index: Tensor | int, *purpose: int) -> np.random.Generator:
    """The random numbers of one sequence; another purpose has another stream.

    Example:
        >>> stream(0, 3).random() == stream(0, 3).random(), stream(0, 3).random() == stream(0, 3, 1).random()
        (True, False)
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, int(index), *purpose))))


def check_scaled_sigma(sigma: object, scale: object, whose: str) -> None:
    """Raises an ArgumentError if `sigma` is not finite and positive, or `scale` is unknown."""
    if not (isinstance(sigma, int | float) and math.isfinite(sigma) and sigma > 0):
        raise ArgumentError(
            f"The sigma of {whose} must be a finite number above 0, received {sigma!r}; pass 0.5, say, "
            "or use Clean() for none."
        )
    if scale not in ("absolute", "matched"):
        raise ArgumentError(
            f"The scale of {whose} must be 'absolute' or 'matched', received {scale!r}; "
            "'matched' measures sigma in units of the root mean square of the embeddings."
        )
