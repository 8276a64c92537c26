r"""Attraction and repulsion: the spectrum of the coupling, and which positions carry the gradient of the barrier.

The symmetric part of $\Sigma_t A$ has positive eigenvalues in directions in which tokens attract, where the margin
shrinks, and negative ones where they repel and the margin grows; in one dimension $J_t = 1 - a\,\mathrm{Var}_t$, as
between aligned and opposed spins.
"""

__all__ = ["Concentration", "Coupling", "barrier_concentration", "coupling_spectrum"]

from dataclasses import dataclass

import torch
from torch import Tensor

from support_tokens.errors import ArgumentError
from support_tokens.law.prior import EmbeddingPrior
from support_tokens.margins import JacobianBlocks, position_chunks
from support_tokens.margins.linalg import full_precision


@dataclass(frozen=True, eq=False)
class Coupling:
    r"""Spectrum of the coupling at every position.

    Args:
        eigenvalues: Of the symmetric part of $\Sigma_t A$, ascending, `(B, T, D)`; 0 at padding.
        attraction: Sum of the positive ones, `(B, T)`.
        repulsion: Minus the sum of the negative ones, `(B, T)`.
    """

    eigenvalues: Tensor
    attraction: Tensor
    repulsion: Tensor

    @property
    def attractive_share(self) -> float:
        """Attraction over attraction plus repulsion, over all positions: 1 if all attract, 0 if all repel."""
        total = float((self.attraction + self.repulsion).sum())
        return float(self.attraction.sum()) / total if total else 0.5

    @property
    def sentence(self) -> str:
        """One sentence: mostly attractive, repulsive or balanced."""
        fraction = self.attractive_share
        regime = "attractive" if fraction > 0.5 else "repulsive" if fraction < 0.5 else "balanced"
        return (
            f"Mostly {regime}: {fraction:.0%} of the coupling's spectrum is attractive, {1 - fraction:.0%} repulsive."
        )


@torch.no_grad()
def coupling_spectrum(prior: EmbeddingPrior, x: Tensor, attention_mask: Tensor | None = None) -> Coupling:
    r"""Spectrum of the symmetric part of $\Sigma_t A$ for embeddings `(B, T, D)`; $O(T D^3)$.

    Example:
        >>> prior = EmbeddingPrior(width=3)
        >>> with torch.no_grad():
        ...     _ = prior.w_k.copy_(-prior.w_q)
        >>> coupling_spectrum(prior, torch.randn(1, 6, 3)).attractive_share < 0.5
        True
    """
    with full_precision(x):
        state = prior.state(x, attention_mask)
        blocks = JacobianBlocks(state)
        dense = (blocks.dense(positions) for positions in position_chunks(state, None, state.width))
        eigenvalues = torch.cat([torch.linalg.eigvalsh(0.5 * (block + block.mT)) for block in dense], dim=1)
    return Coupling(eigenvalues, eigenvalues.clamp_min(0).sum(-1), -eigenvalues.clamp_max(0).sum(-1))


@dataclass(frozen=True, eq=False)
class Concentration:
    r"""How the gradient of the barrier is distributed over positions.

    Args:
        norms: $\lVert \partial (-\log|\det J_t|) / \partial x \rVert$ over all embeddings x, `(B, T)`.
        support: Indices of the k support tokens, `(B, k)`.
        share: Fraction of the sum of `norms` at the support tokens, `(B,)`.
        even: The same fraction if all rankable positions had equal norms, `(B,)`.
    """

    norms: Tensor
    support: Tensor
    share: Tensor
    even: Tensor


def barrier_concentration(prior: EmbeddingPrior, x: Tensor, k: int) -> Concentration:
    r"""Fraction of the barrier's gradient on the embeddings at the k support tokens of each sequence.

    One backward pass per position: for inspecting a few sequences, not for training.

    Args:
        prior: The law.
        x: Embeddings, `(B, T, D)`, T at least k + 2.
        k: Number of support tokens.

    Raises:
        ArgumentError: A sequence has fewer than k positions with a margin.

    Example:
        >>> concentration = barrier_concentration(EmbeddingPrior(width=3), torch.randn(2, 8, 3), k=2)
        >>> concentration.share.shape, concentration.even
        (torch.Size([2]), tensor([0.3333, 0.3333]))
    """
    leaf = x.detach().clone().requires_grad_()
    margins = prior.margins(leaf)
    support = margins.support_tokens(k)
    if (support < 0).any():
        raise ArgumentError(
            f"k must be at most {x.shape[1] - 2}, the number of positions with a margin, received {k}; lower it."
        )
    norms = torch.stack(
        [
            torch.autograd.grad(margins.log_abs_det[:, t].sum(), leaf, retain_graph=True)[0].flatten(1).norm(dim=-1)
            for t in range(x.shape[1])
        ],
        dim=1,
    )
    fraction = norms.gather(1, support).sum(-1) / norms.sum(-1).clamp_min(torch.finfo(norms.dtype).tiny)
    return Concentration(norms, support, fraction, k / margins.rankable.sum(-1).to(norms.dtype))
