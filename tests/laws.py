"""Laws that every measure of margins obeys, whatever computes it; each test names a measure and calls a law.

A measure is a function of `x` (B, T, D) and a key padding mask (B, T), True where padding, or None. It returns an
object with `sign` and `log_abs_det`, both (B, T). `attention_slogdet` and `EmbeddingPrior.margins` are two of them.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.testing import assert_close

__all__ = [
    "BOUNDARY",
    "EXACT",
    "equals",
    "gradients_equal",
    "gradients_stay_finite",
    "padding_changes_nothing",
    "permuting_rows_permutes_results",
    "rows_do_not_see_each_other",
    "sixteen_bit_input_is_computed_in_float32",
]

EXACT = {"rtol": 0.0, "atol": 1e-10}
# Below this sigma_min a log-determinant loses digits by its condition, by nobody's fault; laws of equality stop there.
BOUNDARY = 1e-3


class Slogdet(Protocol):
    sign: Tensor
    log_abs_det: Tensor


Measure = Callable[[Tensor, Tensor | None], Slogdet]


def equals(found: Slogdet, sign: Tensor, log_abs_det: Tensor, where: Tensor | None = None, **tolerance: float) -> None:
    """Sign exactly and log|det| to 1e-10 (or `tolerance`), at the positions `where`; every value is a finite number."""
    assert found.sign.shape == found.log_abs_det.shape == log_abs_det.shape
    assert torch.isfinite(found.log_abs_det).all()
    where = torch.ones_like(sign, dtype=torch.bool) if where is None else where
    assert_close(found.sign[where], sign[where], rtol=0, atol=0)
    assert_close(found.log_abs_det[where], log_abs_det[where], **{**EXACT, **tolerance})


def rows_do_not_see_each_other(measure: Measure, x: Tensor, padding: Tensor | None = None) -> None:
    together = measure(x, padding)
    for b in range(len(x)):
        alone = measure(x[b : b + 1], None if padding is None else padding[b : b + 1])
        equals(alone, together.sign[b : b + 1], together.log_abs_det[b : b + 1])


def permuting_rows_permutes_results(measure: Measure, x: Tensor, order: Sequence[int]) -> None:
    before, after = measure(x, None), measure(x[list(order)], None)
    equals(after, before.sign[list(order)], before.log_abs_det[list(order)])


def padding_changes_nothing(measure: Measure, x: Tensor, padding: Tensor) -> None:
    """Real tokens are as in the sequence without its padding, whatever that holds; padding has sign 1 and margin 0."""
    noisy = torch.where(padding[..., None], torch.nan, x).requires_grad_()
    padded = measure(noisy, padding)
    assert (padded.sign[padding] == 1).all()
    assert (padded.log_abs_det[padding] == 0).all()
    for b, real in enumerate(~padding):
        if real.any():
            alone = measure(x[b : b + 1, real], None)
            equals(alone, padded.sign[b : b + 1, real], padded.log_abs_det[b : b + 1, real])
    if padded.log_abs_det.requires_grad:
        (gradient,) = torch.autograd.grad(padded.log_abs_det.sum(), noisy)
        assert torch.isfinite(gradient).all()
        assert not gradient[padding].any(), "a margin moves with what stands in the padding"


def gradients_equal(found: Tensor, expected: Tensor, inputs: Sequence[Tensor], names: Sequence[str]) -> None:
    """The derivatives of two scalars by the same inputs, to 1e-8 of the size of the largest entry."""

    def gradients(value: Tensor) -> tuple[Tensor, ...]:
        # What no position depends on, such as w_q where nothing has two keys, has the derivative zero.
        if not value.requires_grad:
            return tuple(torch.zeros_like(tensor) for tensor in inputs)
        return torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True)

    for name, by_code, by_oracle in zip(names, gradients(found), gradients(expected), strict=True):
        size = max(1.0, float(by_oracle.abs().max()))
        assert_close(by_code / size, by_oracle / size, rtol=0, atol=1e-8, msg=lambda m, name=name: f"by {name}: {m}")


def gradients_stay_finite(value: Tensor, inputs: Sequence[Tensor]) -> None:
    assert torch.isfinite(value).all()
    for gradient in torch.autograd.grad(value.sum(), inputs):
        assert torch.isfinite(gradient).all()


def sixteen_bit_input_is_computed_in_float32(measure: Measure, x: Tensor, dtype: torch.dtype) -> None:
    """`measure` casts its weights to the dtype of `x`; rounded inputs in float32 say what the result must be."""
    rounded = x.to(dtype)
    expected = measure(rounded.float(), None)
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            found = measure(rounded, None)
        assert found.log_abs_det.dtype == torch.float32
        equals(found, expected.sign, expected.log_abs_det, atol=1e-6)
    with torch.autocast("cpu", dtype=dtype):
        equals(measure(rounded.float(), None), expected.sign, expected.log_abs_det, atol=1e-6)
