"""The state of one attention layer on one batch, as tensors: all that margins need from any architecture."""

__all__ = ["AttentionState", "state_from_weights"]

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from support_tokens.errors import ArgumentError
from support_tokens.margins.linear_maps import Leaf, NormJacobian, Positions, Projection, gather_positions, leaves_of


@dataclass(frozen=True)
class AttentionState:
    r"""Queries, keys, values and linear maps of one attention layer on one batch.

    Args:
        query: Queries after norm and rotation, `(B, H, T, R)`.
        key: Keys after norm and rotation, `(B, G, S, R)`, with $S \ge T$: the last T keys belong to the queries.
        value: Values, `(B, G, S, Rv)`; head h reads key and value of head `h // (H/G)`.
        scale: Factor of $q^T k$, $1/\sqrt R$ by convention.
        to_query, to_key, to_value: Linearised maps from $x_t$; `to_value` None means identity values (the paper's law).
        output: $W_O$, `(H, D, Rv)`; None for identity values.
        strict: Keys s < t (the paper's law) rather than s <= t (real models).
        allowed: Further restriction, True where attention is allowed, `(B or 1, 1 or H, T, S)`: padding, packing,
            windows.
        valid: True at real tokens, `(B, T)`; None: all are. The block of any other position is the identity.
        softcap: c of $c \tanh(\cdot/c)$ on the logits, None for none.
        sinks: Extra logits `(H,)` that receive attention but have no value, None for none.
        input_norm, output_norm: Jacobians of the norms before and after attention.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    to_query: Projection
    to_key: Projection
    to_value: Projection | None = None
    output: Tensor | None = None
    strict: bool = False
    allowed: Tensor | None = None
    valid: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    input_norm: NormJacobian | None = None
    output_norm: NormJacobian | None = None

    @property
    def batch(self) -> int:
        """B, the number of sequences."""
        return self.query.shape[0]

    @property
    def heads(self) -> int:
        """H, the number of query heads."""
        return self.query.shape[1]

    @property
    def length(self) -> int:
        """T, the number of query positions."""
        return self.query.shape[2]

    @property
    def width(self) -> int:
        """D, the width of the embeddings."""
        return self.to_query.weight.shape[-1]

    @property
    def value_weight(self) -> Tensor:
        """$W_V$, `(G, Rv, D)`: the identity `(1, D, D)` for identity values."""
        if self.to_value is None:
            return torch.eye(self.width, dtype=self.query.dtype, device=self.query.device).unsqueeze(0)
        return self.to_value.weight

    @property
    def stacked_output(self) -> Tensor:
        """$W_O$ of all heads side by side, `(D, H Rv)`: the identity for identity values."""
        if self.output is None:
            return torch.eye(self.width, dtype=self.query.dtype, device=self.query.device)
        return self.output.transpose(0, 1).flatten(1)

    def leaves(self) -> list[Leaf]:
        """All floating-point tensors of the state, each with whether its first dimension is that of sequences.

        Example:
            >>> x, w = torch.randn(2, 5, 4), torch.randn(1, 3, 4)
            >>> [leaf.by_sequence for leaf in state_from_weights(x, w, w).leaves()]
            [True, True, True, False, False]
        """
        leaves = [
            *(Leaf(tensor, True) for tensor in (self.query, self.key, self.value)),
            *self.to_query.leaves(),
            *self.to_key.leaves(),
            *leaves_of(self.to_value),
            *(Leaf(tensor, False) for tensor in (self.output, self.sinks) if tensor is not None),
            *leaves_of(self.input_norm),
            *leaves_of(self.output_norm),
        ]
        return [Leaf(tensor, own and tensor.shape[0] == self.batch) for tensor, own in leaves]

    def with_leaves(self, tensors: Iterable[Tensor], sequences: slice | None = None) -> "AttentionState":
        """The state with other tensors in the places of `leaves`, in their order.

        Args:
            tensors: As many as there are leaves; with `sequences`, those by sequence hold these sequences only.
            sequences: Sequences to which the masks are restricted; None: all.
        """
        rest = iter(tensors)
        restricted = lambda t: t if t is None or sequences is None or t.shape[0] != self.batch else t[sequences]  # noqa: E731
        return replace(
            self,
            query=next(rest),
            key=next(rest),
            value=next(rest),
            to_query=self.to_query.with_leaves(rest),
            to_key=self.to_key.with_leaves(rest),
            to_value=self.to_value and self.to_value.with_leaves(rest),
            output=None if self.output is None else next(rest),
            sinks=None if self.sinks is None else next(rest),
            input_norm=self.input_norm and self.input_norm.with_leaves(rest),
            output_norm=self.output_norm and self.output_norm.with_leaves(rest),
            allowed=restricted(self.allowed),
            valid=restricted(self.valid),
        )

    def allowed_at(self, positions: Positions, keys: int) -> Tensor:
        """True where a query position may attend to one of the first `keys` keys, `(B or 1, 1 or H, n, keys)`."""
        offset = self.key.shape[2] - self.length
        key_index = torch.arange(keys, device=self.query.device)
        if isinstance(positions, slice):
            own = torch.arange(positions.start, positions.stop, device=self.query.device).reshape(1, 1, -1, 1) + offset
        else:
            own = positions[:, None, :, None] + offset
        causal = key_index < own if self.strict else key_index <= own
        extra = gather_positions(self.allowed, positions, 2)
        return causal if extra is None else causal & extra[..., :keys]


def state_from_weights(
    x: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor | None = None,
    w_o: Tensor | None = None,
    *,
    strict: bool = True,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> AttentionState:
    r"""The state of plain attention $\mu_t = \sum_h W_O^h \sum_s \alpha^h_{ts} W_V^h x_s$ with the given weights.

    Args:
        x: Embeddings, `(B, T, D)`; 16-bit input is converted to float32.
        w_q: `(H, R, D)`.
        w_k: `(H, R, D)`.
        w_v: `(H, Rv, D)`, or None with `w_o` None for identity values and one head.
        w_o: `(H, D, Rv)`.
        strict: Whether the mask is s < t rather than s <= t.
        scale: Factor of the logits; None: $1/\sqrt R$.
        key_padding_mask: True at padding, `(B, T)`, as in `torch.nn.MultiheadAttention`.
        segments: Number of the document of each position, `(B, T)`; positions attend within their document only.

    Raises:
        ArgumentError: Shapes do not fit, or `scale` is not a positive number.

    Example:
        >>> x, w = torch.randn(2, 5, 4), torch.randn(1, 3, 4)
        >>> state_from_weights(x, w, w).query.shape
        torch.Size([2, 1, 5, 3])
    """
    x, w_q, w_k, w_v, w_o, scale = _checked(x, w_q, w_k, w_v, w_o, scale, key_padding_mask)
    valid = None if key_padding_mask is None else ~key_padding_mask.bool()
    if valid is not None:
        # Padded positions may hold NaN, which times zero is still NaN.
        x = torch.where(valid.unsqueeze(-1), x, torch.zeros((), dtype=x.dtype, device=x.device))
    allowed = None if valid is None else valid[:, None, None, :].expand(-1, 1, x.shape[1], -1)
    if segments is not None:
        same = (segments[:, :, None] == segments[:, None, :]).unsqueeze(1)
        allowed = same if allowed is None else same & allowed
    project = lambda w: torch.einsum("btd,hrd->bhtr", x, w)  # noqa: E731
    return AttentionState(
        query=project(w_q),
        key=project(w_k),
        value=x.unsqueeze(1) if w_v is None else project(w_v),
        scale=scale,
        to_query=Projection(w_q),
        to_key=Projection(w_k),
        to_value=None if w_v is None else Projection(w_v),
        output=w_o,
        strict=strict,
        allowed=allowed,
        valid=valid,
    )


def _checked(
    x: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor | None,
    w_o: Tensor | None,
    scale: float | None,
    key_padding_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float]:
    """Checks arguments of `state_from_weights` and converts them to one floating dtype of at least 32 bits."""
    if x.dim() != 3 or not x.is_floating_point():
        raise ArgumentError(
            f"x must be a floating tensor of shape (B, T, D), received {_describe(x)}; pass embeddings."
        )
    width = x.shape[-1]
    if w_q.dim() != 3 or w_q.shape[-1] != width:
        raise ArgumentError(
            f"w_q must have shape (H, R, D) with D = {width} as in x, received {_describe(w_q)}; reshape it to one "
            f"matrix a head."
        )
    if w_k.shape != w_q.shape:
        raise ArgumentError(
            f"w_k must have the shape of w_q, {tuple(w_q.shape)}, received {_describe(w_k)}; pass one key a head."
        )
    if (w_v is None) != (w_o is None):
        given, missing = ("w_v", "w_o") if w_o is None else ("w_o", "w_v")
        raise ArgumentError(
            f"w_v and w_o must be given together or not at all, received {given} without {missing}; pass both."
        )
    heads = w_q.shape[0]
    if w_v is None and heads != 1:
        raise ArgumentError(
            f"w_q must have one head for identity values, received {heads} heads; pass w_v and w_o with several heads."
        )
    if w_v is not None and (w_v.dim() != 3 or w_v.shape[0] != heads or w_v.shape[-1] != width):
        raise ArgumentError(
            f"w_v must have shape (H, Rv, D) with H = {heads}, D = {width}, received {_describe(w_v)}; reshape it."
        )
    if w_v is not None and w_o is not None and tuple(w_o.shape) != (heads, width, w_v.shape[1]):
        raise ArgumentError(
            f"w_o must have shape (H, D, Rv) = {(heads, width, w_v.shape[1])}, received {_describe(w_o)}; reshape it."
        )
    factor = w_q.shape[1] ** -0.5 if scale is None else float(scale)
    if not 0 < factor < float("inf"):
        raise ArgumentError(f"scale must be a positive finite number, received {factor}; leave it None for 1/sqrt(R).")
    if key_padding_mask is not None and key_padding_mask.shape != x.shape[:2]:
        raise ArgumentError(
            f"key_padding_mask must have shape (B, T) = {tuple(x.shape[:2])}, received {_describe(key_padding_mask)}; "
            "pass True at padding."
        )
    dtype = torch.promote_types(x.dtype, w_q.dtype)
    dtype = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    values = None if w_v is None else w_v.to(dtype)
    output = None if w_o is None else w_o.to(dtype)
    return x.to(dtype), w_q.to(dtype), w_k.to(dtype), values, output, factor


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"
