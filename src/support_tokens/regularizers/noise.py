"""Arms that disturb the embeddings in training: noise of several kinds, and dropout."""

__all__ = ["EmbeddingDropout", "LawNoise", "NEFTune", "TrainingNoise"]

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from support_tokens.margins import JacobianBlocks, position_chunks
from support_tokens.margins.linalg import each_matrix, full_precision
from support_tokens.models import hook_embeddings
from support_tokens.regularizers.barriers import repulsive_state
from support_tokens.regularizers.base import Attachment, option, require

# Noise is drawn from the global generator, whose state a checkpoint of the Trainer holds, so a resumed run draws the
# same. The order of the data has a generator of its own, so arms still see the same batches.


@dataclass(frozen=True)
class TrainingNoise:
    r"""Gaussian noise on the embeddings in training: $x_t + s\, u\, \epsilon_t$, $\epsilon_t$ standard, with $u$ the
    embeddings' RMS (`matched`) or 1 (`absolute`).

    The root mean square of the batch's embeddings is detached: no gradient asks the model to resize them in order to
    change the noise. Under absolute noise the model can make itself robust by larger embeddings.

    Args:
        scale: $s$, standard deviation of the noise in units of `unit`.
        unit: `matched` or `absolute`.
    """

    name: ClassVar[str] = "noise"
    summary: ClassVar[str] = "cross-entropy under Gaussian embedding noise in training"

    scale: float = option(0.2, "standard deviation of the noise")
    unit: str = option(
        "matched", "matched: in units of the embeddings' RMS; absolute: as it is", choices=("matched", "absolute")
    )

    def __post_init__(self):
        require(self)

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """Hooks the embeddings; in eval mode they pass unchanged."""

        def disturb(x: Tensor) -> Tensor | None:
            if not model.training:
                return None
            size = _rms(x) if self.unit == "matched" else 1.0
            return x + self.scale * size * torch.randn_like(x)

        return Attachment(hook_embeddings(model, disturb).remove)


@dataclass(frozen=True)
class LawNoise:
    r"""Noise pushed through the law to first order: $x_t + s\, \mathrm{rms}(x)\, \nu\, J_t^{-1} \epsilon_t$, with $J_t
    = I + c\,\Sigma_t$.

    $x - \mu(x) = \epsilon$ moves by $J_t^{-1}\,d\epsilon$: noise is larger at positions and in directions whose margin
    is small. $J_t$ is that of `InvariantBarrier`, and detached; $\nu$ brings the noise of a batch to the power that
    `TrainingNoise(scale)` has, so that the two differ in its directions alone.

    Args:
        scale: $s$, root mean square of the noise in units of the embeddings'.
        coupling: $c$.
    """

    name: ClassVar[str] = "law-noise"
    summary: ClassVar[str] = "cross-entropy under embedding noise pushed through the law"

    scale: float = option(0.2, "root mean square of the noise, in units of the embeddings' RMS")
    coupling: float = option(0.1, "strength c of the fixed repulsive coupling")

    def __post_init__(self):
        require(self)

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """Hooks the embeddings; in eval mode they pass unchanged."""

        def disturb(x: Tensor) -> Tensor | None:
            if not model.training:
                return None
            noise = through_law(x.detach(), torch.randn_like(x), self.coupling)
            return x + self.scale * _rms(x) / _rms(noise).clamp_min(1e-12) * noise

        return Attachment(hook_embeddings(model, disturb).remove)


@dataclass(frozen=True)
class NEFTune:
    r"""Uniform noise on the token embeddings, as the Trainer of transformers adds it: $U(-a, a)$ with $a = \alpha /
    \sqrt{T D}$.

    Args:
        alpha: $\alpha$.

    References:
        Jain et al. 2023 (arXiv:2310.05914); `TrainingArguments.neftune_noise_alpha`.
    """

    name: ClassVar[str] = "neftune"
    summary: ClassVar[str] = "cross-entropy under NEFTune's uniform embedding noise"

    alpha: float = option(5.0, "alpha: the noise is uniform up to alpha / sqrt(T D)")

    def __post_init__(self):
        require(self)

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """Asks the Trainer for it."""
        return Attachment(arguments={"neftune_noise_alpha": self.alpha})


@dataclass(frozen=True)
class EmbeddingDropout:
    """Dropout on the embeddings that enter the first block.

    Args:
        rate: Probability that a coordinate is dropped; the others grow to keep the mean.
    """

    name: ClassVar[str] = "dropout"
    summary: ClassVar[str] = "cross-entropy with dropout on the embeddings"

    rate: float = option(0.1, "probability that a coordinate is dropped", most=0.9)

    def __post_init__(self):
        require(self)

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """Hooks the embeddings; in eval mode they pass unchanged."""

        def drop(x: Tensor) -> Tensor | None:
            return nn.functional.dropout(x, self.rate) if model.training else None

        return Attachment(hook_embeddings(model, drop).remove)


def _rms(x: Tensor) -> Tensor:
    return x.detach().float().square().mean().sqrt().to(x.dtype)


@torch.no_grad()
def through_law(x: Tensor, noise: Tensor, coupling: float) -> Tensor:
    r"""$J_t^{-1}$ times noise, `(B, T, D)`, with the $J_t$ of `InvariantBarrier` on embeddings x, without gradient."""
    with full_precision(x):
        valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        state = repulsive_state(x.float(), coupling, valid)
        blocks = JacobianBlocks(state)
        identity = torch.eye(x.shape[-1], device=x.device)
        parts = [
            each_matrix(torch.linalg.solve, identity - blocks.dense(rows), noise[:, rows].float().unsqueeze(-1))
            for rows in position_chunks(state, None, x.shape[-1])
        ]
    return torch.cat(parts, dim=1).squeeze(-1).to(noise.dtype)
