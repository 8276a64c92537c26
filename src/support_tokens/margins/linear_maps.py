r"""Linear maps of one attention layer at chosen positions: norms, rotations, projections.

A position enters attention through three linear maps, its query, key and value as functions of $x_t$. For the query,

$$ \frac{\partial q_t}{\partial x_t} = \mathrm{Rot}_t\, N^q_t\, W_Q\, N_t, $$

with $N_t$ the Jacobian of the norm before attention, $N^q_t$ that of the QK norm and $\mathrm{Rot}_t$ the rotation of
position $t$; each factor may be absent. The output of the heads is multiplied by $P_t W_O$, with $P_t$ the Jacobian of
a norm after attention.
"""

__all__ = ["Leaf", "NormJacobian", "Positions", "Projection", "Rotation", "gather_positions", "leaves_of"]

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, overload

import torch
from torch import Tensor

from support_tokens.errors import ArgumentError

Positions = slice | Tensor
"""Query positions: a slice with explicit bounds, or indices `(B, n)` that may differ between sequences."""


class Leaf(NamedTuple):
    """A floating-point tensor of an attention state.

    Args:
        tensor: The tensor.
        by_sequence: Whether its first dimension is that of sequences; otherwise all sequences share it.
    """

    tensor: Tensor
    by_sequence: bool


@overload
def gather_positions(tensor: Tensor, positions: Positions, dim: int) -> Tensor: ...
@overload
def gather_positions(tensor: None, positions: Positions, dim: int) -> None: ...
def gather_positions(tensor: Tensor | None, positions: Positions, dim: int) -> Tensor | None:
    """Entries of `tensor` at `positions` along dimension `dim`; a batch of one is shared by all sequences.

    Example:
        >>> gather_positions(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[2], [0]]), 1)
        tensor([[3],
                [4]])
    """
    if tensor is None:
        return None
    if isinstance(positions, slice):
        return tensor.narrow(dim, positions.start, positions.stop - positions.start)
    dim = dim % tensor.dim()
    sizes = dict(zip((0, dim), positions.shape, strict=True))
    index = positions.reshape([sizes.get(d, 1) for d in range(tensor.dim())])
    shape = [sizes.get(d, size) for d, size in enumerate(tensor.shape)]
    return tensor.expand(shape[0], *tensor.shape[1:]).gather(dim, index.expand(shape))


@dataclass(frozen=True)
class NormJacobian:
    r"""Jacobian of a layer norm or RMS norm, $N = s^{-1}\,\mathrm{diag}(\gamma)\,(\Pi - \hat z \hat z^T / n)$.

    Exact with the epsilon inside the root, for both norms: $\Pi$ is the centring projection of a layer norm and the
    identity for an RMS norm.

    Args:
        gain: $\gamma$ as it multiplies, `(n,)`.
        direction: $\hat z$, the normalised vector before gain and bias, `(B, T, n)`, or `(B, T, heads, n)` for a norm
            that acts on each head separately.
        inverse_scale: $1/s$, of the shape of `direction` with a last dimension of 1.
        centered: Whether the norm subtracts the mean (layer norm).
    """

    gain: Tensor
    direction: Tensor
    inverse_scale: Tensor
    centered: bool

    @property
    def per_head(self) -> bool:
        """Whether the norm acts on each head separately, as most QK norms do."""
        return self.direction.dim() == 4

    def at(self, positions: Positions) -> "NormJacobian":
        """The norm at some query positions."""
        return replace(
            self,
            direction=gather_positions(self.direction, positions, 1),
            inverse_scale=gather_positions(self.inverse_scale, positions, 1),
        )

    def leaves(self) -> list[Leaf]:
        """Its tensors."""
        return [Leaf(self.gain, False), Leaf(self.direction, True), Leaf(self.inverse_scale, True)]

    def with_leaves(self, tensors: Iterator[Tensor]) -> "NormJacobian":
        """The same norm with other tensors, in the order of `leaves`."""
        return NormJacobian(next(tensors), next(tensors), next(tensors), self.centered)

    def shared(self, matrix: Tensor) -> Tensor:
        r"""$\mathrm{diag}(\gamma)\,\Pi\,M$ for a matrix `(n, K)`: the part of $N M$ shared by all positions."""
        projected = matrix - matrix.mean(0, keepdim=True) if self.centered else matrix
        return self.gain.unsqueeze(-1) * projected

    def shared_transposed(self, matrix: Tensor) -> Tensor:
        r"""$M\,\mathrm{diag}(\gamma)\,\Pi$ for a matrix `(..., n)`."""
        scaled = matrix * self.gain
        return scaled - scaled.mean(-1, keepdim=True) if self.centered else scaled


