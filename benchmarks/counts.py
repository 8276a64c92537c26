r"""Operations of a training step with and without the barrier, counted from the sizes of a model.

Counted are multiply-add operations (two each) of forward and backward pass. Per position and layer of the model's own
attention, with $K = \min(H R_v, D)$ and a mean reach of S keys,

$$ \underbrace{6\, H S R_v R}_{\text{covariance}} + \underbrace{6\, H R_v R K}_{\text{assembly}} +
   \underbrace{6\, K^2 (H + 4)}_{\text{low rank}} + \underbrace{2 K^3}_{\text{elimination}}, $$

and $12\, D\, H R_v\, D$ for $W_O$ where $H R_v > D$; for the law $6 S R^2 + 2 R^3$. The plain step is $6 N$ a token and
$12\, L\, H R\, T$ for its attention.
"""

__all__ = ["SHAPES", "Counts", "Shape", "barrier_counts", "mean_reach", "plain_counts", "shape_of"]

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support_tokens.errors import ArgumentError, DataError

# Key blocks of this many keys are left out or taken whole, so a causal product does a little more than half.
_CAUSAL_KEYS = 64


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder that operations depend on.

    Args:
        width: D.
        layers: L, blocks.
        heads: H, query heads.
        kv_heads: G, key/value heads.
        head_width: R = Rv.
        mlp_width: Inner width of the feed-forward part.
        vocabulary: Rows of the embedding.
        gated: Whether the feed-forward part has three matrices rather than two.
        tied: Whether input and output embedding are one matrix.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    vocabulary: int
    gated: bool = True
    tied: bool = False

    @property
    def side(self) -> int:
        """K, the side of the matrices whose determinants are taken for the model's own attention."""
        return min(self.heads * self.head_width, self.width)

    @property
    def block_parameters(self) -> int:
        """Weights of matrices in one block."""
        attention = self.width * self.head_width * (2 * self.heads + 2 * self.kv_heads)
        return attention + (3 if self.gated else 2) * self.width * self.mlp_width

    @property
    def parameters(self) -> int:
        """All weights of matrices, embeddings among them."""
        return self.layers * self.block_parameters + (1 if self.tied else 2) * self.vocabulary * self.width


SHAPES = {
    "small-gpt": Shape(128, 4, 4, 4, 32, 512, 100, gated=False, tied=True),
    "smollm2-135m": Shape(576, 30, 9, 3, 64, 1536, 49152, tied=True),
    "8b": Shape(4096, 32, 32, 8, 128, 14336, 128256),
    "70b": Shape(8192, 80, 64, 8, 128, 28672, 128256),
}
"""Named configurations: the two that are measured here, and the shapes of Llama 3's 8B and 70B."""


def shape_of(config: str | Path) -> Shape:
    """The shape that a name of `SHAPES`, a config.json of transformers, or a folder with one describes.

    Raises:
        DataError: There is no such file, or it lacks a size.

    Example:
        >>> shape_of("8b").side
        4096
    """
    if str(config) in SHAPES:
        return SHAPES[str(config)]
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError(
            f"a configuration must be one of {', '.join(SHAPES)} or a config.json, received '{config}'; name one."
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"'{path}' is not JSON ({error}); pass the config.json of a model.") from error
    return _shape(values.get("text_config", values), path)


