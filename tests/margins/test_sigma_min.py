"""The smallest singular value against LAPACK in float64, its bound, and the fallback to all singular values."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from support_tokens.margins import state_from_weights, state_margins
from support_tokens.margins.linalg import sigma, sigma_min, sigma_min_with_bound

SIDE = 80


def with_values(values: Tensor, seed: int = 0) -> Tensor:
    """A matrix with these singular values, in float64."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
        for _ in range(2)
    )
    return left @ torch.diag(values) @ right


def values(*smallest: float) -> Tensor:
    rest = torch.linspace(0.5, 3, SIDE - len(smallest), dtype=torch.float64)
    return torch.cat((rest, torch.tensor(smallest, dtype=torch.float64)))


def random(scale: float) -> Tensor:
    noise = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return torch.eye(SIDE, dtype=torch.float64) + scale * noise / SIDE**0.5


MATRICES = {
    "random": random(0.3),
    "far from the identity": random(3.0),
    "separated": with_values(values(0.01)),
    "cluster": with_values(values(0.1, 0.1 + 1e-9, 0.1 + 1e-7, 0.1001)),
    "cluster far below": with_values(values(1e-6, 1e-6, 1.01e-6)),
    "ill-conditioned": with_values(torch.logspace(-10, 2, SIDE, dtype=torch.float64)),
    "one value far below": with_values(values(1e-13)),
    "multiple of the identity": 0.7 * torch.eye(SIDE, dtype=torch.float64),
    "orthogonal": with_values(torch.ones(SIDE, dtype=torch.float64)),
    "diagonal": torch.diag(torch.arange(1.0, SIDE + 1).double()),
    "singular": torch.diag(torch.arange(SIDE).double()),
    "singular to rounding": with_values(values(0.0)),
    "zero": torch.zeros(SIDE, SIDE, dtype=torch.float64),
    "triangular": torch.eye(SIDE).double() + torch.ones(SIDE, SIDE).double().triu(1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MATRICES)
def test_the_bound_holds(name: str, dtype: torch.dtype) -> None:
    matrix = MATRICES[name].to(dtype)
    true = torch.linalg.svdvals(matrix.double())
    value, bound = sigma_min_with_bound(matrix)
    assert value.dtype == dtype
    assert abs(float(value) - float(true[-1])) <= float(bound)
    # A guarantee that is worth having: the tolerance of the iteration, or rounding.
    rounding = torch.finfo(dtype).eps * float(matrix.norm())
    assert float(bound) <= 4e-4 * float(true[-1]) + 20 * rounding


def test_all_of_a_batch_are_right_on_several_threads() -> None:
    matrices = torch.stack(list(MATRICES.values())).reshape(2, -1, SIDE, SIDE)
    matrices = torch.nn.functional.pad(matrices, (0, 100, 0, 100))
    matrices[..., range(SIDE, SIDE + 100), range(SIDE, SIDE + 100)] = 5.0
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        value, bound = sigma_min_with_bound(matrices)
    finally:
        torch.set_num_threads(threads)
    assert value.shape == bound.shape == (2, len(MATRICES) // 2)
    true = torch.stack([torch.linalg.svdvals(m)[-1] for m in matrices.flatten(0, 1)]).reshape(2, -1)
    assert bool(((value - true).abs() <= bound).all())


def test_without_convergence_all_singular_values_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.stack([random(0.3), random(1.0)])
    true = torch.linalg.svdvals(matrix)[:, -1]
    monkeypatch.setattr(sigma, "_MOST_STEPS", 1)
    assert_close(sigma_min(matrix), true, rtol=1e-12, atol=0)


def test_lanczos_alone_finds_a_separated_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(matrix: Tensor) -> None:
        raise AssertionError("all singular values were computed")

    monkeypatch.setattr(sigma, "_by_all_values", refuse)
    matrix = torch.stack([with_values(values(0.01), seed) for seed in range(3)])
    assert_close(sigma_min(matrix), torch.full((3,), 0.01, dtype=torch.float64), rtol=1e-9, atol=0)


def test_a_gradient_goes_through_all_singular_values() -> None:
    matrix = MATRICES["separated"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(sigma_min(matrix), matrix)
    left, _, right = torch.linalg.svd(matrix.detach())
    assert_close(gradient, torch.outer(left[:, -1], right[-1]), rtol=0, atol=1e-8)


def test_margins_keep_the_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w_q, w_k, w_v = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((1, 6, 48), (4, 12, 48), (4, 12, 48), (4, 12, 48))
    )
    state = state_from_weights(x, w_q / 7, w_k / 7, w_v / 7, w_v.mT / 7, strict=False)
    margins = state_margins(state, view="block")
    x = x[0]

    def block(last: Tensor, t: int) -> Tensor:
        past = torch.cat((x[:t], last[None]))
        logits = torch.einsum("hrd,d,hre,se->hs", w_q / 7, last, w_k / 7, past) / 12**0.5
        return last + torch.einsum("hs,hvd,sd,hve->e", logits.softmax(-1), w_v / 7, past, w_v / 7)

    for t in range(6):
        jacobian = torch.autograd.functional.jacobian(lambda last, t=t: block(last, t), x[t])
        true = torch.linalg.svdvals(jacobian)[-1]
        assert abs(margins.sigma_min[0, t] - true) <= margins.sigma_min_bound[0, t] < 1e-3 * true
