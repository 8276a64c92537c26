r"""Particle filter over latent embeddings: N trajectories weighted by what is observed of them.

$$ x_t \sim q(\cdot \mid x_{<t}, y_t), \qquad w_t = \frac{p(x_t \mid x_{<t})\; p(y_t \mid x_t)}{q(x_t \mid x_{<t},
y_t)}, \qquad
   \hat p(y_t \mid y_{<t}) = \sum_i W^i_{t-1} w^i_t . $$

`bootstrap`: q is the law, sampled by Newton, and w the emission. `guided`: q is a normal law drawn towards $y_t$, and w
holds the exact density of the law, $\log|\det J_t|$ included, so that no equation is solved. The product of the
estimates is unbiased for the evidence in both. Past the boundary (see `EmbeddingPrior.certificate`) the two differ: the
sampler takes one of several embeddings with one noise, the density counts them all; `FilterStep.fold_share` says
whether that happens.
"""

__all__ = ["FilterResult", "FilterStep", "ParticleFilter"]

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from support_tokens.errors import ArgumentError, NumericalError
from support_tokens.law.filtering.emissions import Emission
from support_tokens.law.filtering.resampling import SCHEMES, effective_sample_size, resample
from support_tokens.law.newton import attend, coupling_factors
from support_tokens.law.prior import EmbeddingPrior
from support_tokens.law.trajectory import next_embedding
from support_tokens.margins.linalg import safe_slogdet

PROPOSALS = ("bootstrap", "guided")


@dataclass(frozen=True, eq=False)
class FilterStep:
    r"""What one observation taught.

    Args:
        log_predictive: $\log \hat p(y_t \mid y_{<t})$ in nats.
        ess: Effective sample size after weighting, between 1 and N.
        resampled: Whether particles were resampled before this position.
        mean: Filtered mean of $x_t$, `(D,)`.
        spread: Root mean variance of $x_t$ over coordinates: the uncertainty left.
        margin_mean: Posterior mean of $\log|\det J_t|$ in nats.
        margin_sd: Its posterior standard deviation.
        fold_share: Posterior probability that $\det J_t$ is negative.
    """

    log_predictive: float
    ess: float
    resampled: bool
    mean: Tensor
    spread: float
    margin_mean: float
    margin_sd: float
    fold_share: float


@dataclass(frozen=True, eq=False)
class FilterResult:
    r"""Steps of a whole sequence, as tensors `(T,)` in float64; `mean` is `(T, D)`.

    Args:
        log_evidence: $\log \hat p(y_{1:T})$ in nats; its exponential is unbiased.
        steps: One `FilterStep` a position.
    """

    log_evidence: float
    steps: tuple[FilterStep, ...]

    def series(self, name: str) -> Tensor:
        """Field `name` of all steps, `(T,)`, or `(T, D)` for `mean`."""
        values = [getattr(step, name) for step in self.steps]
        return torch.stack(values) if name == "mean" else torch.tensor(values, dtype=torch.float64)


