r"""The frozen contract between any attention layer and the mathematics: what a layer did to one batch, as tensors.

A position enters attention through three linearised maps, its query, key and value as functions of $x_t$:

$$ \frac{\partial q_t}{\partial x_t} = \mathrm{Rot}_t\, N^q_t\, W_Q\, N_t, $$

with $N_t$ the Jacobian of the norm before attention, $N^q_t$ the one of the QK norm and $\mathrm{Rot}_t$ the rotation
of position $t$; each factor may be absent. What leaves attention passes $P_t W_O$, with $P_t$ the Jacobian of a norm
after it.
"""

__all__ = ["AttentionState", "NormJacobian", "Projection", "Rotation", "Rows", "state_from_weights", "take"]

from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from support_tokens.errors import ArgumentError

Rows = slice | Tensor
"""Query positions: a slice with explicit bounds, or indices `(B, n)` that may differ between sequences."""


@overload
def take(tensor: Tensor, rows: Rows, dim: int) -> Tensor: ...
@overload
def take(tensor: None, rows: Rows, dim: int) -> None: ...
def take(tensor: Tensor | None, rows: Rows, dim: int) -> Tensor | None:
    """The entries of `tensor` at query positions `rows` along `dim`; a batch of one is shared by all sequences."""
    if tensor is None:
        return None
    if isinstance(rows, slice):
        return tensor.narrow(dim, rows.start, rows.stop - rows.start)
    dim = dim % tensor.dim()
    shape = list(tensor.shape)
    shape[0], shape[dim] = rows.shape
    index = rows.reshape([rows.shape[0] if d == 0 else rows.shape[1] if d == dim else 1 for d in range(tensor.dim())])
    return tensor.expand(shape[0], *tensor.shape[1:]).gather(dim, index.expand(shape))


@dataclass(frozen=True)
class NormJacobian:
    r"""Jacobian of a layer norm or RMS norm, $N = s^{-1}\,\mathrm{diag}(\gamma)\,(\Pi - \hat z \hat z^T / n)$.

    Exact with the epsilon inside the root, for both norms: $\Pi$ is the centring projection of a layer norm and the
    identity for an RMS norm.

    Args:
        gain: $\gamma$ as it multiplies, `(n,)`.
        direction: $\hat z$, the normalised vector before gain and bias, `(B, T, n)`, or `(B, T, heads, n)` for a norm
            that acts on each head apart.
        inverse_scale: $1/s$, of the shape of `direction` with a last dimension of 1.
        centered: Whether the norm subtracts the mean (layer norm).
    """

    gain: Tensor
    direction: Tensor
    inverse_scale: Tensor
    centered: bool

    @property
    def per_head(self) -> bool:
        """Whether the norm acts on each head apart, as QK norms mostly do."""
        return self.direction.dim() == 4

    def at(self, rows: Rows) -> "NormJacobian":
        """The same norm at query positions `rows` only."""
        return NormJacobian(
            self.gain,
            take(self.direction, rows, 1),
            take(self.inverse_scale, rows, 1),
            self.centered,
        )

    def shared(self, matrix: Tensor) -> Tensor:
        r"""$\mathrm{diag}(\gamma)\,\Pi\,M$ for a matrix `(n, K)`: the part of $N M$ that no position changes."""
        projected = matrix - matrix.mean(0, keepdim=True) if self.centered else matrix
        return self.gain.unsqueeze(-1) * projected

    def shared_transposed(self, matrix: Tensor) -> Tensor:
        r"""$M\,\mathrm{diag}(\gamma)\,\Pi$ for a matrix `(..., n)`."""
        scaled = matrix * self.gain
        return scaled - scaled.mean(-1, keepdim=True) if self.centered else scaled


