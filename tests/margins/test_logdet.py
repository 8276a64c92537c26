"""Sign, log-determinant and smallest singular value of batches of matrices, where the textbook calls break down."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from strategies import law
from support_tokens.margins.linalg import is_near_singular, safe_slogdet, sigma_min

PRECISIONS = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
RANK_TWO = [[1.0, 2.0, 3.0], [2.0, 5.0, 6.0], [3.0, 6.0, 9.0]]  # third row is three times the first


def regular(*shape: int, seed: int = 0) -> Tensor:
    """Matrices with singular values of order one: identity plus a perturbation of norm below one, some reflected."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(*shape, generator=generator, dtype=torch.float64)
    matrix = torch.eye(shape[-1], dtype=torch.float64) + 0.3 * noise / shape[-1] ** 0.5
    matrix[::2, ..., 0] *= -1
    return matrix


@law
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 1000))
def test_equals_the_determinant_by_eigenvalues(batch, n, seed):
    matrix = regular(batch, n, n, seed=seed)
    sign, log_abs_det = safe_slogdet(matrix)
    determinant = torch.linalg.eigvals(matrix).prod(-1).real
    assert_close(sign, determinant.sign(), rtol=0, atol=0)
    assert_close(log_abs_det, determinant.abs().log(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [(3, 3), (4, 3, 3), (2, 5, 3, 3), (0, 3, 3)])
def test_keeps_the_leading_dimensions(shape):
    sign, log_abs_det = safe_slogdet(torch.eye(3).expand(shape).clone())
    assert sign.shape == log_abs_det.shape == shape[:-2]
    assert sigma_min(torch.eye(3).expand(shape).clone()).shape == shape[:-2]


@law
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 1000))
def test_gradient_is_the_inverse_transposed(batch, n, seed):
    matrix = regular(batch, n, n, seed=seed).requires_grad_()
    (gradient,) = torch.autograd.grad(safe_slogdet(matrix).log_abs_det.sum(), matrix)
    assert_close(gradient, torch.linalg.inv(matrix.detach()).mT, rtol=0, atol=1e-10)


def test_gradient_passes_gradcheck():
    matrix = regular(3, 3, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda m: safe_slogdet(m).log_abs_det, matrix)


@PRECISIONS
@pytest.mark.parametrize("singular", [torch.zeros(3, 3), torch.diag(torch.tensor([1.0, 0.0, 2.0])), torch.ones(3, 3)])
def test_exactly_singular_matrix_is_finite_and_silent(singular, dtype):
    good = regular(2, 3, 3).to(dtype)
    matrix = torch.stack([good[0], singular.to(dtype), good[1]]).requires_grad_()
    log_abs_det = safe_slogdet(matrix).log_abs_det
    assert torch.isfinite(log_abs_det).all()
    assert log_abs_det[1] < log_abs_det[[0, 2]].min()
    (gradient,) = torch.autograd.grad(-log_abs_det.sum(), matrix)
    assert not gradient[1].any()
    assert_close(gradient[[0, 2]], -torch.linalg.inv(good).mT)


@PRECISIONS
def test_determinant_below_the_smallest_number_keeps_its_logarithm(dtype):
    matrix = torch.diag(torch.logspace(-4, -3, 100, dtype=torch.float64)).to(dtype).requires_grad_()
    assert torch.linalg.det(matrix) == 0
    sign, log_abs_det = safe_slogdet(matrix)
    assert sign == 1
    assert_close(log_abs_det.item(), -350 * math.log(10), rtol=0, atol=1e-3 if dtype == torch.float32 else 1e-10)
    assert round(log_abs_det.item(), 3) == -805.905
    (gradient,) = torch.autograd.grad(log_abs_det, matrix)
    assert_close(gradient.diagonal(), 1 / matrix.detach().diagonal())
    assert not is_near_singular(matrix.detach())


def test_denormal_matrix_does_not_depend_on_the_batch():
    denormal = torch.tensor([[1e-40, 1e-40], [0.0, 0.0]])
    results = []
    for batch in (1, 8, 9, 64):
        matrix = denormal.expand(batch, 2, 2).clone().requires_grad_()
        sign, log_abs_det = safe_slogdet(matrix)
        (gradient,) = torch.autograd.grad(log_abs_det.sum(), matrix)
        assert torch.isfinite(log_abs_det).all()
        assert torch.isfinite(gradient).all()
        rows = torch.cat([sign[:, None], log_abs_det[:, None], gradient.flatten(1)], 1)
        results.append({tuple(row) for row in rows.tolist()})
    assert all(len(rows) == 1 for rows in results), "rows of one batch differ"
    assert len(set.union(*results)) == 1, "the size of the batch shows"


@PRECISIONS
def test_denormal_pivot_has_a_finite_gradient(dtype):
    """1 / pivot is not a number of the dtype below 1 / max: such a pivot counts as zero."""
    denormal = torch.finfo(dtype).tiny / 100
    matrix = torch.diag(torch.tensor([1.0, denormal], dtype=dtype)).requires_grad_()
    assert matrix[1, 1] > 0
    sign, log_abs_det = safe_slogdet(matrix)
    (gradient,) = torch.autograd.grad(log_abs_det, matrix)
    assert sign == 0
    assert torch.isfinite(log_abs_det)
    assert torch.isfinite(gradient).all()


def test_near_singular_is_relative_to_the_size_of_the_matrix():
    assert is_near_singular(torch.tensor(RANK_TWO, dtype=torch.float32))
    assert is_near_singular(torch.tensor(RANK_TWO, dtype=torch.float64))
    assert is_near_singular(torch.zeros(3, 3))
    for size in (1e-12, 1.0, 1e12):
        assert not is_near_singular(size * torch.eye(3))
    flags = is_near_singular(torch.stack([torch.eye(3), torch.tensor(RANK_TWO), -torch.eye(3)]))
    assert flags.tolist() == [False, True, False]
    nearly = torch.diag(torch.tensor([1.0, 1e-3]))
    assert not is_near_singular(nearly)
    assert is_near_singular(nearly, tolerance=1e-2)


@law
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 1000))
def test_sigma_min_is_the_distance_to_the_nearest_singular_matrix(batch, n, seed):
    matrix = regular(batch, n, n, seed=seed)
    found = sigma_min(matrix)
    assert_close(found, torch.linalg.eigvalsh(matrix.mT @ matrix)[..., 0].sqrt(), rtol=0, atol=1e-7)
    left, _, right = torch.linalg.svd(matrix)
    nearest = matrix - found[:, None, None] * left[..., :, -1:] @ right[..., -1:, :]
    assert (torch.linalg.svdvals(nearest)[..., -1] < 1e-12).all()
