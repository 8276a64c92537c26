"""Training under adversarial noise on the embeddings: SMART, ALUM, FreeLB, SDBN."""

__all__ = ["ALUM", "SDBN", "FreeLB", "Smart", "divergence"]

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from support_tokens.models import Decoder
from support_tokens.regularizers.base import Regularizer, Term
from support_tokens.regularizers.options import option
from support_tokens.regularizers.passes import ExtraPass, Pass
from support_tokens.regularizers.watcher import ForwardWatcher

# Starts are drawn from the global generator, whose state a checkpoint of the Trainer holds, so a resumed run draws the
# same. Sizes are in units of the embeddings' root mean square, so that a radius carries over between models.

Direction = Callable[[Tensor], Tensor]
"""From the slope of the adversary's objective `(B, T, D)` to a step of unit size."""


def divergence(first: Tensor, second: Tensor) -> Tensor:
    r"""$\tfrac12 [KL(p\|q) + KL(q\|p)]$ of two predictions `(n, V)`, in nats, `(n,)`."""
    p, q = first.log_softmax(-1), second.log_softmax(-1)
    return 0.5 * ((p.exp() - q.exp()) * (p - q)).sum(-1)


def kullback_leibler(first: Tensor, second: Tensor) -> Tensor:
    r"""$KL(p\|q)$ of two predictions `(n, V)`, in nats, `(n,)`."""
    p, q = first.log_softmax(-1), second.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def embeddings_rms(x: Tensor, valid: Tensor) -> Tensor:
    """Root mean square of embeddings `(B, T, D)` over valid positions, without gradient, a scalar."""
    x = x.detach().float()
    return ((x * valid.unsqueeze(-1)).square().sum() / (valid.sum().clamp_min(1) * x.shape[-1])).sqrt()


def by_position(slope: Tensor) -> Tensor:
    """Each position's slope at a root mean square of 1; 0 where there is none."""
    return slope / slope.square().mean(-1, keepdim=True).sqrt().clamp_min(torch.finfo(slope.dtype).tiny)


def by_sequence(slope: Tensor) -> Tensor:
    """Each sequence's slope at a Frobenius norm of 1; 0 where there is none."""
    return slope / slope.flatten(1).norm(dim=1).clamp_min(torch.finfo(slope.dtype).tiny)[:, None, None]


def by_largest(slope: Tensor) -> Tensor:
    """Each sequence's slope with a largest entry of 1; 0 where there is none."""
    return slope / slope.abs().flatten(1).amax(1).clamp_min(torch.finfo(slope.dtype).tiny)[:, None, None]


@dataclass(frozen=True)
class Smart(Regularizer):
    r"""SMART's smoothness: $L = CE + \lambda \max_\delta\, \mathrm{mean}_t\, \tfrac12 [KL(p(x)\|p(x+\delta)) +
    KL(p(x+\delta)\|p(x))]$ over noise on the embeddings, and its proximal term.

    The adversary climbs from a random start of a hundredth of its size. Each position's noise is scaled to the norm of
    Gaussian noise of $\epsilon$ times the embeddings' RMS; the authors bound the largest entry of a sequence instead.
    With `bregman` the divergence from the predictions of the averaged weights $\bar\theta \leftarrow \beta \bar\theta +
    (1 - \beta)\theta$ joins, at the price of one more pass and a copy of the weights.

    Args:
        weight: $\lambda$, nats per nat and token.
        radius: $\epsilon$, in units of the embeddings' RMS.
        steps: Steps of gradient ascent.
        bregman: Weight of the proximal term within the penalty; 0: without it.
        momentum: $\beta$ of the averaged weights.
        every: The penalty counts at every so many steps, with so many times its weight.

    References:
        Jiang et al. 2020 (arXiv:1911.03437).
    """

    name: ClassVar[str] = "smart"
    kind: ClassVar = "rival"
    summary: ClassVar[str] = "cross-entropy with SMART's smoothness under adversarial noise"

    weight: float = option(1.0, "weight of the divergence")
    radius: float = option(0.1, "size of the adversarial noise, in units of the embeddings' RMS")
    steps: int = option(1, "steps of gradient ascent", least=1)
    bregman: float = option(0.0, "weight of the proximal term within the penalty")
    momentum: float = option(0.99, "momentum of the averaged weights", most=1.0)
    every: int = option(1, "count at every so many steps", least=1)

    def bind(self, site: Decoder, watcher: ForwardWatcher, seed: int) -> Term:
        """See `Regularizer.bind`."""
        return _SmartTerm(self, site)


