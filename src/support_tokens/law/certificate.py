r"""Guarantees on the map from noise to embeddings: where it is one-to-one, and why.

**Theorem.** Given the past, let $c = (\mathrm{diam}/2)^2$ with diam the diameter of the past embeddings. If

$$ c\,\lambda_{\max}\Big(\frac{A + A^T}{2}\Big) < 1 , $$

then $x \mapsto x - \mu(x)$ is one-to-one, onto, and $J$ is never singular. *Proof.* The mean is the gradient of
$h \mapsto \log \sum_s e^{h \cdot x_s}$ at $h = A x$, whose Hessian is a covariance. If x and $x + d$ have one noise,
$d = S A d$ with S an average of such Hessians, so $0 \preceq S \preceq c I$ (Popoviciu). Then
$d^T A d = (Ad)^T S (Ad) \ge |S A d|^2 / c = |d|^2 / c$, against the assumption unless $d = 0$. One Hessian in place of
the average gives the claim on J. Onto: the mean stays in the convex hull of the past (Brouwer). $\square$

It contains the contraction bound $c \lVert A \rVert_2 < 1$, since $\lambda_{\max} \le \lVert A \rVert_2$, and says
more: where the symmetric part of A has no positive eigenvalue (repulsive coupling) the law is one-to-one for **every**
past. And only there: two tokens along the vector of a positive eigenvalue, far enough apart, give $\det J < 0$ between.
"""

__all__ = ["Certificate", "certify", "past_radius_squared", "repulsive"]

from dataclasses import dataclass

import torch
from torch import Tensor

from support_tokens.margins import AttentionState, JacobianBlocks, Margins, position_chunks
from support_tokens.margins.linalg import full_precision


@dataclass(frozen=True, eq=False)
class Certificate:
    r"""What is guaranteed about the map x -> noise around given trajectories.

    Args:
        bound: $\max_t \lVert A \rVert_2 (\mathrm{diam}_t / 2)^2$ over all valid positions.
        contraction: Whether `bound` is below 1: the mean is a contraction of $x_t$ for each of these pasts.
        monotone_bound: $\max_t \lambda_{\max}((A + A^T)/2) (\mathrm{diam}_t/2)^2$; at most `bound`.
        certified: Positions whose map is one-to-one given their past, since their own monotone bound is below 1,
            `(B, T)`.
        globally_injective: Whether the coupling is repulsive, so that the map is one-to-one for every past and length.
        min_symmetric_eigenvalue: Smallest eigenvalue of $(J_t + J_t^T)/2$ at the given points. Where it is positive the
            map is one-to-one nearby; on a convex region it is where it is positive throughout.
        sign: Sign of $\det J_t$, `(B, T)`. A negative one proves that the map folds given that past.
    """

    bound: float
    contraction: bool
    monotone_bound: float
    certified: Tensor
    globally_injective: bool
    min_symmetric_eigenvalue: float
    sign: Tensor

    @property
    def injective(self) -> bool:
        """Whether every position is certified: `log_prob` is a density in each of them given its past."""
        return bool(self.certified.all())

    @property
    def folds(self) -> int:
        """Number of positions at which the map is proven not to be one-to-one."""
        return int((self.sign < 0).sum())

    @property
    def sentence(self) -> str:
        """What is guaranteed, and what is not."""
        if self.globally_injective:
            return (
                "Guaranteed for every past and length: the symmetric part of the coupling has no positive eigenvalue, "
                "so noise and embeddings determine each other and log_prob is a density."
            )
        if self.injective:
            return (
                "Guaranteed for these pasts: each next embedding and its noise determine each other "
                f"(bound {self.monotone_bound:.3g} < 1); not guaranteed for pasts of larger diameter."
            )
        uncertified = int((~self.certified).sum())
        total = self.certified.numel()
        if self.folds:
            return (
                f"Not a density: at {self.folds} of {total} positions det J is negative, so the map folds and several "
                f"embeddings share one noise there; {uncertified - self.folds} further positions are neither certified "
                "nor proven to fold."
            )
        return (
            f"Not guaranteed at {uncertified} of {total} positions (bound {self.monotone_bound:.3g} >= 1): no det J is "
            "negative here and the smallest eigenvalue of the symmetric part of J is "
            f"{self.min_symmetric_eigenvalue:.3g}, which says nothing about embeddings elsewhere."
        )


def repulsive(coupling: Tensor) -> bool:
    r"""Whether the symmetric part of A `(D, D)` has no positive eigenvalue, up to rounding.

    Example:
        >>> repulsive(-torch.eye(3)), repulsive(torch.diag(torch.tensor([-1.0, 0.5])))
        (True, False)
    """
    coupling = coupling.detach()
    slack = 16 * len(coupling) * torch.finfo(coupling.dtype).eps * float(torch.linalg.matrix_norm(coupling, 2))
    return bool(_largest(coupling) <= slack)


def _largest(coupling: Tensor) -> float:
    return float(torch.linalg.eigvalsh(0.5 * (coupling + coupling.mT))[-1])


def past_radius_squared(x: Tensor, valid: Tensor | None = None) -> Tensor:
    r"""$(\mathrm{diam}_t/2)^2$ of the embeddings before each position, `(B, T)`; 0 where there are fewer than two.

    Example:
        >>> past_radius_squared(torch.tensor([[[0.0], [2.0], [1.0], [9.0]]]))
        tensor([[0., 0., 1., 1.]])
    """
    distance = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()
    if valid is not None:
        distance = distance.masked_fill(~(valid.unsqueeze(-1) & valid.unsqueeze(-2)), 0.0)
    widest = distance.tril().amax(-1).cummax(-1).values
    return torch.cat((torch.zeros_like(widest[:, :1]), widest[:, :-1]), dim=1) / 4


@torch.no_grad()
def certify(coupling: Tensor, state: AttentionState, margins: Margins) -> Certificate:
    r"""Certificate of the law with coupling A `(D, D)` on the trajectories of a state; $O(T^2 D + T D^3)$ each.

    Example:
        >>> from support_tokens import EmbeddingPrior
        >>> EmbeddingPrior(width=3).certificate(0.1 * torch.randn(2, 5, 3)).contraction
        True
    """
    x = state.value[:, 0]
    coupling = coupling.detach().to(x.dtype)
    with full_precision(x):
        radius = past_radius_squared(x, state.valid)
        largest, norm = _largest(coupling), float(torch.linalg.matrix_norm(coupling, 2))
        blocks = JacobianBlocks(state)
        smallest = torch.inf
        identity = torch.eye(state.width, dtype=x.dtype, device=x.device)
        for positions in position_chunks(state, None, state.width):
            jacobian = identity - blocks.dense(positions)
            smallest = min(smallest, float(torch.linalg.eigvalsh(0.5 * (jacobian + jacobian.mT)).amin()))
    globally_injective = repulsive(coupling)
    certified = largest * radius < 1
    if globally_injective:
        certified = torch.ones_like(certified)
    if state.valid is not None:
        certified, radius = certified | ~state.valid, radius.masked_fill(~state.valid, 0.0)
    bound = norm * float(radius.max())
    return Certificate(
        bound=bound,
        contraction=bound < 1,
        monotone_bound=largest * float(radius.max()),
        certified=certified,
        globally_injective=globally_injective,
        min_symmetric_eigenvalue=smallest,
        sign=margins.sign,
    )
