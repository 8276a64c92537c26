"""Reference values that no closed form produced: determinants of an autograd Jacobian, kept as JSON.

`cases/geometry.json` is committed; a larger file of the same schema may lie beside the checkout and is tried as well.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from naive import oracle
from support_tokens import attention_margins, attention_slogdet

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / "tests" / "cases" / "geometry.json"
SHARED = ROOT.parent / "shared" / "cases" / "geometry.json"
CLOSE = {"rtol": 0, "atol": 1e-10}


def cases_of(path: Path) -> list:
    """The cases of one file as parameters; where it is missing, one skipped parameter that says so."""
    if not path.is_file():
        reason = f"no reference file at ../{path.relative_to(ROOT.parent)} beside the checkout"
        return [pytest.param(None, id="missing", marks=pytest.mark.skip(reason=reason))]
    return [pytest.param(case, id=case["name"]) for case in json.loads(path.read_text(encoding="utf-8"))]


def tensor(case: dict, key: str) -> Tensor | None:
    return None if case.get(key) is None else torch.tensor(case[key], dtype=torch.float64)


def call(function, case: dict, **more):
    """Calls a function of the contract on the one sequence of a case, as a batch of one."""
    x, *weights = (tensor(case, key) for key in ("x", "w_q", "w_k", "w_v", "w_o"))
    padding = None if case.get("padding") is None else torch.tensor([case["padding"]])
    options = {"strict": case["strict"], "scale": case["scale"], "view": case.get("view", "noise")}
    return function(x[None], *weights, key_padding_mask=padding, **options, **more)


CASES = pytest.mark.parametrize("case", cases_of(OWN) + cases_of(SHARED))


@CASES
def test_sign_and_log_determinant(case):
    sign, log_abs_det = call(attention_slogdet, case)
    assert_close(sign[0], tensor(case, "sign"), rtol=0, atol=0)
    assert_close(log_abs_det[0], tensor(case, "log_abs_det"), **CLOSE)


@CASES
def test_trajectory_log_determinant_is_the_sum_over_positions(case):
    log_abs_det = call(attention_slogdet, case).log_abs_det
    assert_close(log_abs_det.sum().item(), case["trajectory_log_abs_det"], **CLOSE)


@CASES
def test_margins(case):
    margins = call(attention_margins, case)
    valid = ~torch.tensor(case.get("padding") or [False] * len(case["x"]))
    assert_close(margins.valid[0], valid)
    assert_close(margins.sign[0], tensor(case, "sign"), rtol=0, atol=0)
    assert_close(margins.log_abs_det[0], tensor(case, "log_abs_det"), **CLOSE)
    assert_close(margins.sigma_min[0][valid], tensor(case, "sigma_min")[valid], **CLOSE)


@CASES
def test_file_is_what_the_oracle_finds(case):
    x, *weights = (tensor(case, key) for key in ("x", "w_q", "w_k", "w_v", "w_o"))
    padding = None if case.get("padding") is None else torch.tensor(case["padding"])
    options = {"strict": case["strict"], "scale": case["scale"], "view": case.get("view", "noise")}
    sign, log_abs_det, sigma_min = oracle(x, *weights, padding=padding, **options)
    assert_close(sign, tensor(case, "sign"), rtol=0, atol=0)
    assert_close(log_abs_det, tensor(case, "log_abs_det"), **CLOSE)
    assert_close(sigma_min, tensor(case, "sigma_min"), **CLOSE)