class _Adversary(Term):
    """A term whose penalty runs the model under noise that climbs a slope."""

    runs_again = True

    def __init__(self, name: str, weight: float, every: int, radius: float) -> None:
        super().__init__(name, weight, every)
        self.radius = radius

    def adversarial(self, forward: Pass) -> ExtraPass:
        """The pass under the adversary's noise; made once for all who read it."""
        return forward.again(self, lambda: self.attack(forward))

    def attack(self, forward: Pass) -> ExtraPass:
        """Find the noise, and run the model under it."""
        raise NotImplementedError(f"{self.name} has no attack")

    def size(self, forward: Pass, x: Tensor) -> Tensor:
        """The noise's size per entry."""
        return self.radius * embeddings_rms(x, forward.valid(x)).to(x.dtype)

    @staticmethod
    def slope(value: Tensor, noise: Tensor, *, keep: bool = False) -> Tensor:
        """Gradient of the adversary's objective."""
        (slope,) = torch.autograd.grad(value, noise, retain_graph=keep)
        return slope


class _SmartTerm(_Adversary):
    def __init__(self, smart: Smart, site: Decoder) -> None:
        super().__init__(smart.name, smart.weight, smart.every, smart.radius)
        self.ascents, self.bregman, self.momentum = smart.steps, smart.bregman, smart.momentum
        self._site = (site,)
        model = site.causal_model
        self.average = {n: p.detach().clone() for n, p in model.named_parameters()} if self.bregman else {}

    @torch.compiler.disable
    def penalty(self, forward: Pass) -> Tensor:
        """Mean divergence between the predictions with and without noise."""
        clean = forward.scored(forward.logits)
        noisy = forward.scored(self.adversarial(forward).logits)
        value = forward.item_mean(divergence(clean, noisy))
        if not self.bregman:
            return value
        with torch.no_grad():
            before = forward.scored(forward.rerun(parameters=self.average).logits)
        return value + self.bregman * forward.item_mean(divergence(clean, before))

    def attack(self, forward: Pass) -> ExtraPass:
        """See `_Adversary.attack`."""
        clean, noise = forward.scored(forward.logits).detach(), None
        for _ in range(self.ascents):
            climbing: list[Tensor] = []

            def under(x: Tensor, noise: Tensor | None = noise, kept: list[Tensor] = climbing) -> Tensor:
                start = 1e-2 * self.size(forward, x) * torch.randn_like(x) if noise is None else noise
                kept.append(start.requires_grad_())
                return x.detach() + start

            gap = forward.item_mean(divergence(clean, forward.scored(forward.rerun(under).logits)))
            noise = self.size(forward, forward.clean_embeddings()) * by_position(self.slope(gap, climbing[0]))
        found = noise
        return forward.rerun(lambda x: x if found is None else x + found)

    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Moves the averaged weights."""
        for name, parameter in self._site[0].causal_model.named_parameters():
            if name in self.average:
                self.average[name].lerp_(parameter, 1 - self.momentum)

    def tensors(self) -> dict[str, Tensor]:
        """The averaged weights."""
        return {f"average.{name}": value for name, value in self.average.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes up the averaged weights."""
        for name, value in self.average.items():
            value.copy_(tensors[f"average.{name}"])