class ParticleFilter:
    r"""Filter of one sequence of observations, one `step` at a time.

    Memory is $O(N W D)$ for a window of W positions, however long the sequence: attention does not ask in which order
    the past is stored, so a new embedding overwrites the oldest one.

    Args:
        prior: The law of embeddings; its parameters are read once.
        emission: The law of observations.
        particles: N, at least 2.
        window: W, embeddings that the law may look back to; None: all, and memory grows with the sequence.
        proposal: `bootstrap` or `guided`.
        resampling: `systematic` or `residual`.
        ess_threshold: Resample where the effective sample size is below this share of N; 1: always, 0: never.
        generator: Source of randomness; None: PyTorch's global one.

    Raises:
        ArgumentError: An option is out of its range.

    Source:
        Chopin and Papaspiliopoulos, "An Introduction to Sequential Monte Carlo", 2020, chapter 10.

    Example:
        >>> from support_tokens.law.filtering import GaussianEmission
        >>> filter = ParticleFilter(EmbeddingPrior(3, rank=2), GaussianEmission(0.5), particles=64, window=8)
        >>> result = filter.run(torch.randn(20, 3))
        >>> result.series("margin_mean").shape, filter.trajectories.shape
        (torch.Size([20]), torch.Size([64, 8, 3]))
    """

    def __init__(
        self,
        prior: EmbeddingPrior,
        emission: Emission,
        particles: int = 256,
        *,
        window: int | None = 64,
        proposal: str = "guided",
        resampling: str = "systematic",
        ess_threshold: float = 0.5,
        generator: torch.Generator | None = None,
    ) -> None:
        if particles < 2:
            raise ArgumentError(
                f"particles must be at least 2, received {particles}; one particle has no weights, use a few hundred."
            )
        if window is not None and window < 1:
            raise ArgumentError(
                f"window must be at least 1 or None, received {window}; pass how far the law looks back."
            )
        if proposal not in PROPOSALS:
            raise ArgumentError(f"proposal must be one of {', '.join(PROPOSALS)}, received {proposal!r}; choose one.")
        if resampling not in SCHEMES:
            raise ArgumentError(f"resampling must be one of {', '.join(SCHEMES)}, received {resampling!r}; choose one.")
        if not 0 <= ess_threshold <= 1:
            raise ArgumentError(f"ess_threshold must be between 0 and 1, received {ess_threshold}; pass a share of N.")
        self.emission, self.window, self.proposal = emission, window, proposal
        self.resampling, self.ess_threshold, self.generator = resampling, ess_threshold, generator
        w_q, w_k = prior.w_q.detach(), prior.w_k.detach()
        dtype = torch.promote_types(w_q.dtype, torch.float32)
        self._maps = coupling_factors(w_q.to(dtype), w_k.to(dtype))
        self._sigma = prior.noise_scale.detach().to(dtype)
        capacity = 16 if window is None else window
        # Embeddings and their two images, each (N, capacity, .); the first `filled` slots hold something.
        self._buffers = [
            torch.empty(particles, capacity, size, dtype=dtype, device=w_q.device)
            for size in (prior.width, len(self._maps.to_query), len(self._maps.to_key))
        ]
        self._log_weights = torch.full((particles,), -math.log(particles), dtype=torch.float64, device=w_q.device)
        self.position = 0
        self.log_evidence = 0.0

    @property
    def particles(self) -> int:
        """N."""
        return len(self._log_weights)

    @property
    def filled(self) -> int:
        """Positions that are kept, at most the window."""
        return min(self.position, self._buffers[0].shape[1])

    @property
    def trajectories(self) -> Tensor:
        """Embeddings kept of every particle, `(N, filled, D)`; once the window is full, in the order of a ring."""
        return self._buffers[0][:, : self.filled]

    @property
    def weights(self) -> Tensor:
        """Normalised weights, `(N,)`."""
        return self._log_weights.exp()

    def run(self, observations: Iterable[Tensor | int | None]) -> FilterResult:
        """Steps through all `observations` (any iterable: a stream need not be held) and collects the results."""
        steps = tuple(self.step(observation) for observation in observations)
        return FilterResult(self.log_evidence, steps)

    @torch.no_grad()
    def step(self, observation: Tensor | int | None) -> FilterStep:
        """Moves all particles by one position and weighs them by `observation`; None: nothing was seen there.

        Raises:
            NumericalError: The observation is impossible for every particle, or a weight is not a number.
        """
        particles = self.particles
        resampled = float(effective_sample_size(self._log_weights)) < self.ess_threshold * particles * (1 - 1e-9)
        if resampled:
            chosen = resample(self._log_weights, self.resampling, self.generator)
            for buffer in self._buffers:
                buffer[:, : self.filled] = buffer[chosen, : self.filled]
            self._log_weights.fill_(-math.log(particles))
        past = self._past()
        if self.proposal == "bootstrap" or observation is None:
            x = next_embedding(self._normal() * self._sigma, past[0], past[1], past[2], self._maps)[0]
            sign, margin, _ = self._at(x, past)
            gain = torch.zeros_like(margin)
        else:
            location, scale = self._propose(past, observation)
            standard = self._normal()
            x = location + scale * standard
            sign, margin, mean = self._at(x, past)
            width = x.shape[-1]
            # log p - log q; the constants of the two normal laws cancel but for their scales.
            gain = 0.5 * standard.square().sum(-1) - 0.5 * ((x - mean) / self._sigma).square().sum(-1)
            gain = gain + margin + width * (scale / self._sigma).log()
        if observation is not None:
            gain = gain + self.emission.log_prob(x, observation)
        log_predictive = self._weigh(gain, observation)
        self._remember(x)
        weights = self.weights.to(x.dtype)
        average = weights @ x
        margin_mean = float(weights @ margin)
        return FilterStep(
            log_predictive=log_predictive,
            ess=float(effective_sample_size(self._log_weights)),
            resampled=resampled,
            mean=average,
            spread=float((weights @ (x - average).square()).mean().sqrt()),
            margin_mean=margin_mean,
            margin_sd=float((weights @ (margin - margin_mean).square()).sqrt()),
            fold_share=float(weights @ (sign < 0).to(weights)),
        )

    def _past(self) -> list[Tensor]:
        return [buffer[:, : self.filled] for buffer in self._buffers]

    def _normal(self) -> Tensor:
        values = self._buffers[0]
        return torch.randn(
            len(values), values.shape[-1], generator=self.generator, dtype=values.dtype, device=values.device
        )

    def _at(self, x: Tensor, past: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        r"""Sign and log|det| `(N,)` of $J_t$ and the mean `(N, D)`, at embeddings x given the past."""
        values, queries, keys = past
        if values.shape[1] == 0:
            return torch.ones_like(x[:, 0]), torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        row = attend(x @ self._maps.to_query.T, keys).unsqueeze(-2)
        covariance = (row.mT * (queries - row @ queries)).mT @ (keys - row @ keys)
        identity = torch.eye(queries.shape[-1], dtype=x.dtype, device=x.device)
        sign, margin = safe_slogdet(identity - covariance)
        return sign, margin, (row @ values).squeeze(-2)

    def _propose(self, past: list[Tensor], observation: Tensor | int) -> tuple[Tensor, Tensor]:
        """The emission's normal law around the mean that its own location asks for, by two fixed-point steps."""
        values, _, keys = past
        if values.shape[1] == 0:
            return self.emission.posterior(torch.zeros_like(self._buffers[0][:, 0]), self._sigma, observation)
        mean = values.mean(1)
        for _ in range(2):
            location, _ = self.emission.posterior(mean, self._sigma, observation)
            mean = (attend(location @ self._maps.to_query.T, keys).unsqueeze(-2) @ values).squeeze(-2)
        return self.emission.posterior(mean, self._sigma, observation)

    def _weigh(self, gain: Tensor, observation: Tensor | int | None) -> float:
        log_weights = self._log_weights + gain.double()
        total = torch.logsumexp(log_weights, 0)
        if not torch.isfinite(total):
            raise NumericalError(
                f"weights of {self.particles} particles must not all vanish, and did at position {self.position}: "
                f"observation {observation!r} has log-density {float(total)} under every one of them; use more "
                "particles, "
                "the guided proposal, or a wider emission."
            )
        self._log_weights = log_weights - total
        self.log_evidence += float(total)
        return float(total)

    def _remember(self, x: Tensor) -> None:
        capacity = self._buffers[0].shape[1]
        if self.window is None and self.position == capacity:
            self._buffers = [torch.cat((buffer, torch.empty_like(buffer)), dim=1) for buffer in self._buffers]
            capacity *= 2
        slot = self.position % capacity
        for buffer, image in zip(self._buffers, (x, x @ self._maps.to_query.T, x @ self._maps.to_key.T), strict=True):
            buffer[:, slot] = image
        self.position += 1
