"""Functions of LU factorisations on several threads: torch's own batches come out wrong there, ours must not."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from support_tokens.margins.linalg import each_matrix, safe_slogdet, slogdet_and_inverse
from test_layers import PACKAGE, SOURCES, name_of

FUNCTIONS = ("lu_factor_ex", "inv", "slogdet", "solve", "solve_ex")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def matrices(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def flat(found) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


@pytest.mark.parametrize("side", [1, 64, 65, 160, 320])
@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_batch_is_its_matrices(name: str, batch: tuple[int, ...], side: int) -> None:
    function = getattr(torch.linalg, name)
    batches = [matrices(*batch, side, side)]
    if "solve" in name:
        batches.append(matrices(*batch, side, 2, seed=1))
    found = flat(each_matrix(function, *batches))
    singles = [b.reshape(-1, *b.shape[-2:]) for b in batches]
    expected = [flat(function(*one)) for one in zip(*singles, strict=True)]
    for got, want in zip(found, zip(*expected, strict=True), strict=True):
        assert got.shape[: len(batch)] == batch
        assert_close(got.reshape(-1, *got.shape[len(batch) :]), torch.stack(want), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", [32, 160, 320])
def test_determinants_inverses_and_gradients_do_not_depend_on_threads(side: int, dtype: torch.dtype) -> None:
    # Half of them are near the identity, and half are as those that elimination by blocks gives up.
    matrix = matrices(6, side, side, dtype=dtype)
    matrix[::2] = torch.eye(side, dtype=dtype) + matrix[::2] / (2 * side)
    exact = matrix.double()
    sign, log_abs_det = (torch.stack(part) for part in zip(*map(torch.linalg.slogdet, exact), strict=True))
    inverse = torch.stack([torch.linalg.inv(m) for m in exact])
    leaf = matrix.clone().requires_grad_()
    found = safe_slogdet(leaf)
    (grad,) = torch.autograd.grad(found.log_abs_det.sum(), leaf, create_graph=True)
    once = slogdet_and_inverse(matrix)
    bound = 2e-3 if dtype == torch.float32 else 1e-9
    for got in (found, once[:2]):
        assert torch.equal(got[0].double(), sign)
        assert_close(got[1].double(), log_abs_det, rtol=0, atol=bound)
    scale = inverse.abs().amax((-1, -2), keepdim=True)
    for got in (grad.mT, once[2]):
        assert ((got.double() - inverse).abs() / scale).max() < bound


def calls(source: str) -> Iterator[str]:
    """Dotted names of what a source calls."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


# Peers are timed as a user writes them; their matrices have a side of 128.
@pytest.mark.parametrize("path", [p for p in SOURCES if p != PACKAGE / "benchmark" / "peers.py"], ids=name_of)
def test_no_batch_is_factorised_at_once(path: Path) -> None:
    names = {"lu_factor", "lu_factor_ex", "lu", "inv", "inv_ex", "det", "slogdet", "solve", "solve_ex", "tensorsolve"}
    forbidden = {f"torch.linalg.{name}" for name in names} | {"torch.inverse", "torch.slogdet", "torch.logdet"}
    assert sorted(forbidden.intersection(calls(path.read_text(encoding="utf-8")))) == []
