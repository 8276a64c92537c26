"""What a table of one family of models may say: names and layouts, no mathematics."""

__all__ = ["Architecture", "Norm"]

from dataclasses import dataclass
from typing import Literal

Rotary = Literal[
    "halves", "halves_narrow", "halves_reversed", "neighbours", "neighbours_narrow", "neighbours_sine_first"
]


@dataclass(frozen=True)
class Norm:
    r"""A layer norm or RMS norm of a family.

    Args:
        path: Where the module is, from the block (norms of the residual stream) or from attention (query and key).
        centered: Whether it subtracts the mean (layer norm).
        gain_offset: What is added to the stored weight before it multiplies: 1 where a model stores $\gamma - 1$.
        epsilon: Attribute of the module that holds the epsilon inside the root, or the number where it is fixed.
        heads_first: Whether a norm of query or key receives `(B, H, T, R)` rather than `(B, T, ...)`.
        switch: Attribute of the block or of attention that says whether the norm is there; empty: it always is.
        after_rotation: Whether a norm of query or key acts on what is rotated already.
    """

    path: str
    centered: bool = False
    gain_offset: float = 0.0
    epsilon: str | float = "variance_epsilon"
    heads_first: bool = False
    switch: str = ""
    after_rotation: bool = False


@dataclass(frozen=True)
class Architecture:
    r"""Where the attention of one family keeps what the Jacobian needs.

    Args:
        family: Name for people.
        model_types: Values of `config.model_type` that this table describes.
        attention: Path of the attention module from the block.
        projections: Paths of the query, key and value projections from attention; one path if they are fused.
        fused: Rows of a fused projection: `stacked` is [all q | all k | all v], `per_head` is [q k v] head after head.
        output: Path of the output projection from attention.
        input_norm: Norm between the residual stream and attention.
        output_norm: Norm between attention and the residual stream.
        query_norm, key_norm: Norms of query and key before the rotation.
        rotation: Pairs of the rotary map and the layout of its cosines: `halves` (i, i + n/2), `halves_narrow` the same
            with cosines of width n/2, `halves_reversed` in the other sense; `neighbours` (2i, 2i + 1),
            `neighbours_narrow` where the first half of the cosines counts, `neighbours_sine_first` with sines before
            cosines, both of width n/2; None for no rotation.
        rotation_switch: Attributes of attention of which one must be true, or with `not ` in front false, where a layer
            rotates; empty: it does. A layer that receives no cosines does not, whatever this says.
        query_factor, value_factor: Attribute of attention that multiplies the query or the value before it leaves the
            projection; empty: none.
        residual_factor: Attribute of the block that multiplies what attention adds to the residual stream; empty: none.
        hybrid: Whether only some blocks have an attention; the others cannot be captured.
        required: Values of the configuration outside of which this table is not exact.
    """

    family: str
    model_types: tuple[str, ...]
    attention: str = "self_attn"
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    fused: Literal["stacked", "per_head"] | None = None
    output: str = "o_proj"
    input_norm: Norm | None = Norm("input_layernorm")
    output_norm: Norm | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    rotation: Rotary | None = "halves"
    rotation_switch: tuple[str, ...] = ()
    query_factor: str = ""
    value_factor: str = ""
    residual_factor: str = ""
    hybrid: bool = False
    required: tuple[tuple[str, object], ...] = ()
