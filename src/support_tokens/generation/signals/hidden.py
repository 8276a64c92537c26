r"""Log-determinant of the Gram matrix of hidden states, token by token.

With $z_t$ the hidden state of token t less its own mean over the D coordinates,

$$ \log\det(Z Z^T + \rho I) = \sum_t \log\big( \rho + |z_t|^2 - k_t^T (Z_{<t} Z_{<t}^T + \rho I)^{-1} k_t \big),
   \quad k_t = Z_{<t} z_t, $$

the log squared pivots of a Cholesky factorisation: how far a token's hidden state is from the span of earlier ones. The
mean over tokens is LLM-Check's hidden score (Sriramanan et al., NeurIPS 2024), which is the EigenScore of INSIDE (Chen
et al., ICLR 2024) with the tokens of one text in place of several answers.
"""

__all__ = ["HiddenGram"]

import torch
from torch import Tensor
from torch.linalg import solve_triangular


class HiddenGram:
    r"""Log squared pivots of one layer, continued from one call to the next.

    It computes in float64, since hidden states of real models have coordinates in the thousands beside the ridge.

    Args:
        ridge: $\rho$, 0.001 in LLM-Check.

    Example:
        >>> hidden = torch.randn(1, 5, 8, dtype=torch.float64)
        >>> real = torch.ones(1, 5, dtype=torch.bool)
        >>> gram = HiddenGram()
        >>> parts = torch.cat((gram(hidden[:, :3], real[:, :3]), gram(hidden[:, 3:], real[:, 3:])), dim=1)
        >>> z = hidden - hidden.mean(-1, keepdim=True)
        >>> whole = z @ z.mT + 0.001 * torch.eye(5, dtype=torch.float64)
        >>> torch.allclose(parts.sum(-1), torch.logdet(whole))
        True
    """

    def __init__(self, ridge: float = 1e-3) -> None:
        self.ridge = ridge
        self._rows: Tensor | None = None
        self._factor: Tensor | None = None

    def __call__(self, hidden: Tensor, valid: Tensor) -> Tensor:
        """Log squared pivots of n more tokens, `(B, n)`; `hidden` is `(B, n, D)`, and `valid` is False at padding."""
        z = hidden.double()
        z = torch.where(valid.unsqueeze(-1), z - z.mean(-1, keepdim=True), 0.0)
        batch, count, width = z.shape
        if self._rows is None or self._factor is None:
            self._rows, self._factor = z.new_zeros(batch, 0, width), z.new_zeros(batch, 0, 0)
        cross = solve_triangular(self._factor, self._rows @ z.mT, upper=False)  # (B, S, n)
        rest = z @ z.mT - cross.mT @ cross
        rest.diagonal(dim1=-2, dim2=-1).add_(self.ridge)
        corner, _ = torch.linalg.cholesky_ex(rest)
        old = self._factor.shape[-1]
        factor = z.new_zeros(batch, old + count, old + count)
        factor[:, :old, :old], factor[:, old:, :old], factor[:, old:, old:] = self._factor, cross.mT, corner
        self._factor = factor
        self._rows = torch.cat((self._rows, z), dim=1)
        return 2 * corner.diagonal(dim1=-2, dim2=-1).log()
