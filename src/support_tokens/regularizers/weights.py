"""Arms that act on weights: size and decay of the embeddings, spectral norms of attention."""

__all__ = ["EmbeddingDecay", "EmbeddingScale", "SigmaReparam", "SpectralNorm"]

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
from transformers import TrainerCallback

from support_tokens.errors import UnsupportedModelError
from support_tokens.models import decoder_blocks
from support_tokens.regularizers.base import Attachment, option, require


@dataclass(frozen=True)
class EmbeddingScale:
    """Larger embeddings at the start: every embedding table, of tokens and of positions, times a factor.

    The control of all robustness under noise of fixed size: it does nothing but change the scale.

    Args:
        factor: Factor of the initial weights; 10 makes 0.2 of GPT-2's 0.02.
    """

    name: ClassVar[str] = "scale"
    summary: ClassVar[str] = "cross-entropy from larger initial embeddings"

    factor: float = option(10.0, "factor of the initial embeddings")

    def __post_init__(self):
        require(self)

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """Multiplies the tables; a run that is resumed then reads its own."""
        with torch.no_grad():
            for table in _tables(model):
                table.weight.mul_(self.factor)
        return Attachment()


@dataclass(frozen=True)
class EmbeddingDecay:
    r"""Decoupled weight decay on the embedding tables, besides that of the plan: $w \leftarrow (1 - \eta\,d)\, w$
    before each step of learning rate $\eta$.

    Args:
        decay: $d$.

    References:
        Loshchilov and Hutter 2019 (arXiv:1711.05101).
    """

    name: ClassVar[str] = "decay"
    summary: ClassVar[str] = "cross-entropy with more weight decay on the embeddings"

    decay: float = option(1.0, "decay of the embeddings, besides that of the plan")

    def __post_init__(self):
        require(self)

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """Decays at every step of the optimiser."""
        return Attachment(callbacks=(_Decay(_tables(model), self.decay),))


@dataclass(frozen=True)
class SpectralNorm:
    r"""Every matrix of attention divided by its largest singular value: $W / \sigma(W)$, by power iteration.

    References:
        Miyato et al. 2018 (arXiv:1802.05957); `torch.nn.utils.parametrizations.spectral_norm`.
    """

    name: ClassVar[str] = "spectral"
    summary: ClassVar[str] = "cross-entropy with attention of spectral norm one"

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """Parametrizes the matrices; `remove` leaves the normalised ones."""
        return Attachment(_normalised(model, seed))


@dataclass(frozen=True)
class SigmaReparam:
    r"""$\sigma$-reparametrised attention: every matrix of attention is $\gamma\, W / \sigma(W)$ with a learned
    $\gamma$.

    $\gamma$ begins at $\sigma(W)$, so that the run starts from the very function that the other arms start from.

    References:
        Zhai et al. 2023 (arXiv:2303.06296).
    """

    name: ClassVar[str] = "sigma-reparam"
    summary: ClassVar[str] = "cross-entropy with sigma-reparametrised attention"

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """Parametrizes the matrices; `remove` leaves the matrices that result."""
        matrices = _attention_matrices(model)
        norms = [float(torch.linalg.matrix_norm(matrix.weight.detach().float())) for matrix in matrices]  # type: ignore[union-attr]
        remove = _normalised(model, seed)
        for matrix, norm in zip(matrices, norms, strict=True):
            with _settled(matrix):
                gain = norm / float(torch.linalg.matrix_norm(matrix.weight.detach().float()))  # type: ignore[union-attr]
            parametrize.register_parametrization(matrix, "weight", _Gain(gain))
        return Attachment(remove)


class _Gain(nn.Module):
    """A matrix times a learned number."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain))

    def forward(self, weight: Tensor) -> Tensor:
        return self.gain * weight


class _Decay(TrainerCallback):
    def __init__(self, tables: list[nn.Embedding], decay: float) -> None:
        self.tables, self.decay = tables, decay

    @torch.no_grad()
    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs) -> None:
        rate = optimizer.param_groups[0]["lr"]  # type: ignore[union-attr]
        for table in self.tables:
            table.weight.mul_(1 - rate * self.decay)


class _settled:
    """A context in which reading a parametrized weight makes no step of power iteration."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.training = module, module.training

    def __enter__(self) -> None:
        self.module.eval()

    def __exit__(self, *exception: object) -> None:
        self.module.train(self.training)


def _tables(model: nn.Module) -> list[nn.Embedding]:
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


def _attention_matrices(model: nn.Module) -> list[nn.Module]:
    """Modules inside of attention whose weight is a matrix, each once."""

    def found() -> Iterator[nn.Module]:
        for block in decoder_blocks(model):
            for attention in block.modules():
                if "Attention" in type(attention).__name__:
                    yield from (m for m in attention.modules() if getattr(m, "weight", torch.empty(0)).dim() == 2)

    matrices = list(dict.fromkeys(found()))
    if not matrices:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no attention module with matrices that a spectral norm could be put on; train "
            "another arm, or a GPT-2."
        )
    return matrices


def _normalised(model: nn.Module, seed: int) -> Callable[[], None]:
    matrices = _attention_matrices(model)
    with torch.random.fork_rng(devices=[]):  # the power iteration begins with random vectors
        torch.manual_seed(seed)
        for matrix in matrices:
            spectral_norm(matrix, "weight")

    def remove() -> None:
        for matrix in matrices:
            with _settled(matrix):
                parametrize.remove_parametrizations(matrix, "weight", leave_parametrized=True)

    return remove