@dataclass(frozen=True)
class ALUM(Regularizer):
    r"""ALUM's virtual adversarial training: $L = CE + \lambda\, \mathrm{mean}_t\, [KL(\bar p(x)\|p(x+\delta)) +
    KL(\bar p(x+\delta)\|p(x))]$ after several steps of ascent within a box, with a bar where no gradient flows.

    Args:
        weight: $\lambda$, nats per nat and token.
        radius: Bound of the noise's entries, in units of the embeddings' RMS.
        step: Step of the ascent, in units of the radius.
        steps: Steps of gradient ascent.
        every: The penalty counts at every so many steps, with so many times its weight.

    References:
        Liu et al. 2020 (arXiv:2004.08994), with the detached targets of its released code.
    """

    name: ClassVar[str] = "alum"
    kind: ClassVar = "rival"
    summary: ClassVar[str] = "cross-entropy with ALUM's virtual adversarial training"

    weight: float = option(1.0, "weight of the divergence")
    radius: float = option(0.1, "bound of the noise's entries, in units of the embeddings' RMS")
    step: float = option(1.0, "step of the ascent, in units of the radius")
    steps: int = option(1, "steps of gradient ascent", least=1)
    every: int = option(1, "count at every so many steps", least=1)

    def bind(self, site: Decoder, watcher: ForwardWatcher, seed: int) -> Term:
        """See `Regularizer.bind`."""
        return _AlumTerm(self)


class _AlumTerm(_Adversary):
    def __init__(self, alum: ALUM) -> None:
        super().__init__(alum.name, alum.weight, alum.every, alum.radius)
        self.step, self.ascents = alum.step, alum.steps

    @torch.compiler.disable
    def penalty(self, forward: Pass) -> Tensor:
        """Mean divergence both ways, each from a prediction without gradient."""
        clean = forward.scored(forward.logits)
        noisy = forward.scored(self.adversarial(forward).logits)
        both = kullback_leibler(clean.detach(), noisy) + kullback_leibler(noisy.detach(), clean)
        return forward.item_mean(both)

    def attack(self, forward: Pass) -> ExtraPass:
        """See `_Adversary.attack`."""
        x = forward.clean_embeddings()
        clean, bound = forward.scored(forward.logits).detach(), self.size(forward, x)
        noise = 1e-2 * bound * torch.randn_like(x)
        for _ in range(self.ascents):
            start = noise.detach().requires_grad_()
            extra = forward.rerun(lambda x, start=start: x.detach() + start)
            gap = forward.item_mean(kullback_leibler(clean, forward.scored(extra.logits)))
            moved = noise + self.step * bound * by_largest(self.slope(gap, start))
            noise = torch.minimum(torch.maximum(moved, -bound), bound)
        return forward.rerun(lambda x: x + noise)


@dataclass(frozen=True)
class FreeLB(Regularizer):
    r"""FreeLB: the mean of K cross-entropies under noise that climbs between them, in place of the clean one:
    $L = CE + w\, [\tfrac1K \sum_k CE(x + \delta_k) - CE]$.

    Noise starts uniform and is bounded in the Frobenius norm of each sequence of L tokens: sizes are in units of
    $\mathrm{rms}(x) \sqrt{L D}$, the norm of embeddings themselves. Each of the K passes draws a dropout of its own.

    Args:
        weight: $w$; 1 is FreeLB, less keeps a part of the clean cross-entropy.
        radius: Largest norm of the noise.
        start: Bound of the uniform start's entries, in units of the embeddings' RMS.
        step: Step of the ascent.
        steps: K.

    References:
        Zhu et al. 2020 (arXiv:1909.11764).
    """

    name: ClassVar[str] = "freelb"
    kind: ClassVar = "rival"
    summary: ClassVar[str] = "FreeLB: cross-entropy under several steps of adversarial noise"

    weight: float = option(1.0, "part of the loss that is adversarial", most=1.0)
    radius: float = option(0.1, "largest norm of the noise, in units of the embeddings'")
    start: float = option(0.02, "bound of the uniform start, in units of the embeddings' RMS")
    step: float = option(0.05, "step of the ascent, in units of the embeddings' norm")
    steps: int = option(2, "steps, each a forward and a backward pass", least=1)

    def bind(self, site: Decoder, watcher: ForwardWatcher, seed: int) -> Term:
        """See `Regularizer.bind`."""
        return _FreeLBTerm(self)


