r"""Maximum likelihood: fit of a law to embeddings, and the standard errors of what can be identified.

The law depends on $W_Q$ and $W_K$ through the coupling A alone: $W_Q \to G W_Q$, $W_K \to G^{-T} W_K$ changes nothing.
So the
observed information H of $(W_Q, W_K, \log\sigma)$ is singular along G, and standard errors are given for A and
$\log\sigma$:

$$ \mathrm{Cov}(\hat A) = \frac{\partial A}{\partial \theta}\, H^{+} \Big(\frac{\partial A}{\partial \theta}\Big)^T, $$

with the pseudo-inverse, since A does not move along what H does not see.
"""

__all__ = ["Fit", "StandardErrors", "fit", "standard_errors"]

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from support_tokens.errors import ArgumentError, NumericalError
from support_tokens.law.certificate import Certificate
from support_tokens.law.prior import EmbeddingPrior


@dataclass(frozen=True, eq=False)
class Fit:
    r"""Outcome of a fit.

    Args:
        log_likelihood: Sum over all sequences, in nats.
        bits_per_dimension: $-\log_2 p$ over the number of real positions times D.
        iterations: Of L-BFGS.
        gradient: Largest entry of the gradient of the mean negative log-likelihood per dimension at the end.
        converged: Whether it is below the tolerance.
        certificate: Of the fitted law on the data: past the boundary the formula is no density, and no likelihood
            either.
    """

    log_likelihood: float
    bits_per_dimension: float
    iterations: int
    gradient: float
    converged: bool
    certificate: Certificate


def fit(
    prior: EmbeddingPrior,
    x: Tensor,
    attention_mask: Tensor | None = None,
    *,
    iterations: int = 200,
    tolerance: float = 1e-6,
) -> Fit:
    r"""Maximises the likelihood of embeddings `(B, T, D)` over the parameters of `prior`, in place, by L-BFGS.

    Args:
        prior: Starting point and result.
        x: Embeddings.
        attention_mask: `(B, T)`, non-zero at real positions; None: all are.
        iterations: Most iterations of L-BFGS.
        tolerance: Largest entry of the gradient (mean nats per dimension) at which the fit counts as converged.

    Raises:
        NumericalError: The likelihood is not finite.

    Example:
        >>> x = EmbeddingPrior(2, noise_scale=0.3).double().sample(64, 6)
        >>> prior = EmbeddingPrior(2).double()
        >>> before = prior.log_prob(x).sum().item()
        >>> fit(prior, x).log_likelihood > before
        True
    """
    positions = x.shape[0] * x.shape[1] if attention_mask is None else int((attention_mask != 0).sum())
    parameters = [p for p in prior.parameters() if p.requires_grad]
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=iterations,
        max_eval=3 * iterations,
        history_size=20,
        tolerance_grad=tolerance,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -prior.log_prob(x, attention_mask).sum() / (positions * prior.width)
        if not torch.isfinite(value):
            raise NumericalError(
                f"the likelihood of EmbeddingPrior must be finite, received {value.item()}; start from a weaker "
                "coupling."
            )
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[arg-type]
    final = loss().item()
    gradient = max(float(p.grad.abs().max()) for p in parameters if p.grad is not None)
    optimizer.zero_grad()
    return Fit(
        log_likelihood=-final * positions * prior.width,
        bits_per_dimension=final / torch.log(torch.tensor(2.0)).item(),
        iterations=int(optimizer.state[parameters[0]]["n_iter"]),
        gradient=gradient,
        converged=gradient <= tolerance,
        certificate=prior.certificate(x, attention_mask),
    )


@dataclass(frozen=True, eq=False)
class StandardErrors:
    r"""Standard errors at a maximum of the likelihood.

    Args:
        coupling: Of the entries of A, `(D, D)`.
        log_noise_scale: Of $\log \sigma$: the relative error of $\sigma$.
        covariance: Of A (row by row) and $\log\sigma$ together, `(D*D + 1, D*D + 1)`.
    """

    coupling: Tensor
    log_noise_scale: float
    covariance: Tensor


def standard_errors(prior: EmbeddingPrior, x: Tensor, attention_mask: Tensor | None = None) -> StandardErrors:
    r"""Standard errors of A and $\log\sigma$ from the observed information, at a prior that has been fitted to x.

    The Hessian of $2RD + 1$ parameters by automatic differentiation: for small laws.

    Raises:
        ArgumentError: The information is not positive, so that this is no maximum.

    Example:
        >>> x = EmbeddingPrior(2, noise_scale=0.3).double().sample(64, 6)
        >>> prior = EmbeddingPrior(2, noise_scale=0.3).double()
        >>> _ = fit(prior, x)
        >>> standard_errors(prior, x).coupling.shape
        torch.Size([2, 2])
    """
    names = ["w_q", "w_k", "log_noise_scale"]
    start = [getattr(prior, name).detach().double() for name in names]
    sizes, shapes = [p.numel() for p in start], [p.shape for p in start]
    theta = torch.cat([p.flatten() for p in start])
    wide = x.double()

    def unpacked(vector: Tensor) -> dict[str, Tensor]:
        parts = zip(names, vector.split(sizes), shapes, strict=True)
        return {f"law.{name}": part.reshape(shape) for name, part, shape in parts}

    def loss(vector: Tensor) -> Tensor:
        return -functional_call(_LogProb(prior), unpacked(vector), (wide, attention_mask)).sum()

    def identified(vector: Tensor) -> Tensor:
        w_q, w_k, log_noise_scale = unpacked(vector).values()
        return torch.cat(((w_k.T @ w_q).flatten() / w_q.shape[0] ** 0.5, log_noise_scale.reshape(1)))

    information = torch.autograd.functional.hessian(loss, theta)
    slope = torch.autograd.functional.jacobian(identified, theta)
    assert isinstance(information, Tensor)
    assert isinstance(slope, Tensor)
    values, vectors = torch.linalg.eigh(information)
    # GL(R) leaves R^2 directions flat; at a maximum found to finite accuracy they are small and of either sign.
    flat = values.abs() < 1e-6 * values.abs().max()
    if (values[~flat] <= 0).any():
        raise ArgumentError(
            "prior must stand at a maximum of the likelihood, received an information with eigenvalue "
            f"{float(values[0]):.3g}; "
            "call fit first and see that it converged."
        )
    inverse = torch.where(flat, 0.0, 1 / torch.where(flat, 1.0, values))
    moved = slope @ vectors
    covariance = (moved * inverse) @ moved.T
    errors = covariance.diagonal().clamp_min(0).sqrt()
    width = prior.width
    return StandardErrors(errors[:-1].reshape(width, width), float(errors[-1]), covariance)


class _LogProb(torch.nn.Module):
    """Makes `log_prob` the forward pass, for `functional_call`."""

    def __init__(self, prior: EmbeddingPrior) -> None:
        super().__init__()
        self.law = prior

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.law.log_prob(x, attention_mask)
