r"""Observations of an embedding: a token drawn from logits $E x / \tau$, or the embedding plus Gaussian noise."""

__all__ = ["CategoricalEmission", "Emission", "GaussianEmission"]

import math
from typing import Protocol

import torch
from torch import Tensor

from support_tokens.errors import ArgumentError
from support_tokens.law.gaussian import gaussian_log_prob
from support_tokens.margins.linalg import each_matrix

NEWTON_STEPS, HALVINGS = 12, 8


class Emission(Protocol):
    """Law of an observation given the embedding of its position."""

    def log_prob(self, x: Tensor, observation: Tensor | int) -> Tensor:
        """Log-density of one observation in nats, for embeddings x `(N, D)`: `(N,)`."""
        ...

    def posterior(self, mean: Tensor, noise_scale: Tensor, observation: Tensor | int) -> tuple[Tensor, Tensor]:
        r"""Location `(N, D)` and scale (a scalar) of a normal law near $N(x; \mathrm{mean}, \sigma^2 I)\, p(y \mid x)$.

        Its tails must not be lighter than those of the product; otherwise the weights of a guided filter have infinite
        variance.
        """
        ...


class GaussianEmission:
    r"""$y = x + \eta$ with $\eta \sim N(0, \tau^2 I)$: an embedding observed with noise.

    Args:
        noise_scale: $\tau$, in units of the embeddings.

    Example:
        >>> GaussianEmission(0.5).log_prob(torch.zeros(3, 2), torch.zeros(2))
        tensor([-0.4516, -0.4516, -0.4516])
    """

    def __init__(self, noise_scale: float) -> None:
        if not 0 < noise_scale < math.inf:
            raise ArgumentError(f"noise_scale must be a positive finite number, received {noise_scale}; pass tau > 0.")
        self.noise_scale = noise_scale

    def log_prob(self, x: Tensor, observation: Tensor | int) -> Tensor:
        """Log-density of an observation `(D,)` for embeddings `(N, D)`."""
        return gaussian_log_prob(x - observation, math.log(self.noise_scale))

    def posterior(self, mean: Tensor, noise_scale: Tensor, observation: Tensor | int) -> tuple[Tensor, Tensor]:
        """The exact product of two normal laws."""
        gain = noise_scale**2 / (noise_scale**2 + self.noise_scale**2)
        return mean + gain * (observation - mean), noise_scale * (1 - gain).sqrt()


class CategoricalEmission:
    r"""$p(y \mid x) = \mathrm{softmax}(E x / \tau)_y$: a token drawn from the logits of its embedding.

    Args:
        embeddings: E, `(V, D)`, for instance the input embeddings of a model with tied embeddings.
        temperature: $\tau$.
        bias: Added to the logits, `(V,)`: with $-|E_v|^2 / (2 \tau)$ the probability of a token
            decreases with the distance to its embedding.

    Raises:
        ArgumentError: E is not a matrix, or the temperature is not positive.

    Example:
        >>> CategoricalEmission(torch.eye(3)).log_prob(torch.eye(3), 0).exp()
        tensor([0.5761, 0.2119, 0.2119])
    """

    def __init__(self, embeddings: Tensor, temperature: float = 1.0, bias: Tensor | None = None) -> None:
        if embeddings.dim() != 2:
            raise ArgumentError(
                f"embeddings must have shape (V, D), received {tuple(embeddings.shape)}; pass a matrix."
            )
        if not 0 < temperature < math.inf:
            raise ArgumentError(f"temperature must be a positive finite number, received {temperature}; pass tau > 0.")
        self.embeddings = embeddings.detach() / temperature
        self.bias = torch.zeros_like(self.embeddings[:, 0]) if bias is None else bias.detach()

    def _log_probabilities(self, x: Tensor) -> Tensor:
        return torch.log_softmax(x @ self.embeddings.T.to(x) + self.bias.to(x), dim=-1)

    def log_prob(self, x: Tensor, observation: Tensor | int) -> Tensor:
        """Log-probability of token `observation` for embeddings `(N, D)`."""
        return self._log_probabilities(x)[:, int(observation)]

    def posterior(self, mean: Tensor, noise_scale: Tensor, observation: Tensor | int) -> tuple[Tensor, Tensor]:
        r"""The most probable embedding by damped Newton, with the scale of the prior.

        The log-density is concave. The scale stays $\sigma$: far away a categorical likelihood is log-linear, and a
        narrower proposal would have tails that are too light.
        """
        table, precision = self.embeddings.to(mean), noise_scale**-2
        identity = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        x = mean
        log_probability = self._log_probabilities(x)
        for _ in range(NEWTON_STEPS):
            probability = log_probability.exp()
            expected = probability @ table
            gradient = table[int(observation)] - expected - precision * (x - mean)
            # An error of a tenth of the scale of the proposal is accurate enough.
            if float(gradient.norm(dim=-1).max()) * float(noise_scale) < 0.1:
                break
            second = (probability.unsqueeze(-2) * table.T) @ table
            information = second - expected.unsqueeze(-1) * expected.unsqueeze(-2)
            curvature = precision * identity + information
            step = each_matrix(torch.linalg.solve, curvature, gradient.unsqueeze(-1)).squeeze(-1)
            value = log_probability[:, int(observation)] - 0.5 * precision * (x - mean).square().sum(-1)
            factor = torch.ones_like(value)
            for _ in range(HALVINGS):
                # Where a softmax is saturated the information is near zero and a full step would overshoot.
                moved = x + factor.unsqueeze(-1) * step
                log_probability = self._log_probabilities(moved)
                after = log_probability[:, int(observation)] - 0.5 * precision * (moved - mean).square().sum(-1)
                worse = after < value
                if not worse.any():
                    break
                factor = torch.where(worse, 0.5 * factor, factor)
            x = torch.where(worse.unsqueeze(-1), x, moved)
            log_probability = self._log_probabilities(x)
        return x, noise_scale
