r"""Quantization of the weights to few bits."""

__all__ = ["Quantization", "round_channels"]

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.robustness.perturbations.base import Read


@dataclass(frozen=True)
class Quantization:
    r"""Every weight matrix rounded to `bits` bits, symmetrically, with one scale for each output channel $c$.

    $$ w'_{c} = s_c\, \mathrm{round}(w_c / s_c), \qquad s_c = \frac{\max_i |w_{ci}|}{2^{b-1} - 1}. $$

    Matrices are all floating-point parameters of two or more dimensions, tied ones once. The output channel of a linear
    layer is a row of `(out, in)`, that of GPT-2's `Conv1D` a column of `(in, out)`, that of an embedding a token.
    Gains, biases and other vectors are kept, as usual in quantization. Weights are rounded in place and restored
    exactly afterwards.

    Args:
        bits: Bits of a weight, 2 to 16.

    Raises:
        ArgumentError: `bits` is out of range.

    Example:
        >>> Quantization(4).name, Quantization(4).strength
        ('weights in 4 bits', 0.14285714285714285)
    """

    bits: int
    kind: ClassVar[str] = "weight_rounding"

    def __post_init__(self) -> None:
        if not (isinstance(self.bits, int) and 2 <= self.bits <= 16):
            raise ArgumentError(
                f"The bits of rounded weights must be a whole number from 2 to 16, received {self.bits!r}; pass 8."
            )

    @property
    def name(self) -> str:
        """`weights in BITS bits`."""
        return f"weights in {self.bits} bits"

    @property
    def family(self) -> str:
        """One curve."""
        return self.kind

    @property
    def strength(self) -> float:
        """Rounding step as a fraction of the largest weight of the channel."""
        return 1 / (2 ** (self.bits - 1) - 1)

    @property
    def axis(self) -> str:
        """Rounding step, with its unit."""
        return "rounding step / largest weight of the channel"

    def record(self) -> dict[str, Any]:
        """Kind and bits."""
        return {"kind": self.kind, **asdict(self)}

    @contextmanager
    def applied(self, model: nn.Module, rms: float) -> Iterator[Read]:
        """Rounds the weights, and restores them when the context ends, also after an error."""
        del rms
        kept: list[tuple[nn.Parameter, Tensor]] = []
        try:
            with torch.no_grad():
                for parameter, channel in _matrices(model):
                    kept.append((parameter, parameter.detach().clone()))
                    parameter.copy_(round_channels(parameter, self.bits, channel))
            yield lambda batch: batch
        finally:
            with torch.no_grad():
                for parameter, before in kept:
                    parameter.copy_(before)


def round_channels(weight: Tensor, bits: int, channel: int = 0) -> Tensor:
    r"""Symmetric rounding of `weight` to `bits` bits, with one scale for each index of dimension `channel`.

    Args:
        weight: Any shape of two or more dimensions.
        bits: At least 2.
        channel: Dimension of the output channels; a channel of zeros stays as it is.

    Example:
        >>> round_channels(torch.tensor([[1.0, 0.4], [0.0, 0.0]]), bits=2)
        tensor([[1., 0.],
                [0., 0.]])
    """
    others = [d for d in range(weight.dim()) if d != channel]
    # In float32, since a scale in bfloat16 would be off by more than the step of 8 bits.
    exact = weight.float()
    step = exact.abs().amax(others, keepdim=True) / (2 ** (bits - 1) - 1)
    rounded = torch.where(step > 0, step * (exact / step.clamp_min(torch.finfo(torch.float32).tiny)).round(), exact)
    return rounded.to(weight.dtype)


def _matrices(model: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """Each matrix once, with the dimension of its output channels."""
    from transformers.pytorch_utils import Conv1D

    seen: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.dim() >= 2 and parameter.is_floating_point() and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter, 1 if isinstance(module, Conv1D) else 0
