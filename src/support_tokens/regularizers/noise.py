"""Regularizers that disturb the embeddings in training: Gaussian noise, NEFTune, dropout."""

__all__ = ["EmbeddingDropout", "NEFTune", "Noise"]

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from support_tokens.models import Decoder
from support_tokens.regularizers.adversarial import embeddings_rms
from support_tokens.regularizers.base import Regularizer, Term
from support_tokens.regularizers.options import option
from support_tokens.regularizers.watcher import ForwardWatcher

# Noise is drawn from the global generator, whose state a checkpoint of the Trainer holds, so a resumed run draws the
# same; and gradient checkpointing, which gives that generator its state again, repeats the very noise.


class _Noisy(Term):
    """A term that only changes the embeddings that enter the first block."""

    has_penalty = False
    changes_embeddings = True


@dataclass(frozen=True)
class Noise(Regularizer):
    r"""Gaussian noise on the embeddings in training: $x_t + s\, u\, \epsilon_t$, $\epsilon_t$ standard, with $u$ the
    embeddings' RMS (`relative`) or 1 (`absolute`).

    The root mean square of the batch's embeddings is detached: no gradient asks the model to resize them in order to
    change the noise. Under absolute noise the model can make itself robust by larger embeddings.

    Args:
        scale: $s$, standard deviation of the noise in units of `unit`.
        unit: `relative` or `absolute`.
    """

    name: ClassVar[str] = "noise"
    kind: ClassVar = "rival"
    summary: ClassVar[str] = "cross-entropy under Gaussian embedding noise in training"

    scale: float = option(0.2, "standard deviation of the noise")
    unit: str = option(
        "relative", "relative: in units of the embeddings' RMS; absolute: as it is", choices=("relative", "absolute")
    )

    def bind(self, site: Decoder, watcher: ForwardWatcher, seed: int) -> Term:
        """See `Regularizer.bind`."""
        return _NoiseTerm(self)


class _NoiseTerm(_Noisy):
    def __init__(self, noise: Noise) -> None:
        super().__init__(noise.name)
        self.scale, self.relative = noise.scale, noise.unit == "relative"

    def change(self, x: Tensor, valid: Tensor) -> Tensor:
        """Adds the noise."""
        if not self.scale:
            return x
        size = embeddings_rms(x, valid).to(x.dtype) if self.relative else 1.0
        return x + self.scale * size * torch.randn_like(x)


@dataclass(frozen=True)
class EmbeddingDropout(Regularizer):
    """Dropout on the embeddings that enter the first block.

    Args:
        rate: Probability that a coordinate is dropped; the others grow to keep the mean.
    """

    name: ClassVar[str] = "dropout"
    kind: ClassVar = "rival"
    summary: ClassVar[str] = "cross-entropy with dropout on the embeddings"

    rate: float = option(0.1, "probability that a coordinate is dropped", most=0.9)

    def bind(self, site: Decoder, watcher: ForwardWatcher, seed: int) -> Term:
        """See `Regularizer.bind`."""
        return _DropoutTerm(self)


class _DropoutTerm(_Noisy):
    def __init__(self, dropout: EmbeddingDropout) -> None:
        super().__init__(dropout.name)
        self.rate = dropout.rate

    def change(self, x: Tensor, valid: Tensor) -> Tensor:
        """Drops coordinates."""
        return nn.functional.dropout(x, self.rate) if self.rate else x


@dataclass(frozen=True)
class NEFTune(Regularizer):
    r"""Uniform noise on the token embeddings, $U(-a, a)$ with $a = \alpha / \sqrt{T D}$, as transformers and TRL add it
    with `neftune_noise_alpha`: T is the padded length.

    Args:
        alpha: $\alpha$.

    References:
        Jain et al. 2023 (arXiv:2310.05914).
    """

    name: ClassVar[str] = "neftune"
    kind: ClassVar = "rival"
    summary: ClassVar[str] = "cross-entropy under NEFTune's uniform embedding noise"

    alpha: float = option(5.0, "alpha: the noise is uniform up to alpha / sqrt(T D)")

    def bind(self, site: Decoder, watcher: ForwardWatcher, seed: int) -> Term:
        """See `Regularizer.bind`."""
        return _NEFTuneTerm(self, site, watcher)


class _NEFTuneTerm(Term):
    has_penalty = False

    def __init__(self, neftune: NEFTune, site: Decoder, watcher: ForwardWatcher) -> None:
        super().__init__(neftune.name)
        self.alpha, self._watcher = neftune.alpha, (watcher,)
        self._hook: RemovableHandle = site.embedding.register_forward_hook(self._disturb)

    def _disturb(self, _module: nn.Module, _args: tuple, output: Tensor) -> Tensor | None:
        if not self.training or not self.alpha or self._watcher[0].running_again:
            return None
        bound = self.alpha / (output.shape[1] * output.shape[2]) ** 0.5
        return output + torch.empty_like(output).uniform_(-bound, bound)

    def remove(self) -> None:
        """Takes the hook off."""
        self._hook.remove()