@dataclass(frozen=True)
class Rotation:
    r"""Rotary position map $\mathrm{Rot}_t$ on the first `cos.shape[-1]` coordinates of a head; the rest pass
    unchanged.

    $\mathrm{Rot}_t z = \cos_t \odot z + \sin_t \odot S z$, with $S$ the signed swap of halves (or of neighbours when
    `interleaved`).

    Args:
        cos: `(B or 1, T, width)`.
        sin: As `cos`.
        interleaved: Pairs are neighbours (2i, 2i+1) rather than (i, i + width/2).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def at(self, rows: Rows) -> "Rotation":
        """The rotation at query positions `rows` only."""
        return Rotation(take(self.cos, rows, 1), take(self.sin, rows, 1), self.interleaved)

    def _swap(self, z: Tensor) -> Tensor:
        if self.interleaved:
            return torch.stack((-z[..., 1::2], z[..., ::2]), dim=-1).flatten(-2)
        half = z.shape[-1] // 2
        return torch.cat((-z[..., half:], z[..., :half]), dim=-1)

    def transpose(self, z: Tensor) -> Tensor:
        r"""$\mathrm{Rot}_t^T z$ for `z` of shape `(B, H, n, ..., R)`; row vectors pass through the rotation this
        way."""
        width = self.cos.shape[-1]
        shape = (self.cos.shape[0], 1, self.cos.shape[1], *(1,) * (z.dim() - 4), width)
        head, rest = z[..., :width], z[..., width:]
        turned = self.cos.reshape(shape) * head - self._swap(self.sin.reshape(shape) * head)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


@dataclass(frozen=True)
class Projection:
    """One linearised map from the (normed) embedding to a head: weight, then optional norm, then optional rotation.

    Args:
        weight: `(heads, R, D)`.
        norm: Jacobian of the norm on the projected vector, per head or over all heads at once.
        rotation: Rotary map after the norm.
    """

    weight: Tensor
    norm: NormJacobian | None = None
    rotation: Rotation | None = None

    def __post_init__(self) -> None:
        if self.norm is not None and self.norm.centered and not self.norm.per_head:
            raise ArgumentError(
                "norm must act on each head apart or not subtract the mean, received a layer norm over all heads at "
                "once; "
                "no family of models uses one, so no formula is offered."
            )

    def at(self, rows: Rows) -> "Projection":
        """The map at query positions `rows` only."""
        return Projection(self.weight, self.norm and self.norm.at(rows), self.rotation and self.rotation.at(rows))


@dataclass(frozen=True)
class AttentionState:
    r"""All that log-determinants, means and covariances of one attention layer need.

    Args:
        query: Queries after norm and rotation, `(B, H, T, R)`.
        key: Keys after norm and rotation, `(B, G, S, R)`, with $S \ge T$: the last T keys belong to the queries.
        value: Values, `(B, G, S, Rv)`; head h reads key and value of head `h // (H/G)`.
        scale: Factor of $q^T k$, $1/\sqrt R$ by convention.
        to_query, to_key, to_value: Linearised maps from $x_t$; `to_value` None means identity values (the paper's law).
        output: $W_O$, `(H, D, Rv)`; None for identity values.
        strict: Keys s < t (the paper's law) rather than s <= t (real models).
        allowed: Further restriction, True where attention may look, `(B or 1, 1 or H, T, S)`: padding, packing,
            windows.
        valid: True at real tokens, `(B, T)`; None: all are. The block of any other position is the identity.
        softcap: c of $c \tanh(\cdot/c)$ on the logits, None for none.
        sinks: Extra logits `(H,)` that take attention and give no value, None for none.
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
        """B."""
        return self.query.shape[0]

    @property
    def heads(self) -> int:
        """H."""
        return self.query.shape[1]

    @property
    def length(self) -> int:
        """T, the number of query positions."""
        return self.query.shape[2]

    @property
    def width(self) -> int:
        """D, the width of the embeddings."""
        return self.to_query.weight.shape[-1]

    def allowed_rows(self, rows: Rows, keys: int) -> Tensor:
        """True where query positions `rows` may look among the first `keys` keys, `(B or 1, 1 or H, n, keys)`."""
        offset = self.key.shape[2] - self.length
        key_index = torch.arange(keys, device=self.query.device)
        if isinstance(rows, slice):
            own = torch.arange(rows.start, rows.stop, device=self.query.device).reshape(1, 1, -1, 1) + offset
        else:
            own = rows[:, None, :, None] + offset
        causal = key_index < own if self.strict else key_index <= own
        extra = take(self.allowed, rows, 2)
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
        x: Embeddings, `(B, T, D)`; 16-bit input is taken to float32.
        w_q: `(H, R, D)`.
        w_k: `(H, R, D)`.
        w_v: `(H, Rv, D)`, or None with `w_o` None for identity values and one head.
        w_o: `(H, D, Rv)`.
        strict: Mask s < t (True) or s <= t (False).
        scale: Factor of the logits; None: $1/\sqrt R$.
        key_padding_mask: True at padding, `(B, T)`, as in `torch.nn.MultiheadAttention`.
        segments: Number of the document that each position belongs to, `(B, T)`; documents do not see each other.

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
        # What stands in a padded position (it may be NaN) must not reach any product, not even times zero.
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
    """Arguments of `state_from_weights` after all checks, in one floating dtype of at least 32 bits."""
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
