r"""Margins and other figures of captured positions, for a whole text or token by token with a KV cache."""

__all__ = ["MarginReader"]

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from support_tokens.margins import (
    AttentionState,
    JacobianBlocks,
    full_precision,
    margins_at,
    position_chunks,
    safe_slogdet,
    sigma_min,
    slogdet_and_inverse,
    view_sign,
)

_MARGIN = {"sign", "log_abs_det"}
_DENSE = {"sigma_min", "gradient_norm", "coupling_sign"}


class MarginReader:
    r"""Figures of positions of attention states, without gradient.

    Products of weights with weights, which all positions share, are computed when a text begins and kept for its later
    tokens: they cost more than the margin of one token.

    Args:
        figures: Any of `sign`, `log_abs_det` (one LU factorisation a position), `sigma_min`, `gradient_norm`
            ($\lVert J_t^{-T} \rVert_F$), `coupling_sign` (the sign of the eigenvalue of largest modulus of the
            symmetric part of $D_t$, 0 where that is zero) and `per_head` (the log margin of each head alone).
        views: `noise`, `block`, or both.

    Raises:
        ArgumentError: There is no such view.

    Example:
        >>> from support_tokens.margins import state_from_weights
        >>> x, w = torch.randn(2, 5, 4), torch.randn(1, 3, 4)
        >>> figures = MarginReader(["log_abs_det"])(0, state_from_weights(x, w, w), slice(4, 5))
        >>> figures["noise"]["log_abs_det"].shape
        torch.Size([2, 1])
    """

    def __init__(self, figures: Iterable[str] = ("sign", "log_abs_det"), views: Sequence[str] = ("noise",)) -> None:
        self._signs = {view: view_sign(view) for view in views}
        self._figures = frozenset(figures)
        self._kept: dict[int, JacobianBlocks] = {}

    @torch.no_grad()
    def __call__(
        self,
        layer: int,
        state: AttentionState,
        positions: slice | Tensor,
        tick: Callable[[float], None] = lambda fraction: None,
    ) -> dict[str, dict[str, Tensor]]:
        """Figures of positions of one layer's state.

        Args:
            layer: Index of the layer; its shared products are kept from one call to the next.
            state: What the layer did in the last forward pass.
            positions: Query positions, a slice, or indices `(B, n)`.
            tick: Called with the fraction of the work that is done.

        Returns:
            By view and name: `(B, n)`, and `(B, n, H)` for `per_head`; NaN where the Jacobian is not finite.
        """
        parts: dict[str, dict[str, list[Tensor]]] = {view: {} for view in self._signs}
        with full_precision(state.query):
            blocks = self._blocks(layer, state)
            width = state.width if self._figures & _DENSE else blocks.reduced_width
            chunks = position_chunks(state, positions, width)
            for done, rows in enumerate(chunks):
                tick(done / len(chunks))
                for view, values in self._read(blocks, rows).items():
                    for name, value in values.items():
                        parts[view].setdefault(name, []).append(value)
        return {
            view: {name: torch.cat(own, dim=1) for name, own in made.items() if name in self._figures}
            for view, made in parts.items()
        }

    def _blocks(self, layer: int, state: AttentionState) -> JacobianBlocks:
        if state.key.shape[2] == state.length or layer not in self._kept:
            self._kept[layer] = JacobianBlocks(state)
            self._kept[layer].prepare()
        return self._kept[layer].of(state)

    def _read(self, blocks: JacobianBlocks, rows: slice | Tensor) -> dict[str, dict[str, Tensor]]:
        wanted = self._figures
        dense = blocks.dense(rows) if wanted & _DENSE else None
        heads = blocks.per_head(rows) if "per_head" in wanted else None
        finite = None
        if dense is not None:
            # A decomposition of NaN is an error, and one text must not end the others.
            finite = dense.isfinite().flatten(-2).all(-1)
            dense = torch.where(finite[..., None, None], dense, 0.0)
        values: dict[str, dict[str, Tensor]] = {}
        for view, sign in self._signs.items():
            made = values[view] = {}
            if wanted & _MARGIN:
                made["sign"], made["log_abs_det"] = margins_at(blocks, rows, view)
            if dense is not None and finite is not None:
                matrix = sign * dense + _identity(dense)
                if "gradient_norm" in wanted:
                    nonzero, _, inverse = slogdet_and_inverse(matrix)
                    made["gradient_norm"] = inverse.flatten(-2).norm(dim=-1).masked_fill(nonzero == 0, torch.inf)
                if "sigma_min" in wanted:
                    made["sigma_min"] = sigma_min(matrix)
                if "coupling_sign" in wanted:
                    made["coupling_sign"] = _dominant_sign(dense)
                made |= {name: made[name].masked_fill(~finite, torch.nan) for name in _DENSE & set(made)}
            if heads is not None:
                made["per_head"] = safe_slogdet(sign * heads + _identity(heads)).log_abs_det
        return values


def _identity(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def _dominant_sign(matrix: Tensor) -> Tensor:
    values = torch.linalg.eigvalsh((matrix + matrix.mT) / 2)
    low, high = values[..., 0], values[..., -1]
    return torch.where(-low > high, low, high).sign()
