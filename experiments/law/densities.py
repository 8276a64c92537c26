"""Held-out bits per dimension of embeddings under the law, a Gaussian, a linear autoregression and a flow from zuko."""

import math

import torch
from torch import Tensor

from support_tokens.law import EmbeddingPrior, coupling_spectrum, fit, keep_repulsive


def bits(log_density: Tensor, x: Tensor) -> float:
    """Mean bits per dimension out of the sum of nats over all of x."""
    return float(-log_density.sum()) / math.log(2) / x.numel()


def standard_error(per_sequence: Tensor, x: Tensor) -> float:
    """Of the mean over sequences, in bits per dimension."""
    each = -per_sequence / math.log(2) / x[0].numel()
    return float(each.std()) / math.sqrt(len(each))


def gaussian(train: Tensor, test: Tensor) -> Tensor:
    """Independent positions, full covariance: log-density of each test sequence."""
    flat = train.flatten(0, 1)
    law = torch.distributions.MultivariateNormal(flat.mean(0), torch.cov(flat.T))
    return law.log_prob(test).sum(-1)


def lagged(x: Tensor, order: int) -> Tensor:
    """The last `order` embeddings of every position, zeros before the start, with a flag for each that is there."""
    batch, length, _ = x.shape
    columns = []
    for lag in range(1, order + 1):
        shifted = torch.zeros_like(x)
        shifted[:, lag:] = x[:, :-lag]
        there = (torch.arange(length) >= lag).to(x).expand(batch, length).unsqueeze(-1)
        columns += [shifted, there]
    return torch.cat(columns, dim=-1)


def autoregression(train: Tensor, test: Tensor, order: int) -> Tensor:
    """Linear in the last `order` embeddings by least squares, Gaussian errors of full covariance."""
    one = lambda x: torch.cat((lagged(x, order), torch.ones_like(x[..., :1])), dim=-1)  # noqa: E731
    design, target = one(train).flatten(0, 1), train.flatten(0, 1)
    solution = torch.linalg.lstsq(design, target, driver="gelsd").solution
    law = torch.distributions.MultivariateNormal(
        torch.zeros(train.shape[-1]).to(train), torch.cov((target - design @ solution).T)
    )
    return law.log_prob(test - one(test) @ solution).sum(-1)


def flow(train: Tensor, validation: Tensor, test: Tensor, order: int, options: dict, seed: int) -> Tensor:
    """Neural spline flow of an embedding given the last `order`; the weights of the best validation are kept."""
    import zuko

    torch.manual_seed(seed)
    prepare = lambda x: (x.flatten(0, 1).float(), lagged(x, order).flatten(0, 1).float())  # noqa: E731
    (x, context), (x_val, context_val), (x_test, context_test) = map(prepare, (train, validation, test))
    model = zuko.flows.NSF(
        x.shape[-1], context.shape[-1], transforms=options["transforms"], hidden_features=options["hidden"]
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=options["learning_rate"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options["steps"])
    best, kept = math.inf, model.state_dict()
    for step in range(options["steps"]):
        rows = torch.randint(len(x), (options["batch_size"],))
        loss = -model(context[rows]).log_prob(x[rows]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            with torch.no_grad():
                value = -model(context_val).log_prob(x_val).mean().item()
            if value < best:
                best, kept = value, {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(kept)
    with torch.no_grad():
        return model(context_test).log_prob(x_test).double().reshape(test.shape[:2]).sum(-1)


def law(
    train: Tensor, test: Tensor, iterations: int, seed: int, *, whiten: bool, repulsive: bool
) -> tuple[Tensor, EmbeddingPrior, dict, Tensor]:
    """The law by maximum likelihood, on embeddings as they are or after a linear map to unit covariance (returned)."""
    root = torch.eye(train.shape[-1], dtype=train.dtype)
    if whiten:
        root = torch.linalg.inv(torch.linalg.cholesky(torch.cov(train.flatten(0, 1).T))).T
    prior = EmbeddingPrior(train.shape[-1], generator=torch.Generator().manual_seed(seed)).double()
    if repulsive:
        keep_repulsive(prior)
    found = fit(prior, train @ root, iterations=iterations, tolerance=1e-4)
    with torch.no_grad():
        log_density = prior.log_prob(test @ root) + test.shape[1] * torch.linalg.slogdet(root).logabsdet
    certificate = prior.certificate(test @ root)
    account = {
        "converged": found.converged,
        "iterations": found.iterations,
        "noise_scale": float(prior.noise_scale.detach()),
        "is_a_density": certificate.injective,
        "certificate": certificate.sentence,
        "bound": certificate.bound,
        "negative_determinants": int((certificate.sign < 0).sum()),
        "attractive_share": coupling_spectrum(prior, test @ root).attractive_share,
    }
    return log_density, prior, account, root
