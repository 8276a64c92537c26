r"""Adversarial embedding noise: gradient ascent on the loss at the norm of Gaussian noise."""

__all__ = ["AdversarialNoise"]

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.models import hook_embeddings
from support_tokens.robustness.perturbations.base import Batch, Read, token_logits, token_nats
from support_tokens.robustness.perturbations.embeddings import ScaledNoise, check_scaled_sigma


@dataclass(frozen=True)
class AdversarialNoise(ScaledNoise):
    r"""Worst embedding noise found in `steps` gradient steps, of the expected norm of Gaussian noise of `sigma`.

    The noise $\delta$ of a sequence of $T$ tokens is sought on the sphere

    $$ \lVert \delta \rVert = \sigma s \sqrt{T D} \;\;(\texttt{norm="sequence"}) \qquad\text{or}\qquad
       \lVert \delta_t \rVert = \sigma s \sqrt{D} \text{ at every } t \;\;(\texttt{norm="position"}), $$

    the root of the expected squared norm of `EmbeddingNoise(sigma, scale)`, with $s$ as there. Step 1 goes from the
    clean embeddings along the gradient of the sequence's loss to the sphere (the fast gradient method in $L_2$). Each
    further step moves by half the radius along the gradient at the current point and projects back to the sphere. The
    point of the largest loss is used, so more steps are never weaker. There is no randomness and no seed. The noise
    follows the gradient of the arm it attacks, so arms face the same attack, not the same noise.

    Args:
        sigma: As in `EmbeddingNoise`.
        scale: As in `EmbeddingNoise`.
        steps: Gradient steps, at least 1, each of one forward and backward pass.
        norm: Whether the norm is that of the whole sequence, or the same at every position.

    Raises:
        ArgumentError: `sigma` is not finite and positive, `scale` or `norm` is unknown, or `steps` is below 1.

    References:
        Goodfellow et al. 2015 (arXiv:1412.6572); Madry et al. 2018 (arXiv:1706.06083).

    Example:
        >>> AdversarialNoise(0.5).name, AdversarialNoise(0.1, "matched", steps=5).name
        ('worst case 0.5, 1 step', 'worst case 0.1 x RMS, 5 steps')
    """

    steps: int = 1
    norm: Literal["sequence", "position"] = "sequence"
    kind: ClassVar[str] = "worst_case"

    def __post_init__(self) -> None:
        check_scaled_sigma(self.sigma, self.scale, "worst-case noise")
        if not (isinstance(self.steps, int) and self.steps >= 1):
            raise ArgumentError(f"The steps of worst-case noise must be at least 1, received {self.steps!r}; pass 1.")
        if self.norm not in ("sequence", "position"):
            raise ArgumentError(
                f"The norm of worst-case noise must be 'sequence' or 'position', received {self.norm!r}; "
                "pass 'sequence'."
            )

    @property
    def name(self) -> str:
        """`worst case SIGMA[ x RMS], N steps[ by position]`."""
        unit = " x RMS" if self.scale == "matched" else ""
        where = " by position" if self.norm == "position" else ""
        return f"worst case {self.sigma:g}{unit}, {self.steps} step{'s' * (self.steps > 1)}{where}"

    @property
    def family(self) -> str:
        """One curve for each scale, number of steps and norm."""
        return f"{self.kind}/{self.scale}/{self.norm}/{self.steps}"

    @property
    def passes(self) -> int:
        """Cost in clean forward passes: three a gradient step, one to judge the last step, one to measure."""
        return 3 * self.steps + (2 if self.steps > 1 else 1)

    @contextmanager
    def applied(self, model: nn.Module, rms: float) -> Iterator[Read]:
        """Searches in the yielded function, and adds the noise in the next forward pass."""
        deviation = self.deviation(rms)
        present: list[Tensor | None] = [None]

        def add(x: Tensor) -> Tensor:
            if present[0] is None:
                present[0] = torch.zeros_like(x, requires_grad=torch.is_grad_enabled())
            return x + present[0]

        def gradient(batch: Batch, noise: Tensor | None) -> tuple[Tensor, Tensor]:
            """Nats of each sequence `(B,)`, and their gradient in the noise."""
            with torch.enable_grad():
                present[0] = None if noise is None else noise.detach().requires_grad_()
                nats = token_nats(token_logits(model, batch), batch).double().sum(-1)
                assert present[0] is not None, "the hook has run"
                (slope,) = torch.autograd.grad(nats.sum(), present[0])
            return nats.detach(), slope

        def read(batch: Batch) -> Batch:
            weights = batch.attention_mask.to(next(model.parameters()).device).unsqueeze(-1)
            _, slope = gradient(batch, None)
            noise = self._on_sphere(slope, weights, deviation)
            if self.steps > 1:
                worst, most = noise, None
                for step in range(1, self.steps + 1):
                    if step < self.steps:
                        nats, slope = gradient(batch, noise)
                    else:
                        present[0] = noise
                        with torch.no_grad():
                            nats = token_nats(token_logits(model, batch), batch).double().sum(-1)
                    better = torch.ones_like(nats, dtype=torch.bool) if most is None else nats > most
                    worst = torch.where(better[:, None, None], noise, worst)
                    most = nats if most is None else torch.maximum(nats, most)
                    if step < self.steps:
                        towards = self._on_sphere(slope, weights, 0.5 * deviation)
                        noise = self._on_sphere(noise + towards, weights, deviation)
                noise = worst
            present[0] = noise
            return batch

        handle = hook_embeddings(model, add)
        try:
            yield read
        finally:
            handle.remove()

    def _on_sphere(self, direction: Tensor, weights: Tensor, deviation: float) -> Tensor:
        """`direction` `(B, T, D)` at real tokens, scaled to the norm of Gaussian noise of this deviation.

        A direction of zero, as at positions that no scored token sees, stays zero.
        """
        direction = direction.detach() * weights
        width = direction.shape[-1]
        if self.norm == "position":
            size, radius = direction.norm(dim=-1, keepdim=True), deviation * math.sqrt(width)
        else:
            size = direction.flatten(1).norm(dim=-1)[:, None, None]
            radius = deviation * (width * weights.sum(1, keepdim=True)).sqrt()
        # Gradients of long sequences may be tiny: divided first, they keep their direction in float32.
        return radius * direction / size.clamp_min(torch.finfo(direction.dtype).tiny)