@dataclass(frozen=True)
class Rotation:
    r"""Rotary position map $\mathrm{Rot}_t$ on the first `cos.shape[-1]` coordinates of a head, identity on the rest.

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

    def at(self, positions: Positions) -> "Rotation":
        """The rotation at some query positions."""
        cos, sin = (gather_positions(tensor, positions, 1) for tensor in (self.cos, self.sin))
        return Rotation(cos, sin, self.interleaved)

    def leaves(self) -> list[Leaf]:
        """Its tensors."""
        return [Leaf(self.cos, True), Leaf(self.sin, True)]

    def with_leaves(self, tensors: Iterator[Tensor]) -> "Rotation":
        """The same rotation with other tensors, in the order of `leaves`."""
        return Rotation(next(tensors), next(tensors), self.interleaved)

    def _swap(self, z: Tensor) -> Tensor:
        if self.interleaved:
            return torch.stack((-z[..., 1::2], z[..., ::2]), dim=-1).flatten(-2)
        half = z.shape[-1] // 2
        return torch.cat((-z[..., half:], z[..., :half]), dim=-1)

    def transpose(self, z: Tensor) -> Tensor:
        r"""$\mathrm{Rot}_t^T z$, which is $z^T \mathrm{Rot}_t$ as a row vector, for `z` `(B, H, n, ..., R)`."""
        width = self.cos.shape[-1]
        shape = (self.cos.shape[0], 1, self.cos.shape[1], *(1,) * (z.dim() - 4), width)
        head, rest = z[..., :width], z[..., width:]
        turned = self.cos.reshape(shape) * head - self._swap(self.sin.reshape(shape) * head)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


@dataclass(frozen=True)
class Projection:
    """One linearised map from the (normed) embedding to a head: weight, then optional norm and rotation.

    Args:
        weight: `(heads, R, D)`.
        norm: Jacobian of the norm on the projected vector, separately per head or over all heads at once.
        rotation: Rotary map after the norm.
        norm_last: Whether the norm, which must act on each head separately, comes after the rotation instead.
    """

    weight: Tensor
    norm: NormJacobian | None = None
    rotation: Rotation | None = None
    norm_last: bool = False

    def __post_init__(self) -> None:
        if self.norm is not None and self.norm.centered and not self.norm.per_head:
            raise ArgumentError(
                "norm must act on each head separately or be an RMS norm, received a layer norm over all heads at "
                "once; use a norm per head."
            )
        if self.norm_last and (self.norm is None or not self.norm.per_head):
            raise ArgumentError(
                "norm must act on each head separately where norm_last is True, received "
                f"{'none' if self.norm is None else 'a norm over all heads at once'}; leave norm_last False."
            )

    def at(self, positions: Positions) -> "Projection":
        """The map at some query positions."""
        norm, rotation = self.norm and self.norm.at(positions), self.rotation and self.rotation.at(positions)
        return Projection(self.weight, norm, rotation, self.norm_last)

    def leaves(self) -> list[Leaf]:
        """Its tensors."""
        return [Leaf(self.weight, False), *leaves_of(self.norm), *leaves_of(self.rotation)]

    def with_leaves(self, tensors: Iterator[Tensor]) -> "Projection":
        """The same map with other tensors, in the order of `leaves`."""
        weight = next(tensors)
        norm = self.norm and self.norm.with_leaves(tensors)
        return Projection(weight, norm, self.rotation and self.rotation.with_leaves(tensors), self.norm_last)


def leaves_of(part: NormJacobian | Rotation | Projection | None) -> list[Leaf]:
    """The tensors of a part of a state that may be absent."""
    return [] if part is None else part.leaves()
