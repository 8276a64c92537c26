"""Figures of the law: tokens under attraction and repulsion; uncertainty on clean and corrupted text."""

from pathlib import Path

import matplotlib
import torch

from support_tokens.law import EmbeddingPrior

matplotlib.use("agg")
matplotlib.rcParams["svg.hashsalt"] = "law"
import matplotlib.pyplot as plt  # noqa: E402


def scalar_prior(a: float) -> EmbeddingPrior:
    """The law in one dimension with coupling a."""
    prior = EmbeddingPrior(1, noise_scale=0.5).double()
    with torch.no_grad():
        prior.w_q.fill_(a)
        prior.w_k.fill_(1.0)
    return prior


def paths(prior: EmbeddingPrior, start: list[float], steps: int = 120, rate: float = 0.05) -> torch.Tensor:
    """Positions (steps, tokens) under gradient ascent on the sum of log margins; the last token only looks on."""
    x = torch.tensor(start, dtype=torch.float64)[None, :, None]
    found = [x[0, :, 0]]
    for _ in range(steps):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(prior.margins(leaf).log_abs_det.sum(), leaf)
        gradient[:, -1] = 0
        x = x + rate * gradient
        found.append(x[0, :, 0])
    return torch.stack(found)


def coupling(path: Path) -> dict:
    """Two tokens under the barrier's force, and drawn trajectories, for each sign of the coupling."""
    figure, axes = plt.subplots(2, 2, figsize=(8, 5), sharey="col", layout="constrained")
    distances = {}
    for row, (a, word) in enumerate([(0.5, "attractive, a = 0.5"), (-0.5, "repulsive, a = -0.5")]):
        prior = scalar_prior(a)
        moved = paths(prior, [-0.8, 0.8, 0.0])
        axes[row, 0].plot(moved[:, :2], color="#3b5b92")
        axes[row, 0].axhline(0, color="#999999", linewidth=0.8)
        axes[row, 0].set(
            title=f"{word}: two tokens under the barrier", xlabel="step of ascent on the log margin", ylabel="x"
        )
        drawn = prior.sample(12, 16, torch.Generator().manual_seed(1))
        axes[row, 1].plot(range(1, 17), drawn[..., 0].T, color="#3b5b92", alpha=0.5, linewidth=0.9)
        axes[row, 1].set(title="twelve draws of the law", xlabel="position", ylabel="x")
        distances[word.split(",")[0]] = {
            "distance_before": float(moved[0, 1] - moved[0, 0]),
            "distance_after": float(moved[-1, 1] - moved[-1, 0]),
            "spread_of_draws_at_16": float(drawn[:, -1].std()),
        }
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return distances


def uncertainty(path: Path, clean: list[float], corrupted: list[float], where: list[int], text: str) -> None:
    """Surprise of one sequence, character by character, clean and corrupted."""
    figure, axis = plt.subplots(figsize=(9, 3), layout="constrained")
    axis.plot(clean, color="#3b5b92", label="clean")
    axis.plot(corrupted, color="#b5482a", label="corrupted", linewidth=0.9)
    for position in where:
        axis.axvline(position, color="#b5482a", alpha=0.25)
    axis.set_xticks(range(len(text)), [repr(c)[1:-1] if c != " " else "_" for c in text], fontsize=6)
    axis.set(
        ylabel="bits per character", title="Predictive surprise of the particle filter; lines mark replaced characters"
    )
    axis.legend()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
