"""Regularizers that act on weights: size and decay of the embeddings, spectral norms of attention."""

__all__ = ["EmbeddingDecay", "EmbeddingScale", "SigmaReparam", "SpectralNorm"]

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

from support_tokens.errors import UnsupportedModelError
from support_tokens.models import Decoder
from support_tokens.regularizers.base import Regularizer, Term
from support_tokens.regularizers.options import option
from support_tokens.regularizers.watcher import ForwardWatcher


class _WeightTerm(Term):
    has_penalty = False

    def __init__(self, name: str, undo: Callable[[], None] = lambda: None) -> None:
        super().__init__(name)
        self._undo = undo

    def remove(self) -> None:
        """Leaves the weights that its function gives."""
        self._undo()


@dataclass(frozen=True)
class EmbeddingScale(Regularizer):
    """Larger embeddings at the start: every embedding table, of tokens and of positions, times a factor.

    The control of all robustness under noise of fixed size: it does nothing but change the scale. It is a choice of
    initial weights, which `remove` does not take back, and it would ruin a model that is trained already.

    Args:
        factor: Factor of the initial weights; 10 makes 0.2 of GPT-2's 0.02.
    """

    name: ClassVar[str] = "scale"
    kind: ClassVar = "control"
    summary: ClassVar[str] = "cross-entropy from larger initial embeddings"

    factor: float = option(10.0, "factor of the initial embeddings")

    def bind(self, site: Decoder, watcher: ForwardWatcher, seed: int) -> Term:
        """Multiplies the tables; a run that is resumed then reads its own.

        Raises:
            UnsupportedModelError: The model was loaded from a checkpoint.
        """
        _check_fresh(site, self.name, "train it from scratch, or leave scale out")
        with torch.no_grad():
            for table in _tables(site):
                table.weight.mul_(self.factor)
        return _WeightTerm(self.name)


@dataclass(frozen=True)
class EmbeddingDecay(Regularizer):
    r"""Decoupled weight decay on the embedding tables, besides that of the optimiser: $w \leftarrow (1 - \eta\,d)\, w$
    before each step of learning rate $\eta$.

    Args:
        decay: $d$.

    References:
        Loshchilov and Hutter 2019 (arXiv:1711.05101).
    """

    name: ClassVar[str] = "decay"
    kind: ClassVar = "rival"
    summary: ClassVar[str] = "cross-entropy with more weight decay on the embeddings"

    decay: float = option(1.0, "decay of the embeddings, besides that of the optimiser")

    def bind(self, site: Decoder, watcher: ForwardWatcher, seed: int) -> Term:
        """See `Regularizer.bind`.

        Raises:
            UnsupportedModelError: No embedding table is trained.
        """
        tables = [table for table in _tables(site) if table.weight.requires_grad]
        if not tables:
            raise UnsupportedModelError(
                "an embedding table must be trained for decay, received none that is (LoRA freezes them); leave it out."
            )
        return _DecayTerm(self, tables)


class _DecayTerm(_WeightTerm):
    def __init__(self, decay: EmbeddingDecay, tables: list[nn.Embedding]) -> None:
        super().__init__(decay.name)
        self.decay, self._tables = decay.decay, tuple(tables)

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Decays the tables at the learning rate of their group."""
        for group in optimizer.param_groups:
            held = {id(parameter) for parameter in group["params"]}
            for table in self._tables:
                if id(table.weight) in held:
                    table.weight.mul_(1 - group["lr"] * self.decay)


@dataclass(frozen=True)
class SpectralNorm(Regularizer):
    r"""Every matrix of attention divided by its largest singular value: $W / \sigma(W)$, by power iteration.

    It changes what the model computes, so that it is for training from scratch.

    References:
        Miyato et al. 2018 (arXiv:1802.05957); `torch.nn.utils.parametrizations.spectral_norm`.
    """

    name: ClassVar[str] = "spectral"
    kind: ClassVar = "rival"
    summary: ClassVar[str] = "cross-entropy with attention of spectral norm one"

    def bind(self, site: Decoder, watcher: ForwardWatcher, seed: int) -> Term:
        """Parametrizes the matrices; `remove` leaves the normalised ones.

        Raises:
            UnsupportedModelError: The model was loaded from a checkpoint, or has no matrices of attention.
        """
        _check_fresh(site, self.name, "use sigma-reparam, which starts from the model's own function")
        return _WeightTerm(self.name, _normalised(_attention_matrices(site), seed))


@dataclass(frozen=True)
class SigmaReparam(Regularizer):
    r"""$\sigma$-reparametrised attention: every matrix of attention is $\gamma\, W / \sigma(W)$ with a learned
    $\gamma$.

    $\gamma$ begins at $\sigma(W)$, so that training starts from the model's own function.

    References:
        Zhai et al. 2023 (arXiv:2303.06296).
    """

    name: ClassVar[str] = "sigma-reparam"
    kind: ClassVar = "rival"
    summary: ClassVar[str] = "cross-entropy with sigma-reparametrised attention"

    def bind(self, site: Decoder, watcher: ForwardWatcher, seed: int) -> Term:
        """Parametrizes the matrices; `remove` leaves the matrices that result."""
        matrices = _attention_matrices(site)
        norms = [float(torch.linalg.matrix_norm(matrix.weight.detach().float())) for matrix in matrices]
        remove = _normalised(matrices, seed)
        for matrix, norm in zip(matrices, norms, strict=True):
            with _settled(matrix):
                gain = norm / float(torch.linalg.matrix_norm(matrix.weight.detach().float()))
            parametrize.register_parametrization(matrix, "weight", _Gain(gain))
        return _WeightTerm(self.name, remove)


class _Gain(nn.Module):
    """A matrix times a learned number."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain))

    def forward(self, weight: Tensor) -> Tensor:
        return self.gain * weight


class _settled:
    """A context in which reading a parametrized weight makes no step of power iteration."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.training = module, module.training

    def __enter__(self) -> None:
        self.module.eval()

    def __exit__(self, *exception: object) -> None:
        self.module.train(self.training)


def _check_fresh(site: Decoder, name: str, instead: str) -> None:
    """Regularizers of the initial function would ruin weights that were loaded."""
    path = getattr(site.causal_model, "name_or_path", "")
    if path:
        raise UnsupportedModelError(
            f"the model must be freshly initialised for {name}, received one loaded from '{path}', whose function it "
            f"would destroy; {instead}."
        )


def _tables(site: Decoder) -> list[nn.Embedding]:
    return [module for module in site.causal_model.modules() if isinstance(module, nn.Embedding)]


def _attention_matrices(site: Decoder) -> list[Any]:
    """Modules inside of attention whose weight is a matrix, each once."""

    def found() -> Iterator[nn.Module]:
        for block in site.blocks:
            for attention in block.modules():
                if "Attention" in type(attention).__name__:
                    yield from (m for m in attention.modules() if getattr(m, "weight", torch.empty(0)).dim() == 2)

    matrices = list(dict.fromkeys(found()))
    if not matrices:
        raise UnsupportedModelError(
            f"the model must have attention modules with matrices for a spectral norm, received "
            f"{type(site.causal_model).__name__} with none; use another regularizer."
        )
    return matrices


def _normalised(matrices: list[Any], seed: int) -> Callable[[], None]:
    with torch.random.fork_rng(devices=[]):  # the power iteration begins with random vectors
        torch.manual_seed(seed)
        for matrix in matrices:
            spectral_norm(matrix, "weight")

    def remove() -> None:
        for matrix in matrices:
            with _settled(matrix):
                parametrize.remove_parametrizations(matrix, "weight", leave_parametrized=True)

    return remove