class _FreeLBTerm(_Adversary):
    replaces_loss = True

    def __init__(self, freelb: FreeLB) -> None:
        super().__init__(freelb.name, freelb.weight, 1, freelb.radius)
        self.start, self.step, self.ascents = freelb.start, freelb.step, freelb.steps

    @torch.compiler.disable
    def penalty(self, forward: Pass) -> Tensor:
        """Mean of the cross-entropies under noise."""
        return forward.again((self, "losses"), lambda: self._climb(forward)).loss - forward.baseline()

    def attack(self, forward: Pass) -> ExtraPass:
        """The last of the K passes."""
        return forward.again((self, "losses"), lambda: self._climb(forward))

    def _climb(self, forward: Pass) -> ExtraPass:
        x = forward.clean_embeddings()
        valid = forward.valid(x).unsqueeze(-1)
        unit = embeddings_rms(x, valid.squeeze(-1)).to(x.dtype)
        norm = unit * (valid.sum((1, 2)).to(x.dtype) * x.shape[-1]).sqrt()[:, None, None]
        noise = self.start * unit * (2 * torch.rand_like(x) - 1) * valid
        losses = []
        for k in range(self.ascents):
            climbing = noise.detach().requires_grad_()
            extra = forward.rerun(lambda x, climbing=climbing: x + climbing)
            losses.append(forward.loss_of(extra.logits))
            if k + 1 < self.ascents:
                moved = noise + self.step * norm * by_sequence(self.slope(losses[-1], climbing, keep=True)) * valid
                length = moved.flatten(1).norm(dim=1)[:, None, None]
                noise = moved * (self.radius * norm / length.clamp_min(torch.finfo(x.dtype).tiny)).clamp_max(1.0)
        extra.loss = torch.stack(losses).mean()
        return extra


@dataclass(frozen=True)
class SDBN(Regularizer):
    r"""The embedding part of SDBN: cross-entropy under one signed gradient step on the embeddings, in place of the
    clean one: $L = CE + w\, [CE(x + \epsilon\, \mathrm{sign}\, \nabla_x CE) - CE]$.

    Args:
        weight: $w$; 1 is the authors'.
        radius: $\epsilon$ in units of the embeddings' RMS (theirs is 1e-4, absolute).

    References:
        Cohen, Simai and Shaham 2026 (arXiv:2606.10610), after its released code; its first clean epochs are left to the
        user, who attaches it later.
    """

    name: ClassVar[str] = "sdbn"
    kind: ClassVar = "rival"
    summary: ClassVar[str] = "SDBN: cross-entropy under one signed gradient step on the embeddings"

    weight: float = option(1.0, "part of the loss that is adversarial", most=1.0)
    radius: float = option(0.05, "size of the step, in units of the embeddings' RMS")

    def bind(self, site: Decoder, watcher: ForwardWatcher, seed: int) -> Term:
        """See `Regularizer.bind`."""
        return _SDBNTerm(self.name, self.weight, 1, self.radius)


class _SDBNTerm(_Adversary):
    replaces_loss = True

    @torch.compiler.disable
    def penalty(self, forward: Pass) -> Tensor:
        """Cross-entropy under the step."""
        return forward.loss_of(self.adversarial(forward).logits) - forward.baseline()

    def attack(self, forward: Pass) -> ExtraPass:
        """See `_Adversary.attack`."""
        x = forward.clean_embeddings()
        still = torch.zeros_like(x).requires_grad_()
        loss = forward.loss_of(forward.rerun(lambda x: x.detach() + still).logits)
        noise = self.size(forward, x) * self.slope(loss, still).sign()
        return forward.rerun(lambda x: x + noise)