def _shape(values: dict[str, Any], path: Path) -> Shape:
    def first(*names: str, default: Any = None) -> Any:
        found = next((values[name] for name in names if values.get(name) is not None), default)
        if found is None:
            raise DataError(f"'{path}' does not give {names[0]}, which is required; pass a decoder's config.json.")
        return found

    width, heads = first("hidden_size", "n_embd"), first("num_attention_heads", "n_head")
    inner = first("intermediate_size", "ffn_dim", "n_inner", default=4 * width)
    gated = values.get("model_type") not in ("gpt2", "gpt_neox", "opt", "phi")
    return Shape(
        width=width,
        layers=first("num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=first("num_key_value_heads", default=heads),
        head_width=first("head_dim", default=width // heads),
        mlp_width=inner,
        vocabulary=first("vocab_size"),
        gated=gated,
        tied=bool(values.get("tie_word_embeddings", values.get("model_type") == "gpt2")),
    )


@dataclass(frozen=True)
class Counts:
    """Work of one training step on one device.

    Args:
        product: Operations in matrix products.
        elimination: Operations in eliminations, of matrices of side `side`.
        side: Side of the eliminated matrices, 0 for none.
        moved: Bytes that pass between memory and processor outside of products.
        memory: Bytes that are held above weights and their optimiser's state.
    """

    product: float
    elimination: float
    side: int
    moved: float
    memory: float


def mean_reach(length: int, block: int = _CAUSAL_KEYS) -> float:
    """Mean number of keys a position is multiplied with, at all positions, when whole blocks of keys are left out.

    Example:
        >>> mean_reach(256), mean_reach(32)
        (160.0, 32.0)
    """
    blocks = math.ceil(length / block)
    return sum(min(block, length - b * block) * (length - b * block) for b in range(blocks)) / length


def plain_counts(shape: Shape, batch: int, length: int, *, item: int = 4) -> Counts:
    r"""The plain step: $6 N$ operations a token, attention, and the passes of optimiser, activations and logits.

    Args:
        shape: The model.
        batch: B, sequences on the device.
        length: T.
        item: Bytes of a number.
    """
    tokens = batch * length
    matrices = shape.layers * shape.block_parameters + shape.vocabulary * shape.width
    # The whole square: the half that a causal kernel leaves out pays for its softmax, forward and again backward.
    attention = 12 * shape.layers * shape.heads * shape.head_width * length * tokens
    # Around the products of a block, read and written, forward and backward: two norms (10), two sums (6), heads in and
    # out of their layout (16), rotation or bias (8); the activation (20), and where it is gated a product (8).
    wide = 40 * shape.width + (28 if shape.gated else 20) * shape.mlp_width
    logits = 8 * shape.vocabulary
    moved = item * (tokens * (shape.layers * wide + logits) + 10 * shape.parameters)
    kept = shape.layers * (8 * shape.width + 3 * shape.mlp_width) + 3 * shape.vocabulary
    return Counts(6.0 * matrices * tokens + attention, 0.0, 0, moved, item * (tokens * kept + shape.parameters))


def barrier_counts(
    shape: Shape,
    batch: int,
    length: int,
    *,
    source: str = "model",
    positions: int | None = None,
    rank: int = 32,
    item: int = 4,
) -> Counts:
    """What the barrier of one layer adds to a step.

    Args:
        shape: The model.
        batch: B.
        length: T.
        source: `model` or `prior`.
        positions: n of each sequence; None: all.
        rank: R of the law.
        item: Bytes of a number.

    Raises:
        ArgumentError: The source is unknown.
    """
    count = batch * (length if positions is None else min(positions, length))
    reach = mean_reach(length)
    if source == "prior":
        side = min(rank, shape.width)
        covariance = 6 * reach * side * side
        project = 12 * shape.width * side * batch * length
        # Of each matrix: covariance in key blocks (2 a block, forward), transposition, elimination in blocks of 8 (6
        # each), trial, gradient in key blocks; of each key: outer products twice, and the gradient by it.
        passes = 4 * math.ceil(reach / _CAUSAL_KEYS) + 32
        moved = item * (count * side * side * passes + batch * length * side * side * 8)
        held = item * (6 * 2**19 + 3 * batch * length * (shape.width + 2 * side))
        return Counts(covariance * count + project, 2.0 * side**3 * count, side, moved, held)
    if source != "model":
        raise ArgumentError(f"source must be 'prior' or 'model', received {source!r}; choose one of the two.")
    heads, width, side = shape.heads, shape.head_width, shape.side
    inner = heads * width
    per_position = 6 * heads * reach * width * width + 6 * inner * width * side + 6 * side * side * (heads + 4)
    if inner > shape.width:
        per_position += 12 * inner * shape.width * shape.width
    shared = 18 * side * width * shape.width * (heads + 2 * shape.kv_heads)
    outer = batch * length * shape.kv_heads * width * width
    moved = item * (count * side * side * 14 + outer * 8)
    matrices = max(1, min(24, 2**26 // (side * side * item)))
    held = item * (3 * matrices * side * side + 6 * 64 * side * width + 3 * batch * length * width * (heads + 2))
    return Counts(per_position * count + shared, 2.0 * side**3 * count, side, moved, held)
