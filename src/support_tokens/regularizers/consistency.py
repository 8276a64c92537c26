"""Arms that ask for the same prediction twice: under two dropouts (R-Drop), and under adversarial noise (SMART)."""

__all__ = ["SMART", "RDrop"]

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from support_tokens.models import hook_embeddings
from support_tokens.regularizers.base import Attachment, option, require


@dataclass(frozen=True)
class RDrop:
    r"""R-Drop: two passes under two dropouts, $L = \tfrac12 (CE_1 + CE_2) + \alpha\, \tfrac12 [KL(p_1\|p_2) +
    KL(p_2\|p_1)]$.

    Args:
        weight: $\alpha$.
        dropout: Rate of every dropout layer of the model in this arm, whatever the plan says.

    References:
        Wu et al. 2021 (arXiv:2106.14448).
    """

    name: ClassVar[str] = "rdrop"
    summary: ClassVar[str] = "cross-entropy with R-Drop's consistency of two dropouts"

    weight: float = option(1.0, "weight of the divergence between the two passes")
    dropout: float = option(0.1, "rate of all dropout layers in this arm", most=0.9)

    def __post_init__(self):
        require(self)

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """Sets the dropout; a second pass joins the loss in train mode."""
        layers = [module for module in model.modules() if isinstance(module, nn.Dropout)]
        before = [layer.p for layer in layers]
        for layer in layers:
            layer.p = self.dropout

        def remove() -> None:
            for layer, rate in zip(layers, before, strict=True):
                layer.p = rate

        def penalty(model: nn.Module, inputs: Mapping[str, Tensor], outputs: Any) -> Tensor:
            first, second = _scored(outputs.logits, inputs), _scored(_logits(model, inputs), inputs)
            targets = _targets(inputs)
            losses = [nn.functional.cross_entropy(logits, targets) for logits in (first, second)]
            return 0.5 * (losses[1] - losses[0]) + self.weight * _divergence(first, second)

        return Attachment(remove, penalty=penalty)


@dataclass(frozen=True)
class SMART:
    r"""SMART's smoothness: $L = CE + \lambda \max_{\|\delta_t\| \le \epsilon \sqrt D} \tfrac12 [KL(p(x)\|p(x+\delta))
    + KL(p(x+\delta)\|p(x))]$ over noise on the embeddings, by one step of gradient ascent from a random start.

    Args:
        weight: $\lambda$.
        radius: $\epsilon$ in units of the embeddings' RMS: a position's noise has the norm of Gaussian noise of that
            deviation.

    References:
        Jiang et al. 2020 (arXiv:1911.03437), without its Bregman proximal term.
    """

    name: ClassVar[str] = "smart"
    summary: ClassVar[str] = "cross-entropy with SMART's smoothness under adversarial noise"

    weight: float = option(1.0, "weight of the divergence")
    radius: float = option(0.1, "size of the adversarial noise, in units of the embeddings' RMS")

    def __post_init__(self):
        require(self)

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """Hooks the embeddings for the passes with noise, which join the loss in train mode."""
        present: list[Callable[[Tensor], Tensor] | None] = [None]
        handle = hook_embeddings(model, lambda x: None if present[0] is None else present[0](x))

        def under(noise: Callable[[Tensor], Tensor], model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
            present[0] = noise
            try:
                return _scored(_logits(model, inputs), inputs)
            finally:
                present[0] = None

        def penalty(model: nn.Module, inputs: Mapping[str, Tensor], outputs: Any) -> Tensor:
            clean, start, sizes = _scored(outputs.logits, inputs), [], []

            def begin(x: Tensor) -> Tensor:
                sizes.append(self.radius * x.detach().square().mean().sqrt())
                start.append((1e-2 * sizes[0] * torch.randn_like(x)).requires_grad_())
                return x.detach() + start[0]

            gap = _divergence(clean.detach(), under(begin, model, inputs))
            (slope,) = torch.autograd.grad(gap, start[0])
            # Size by position: each step away from zero is scaled to the norm that Gaussian noise has there.
            unit = slope / slope.square().mean(-1, keepdim=True).sqrt().clamp_min(torch.finfo(slope.dtype).tiny)
            noise = sizes[0] * unit
            return self.weight * _divergence(clean, under(lambda x: x + noise, model, inputs))

        return Attachment(handle.remove, penalty=penalty)


def _logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    return model(**{key: value for key, value in inputs.items() if key in ("input_ids", "attention_mask")}).logits


def _targets(inputs: Mapping[str, Tensor]) -> Tensor:
    labels = inputs["labels"][:, 1:]
    return labels[labels != -100]


def _scored(logits: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Logits `(n, V)` of the scored tokens."""
    return logits[:, :-1][inputs["labels"][:, 1:] != -100].float()


def _divergence(first: Tensor, second: Tensor) -> Tensor:
    """Mean over tokens of half the sum of both Kullback-Leibler divergences, in nats."""
    p, q = first.log_softmax(-1), second.log_softmax(-1)
    return 0.5 * ((p.exp() - q.exp()) * (p - q)).sum(-1).mean()
