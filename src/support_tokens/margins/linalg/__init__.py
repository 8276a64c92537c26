"""Determinants, inverses and factorisations of many matrices, safe at the boundary and right on several threads."""

__all__ = [
    "SigmaMin",
    "Slogdet",
    "each_matrix",
    "full_precision",
    "is_near_singular",
    "safe_slogdet",
    "sigma_min",
    "sigma_min_with_bound",
    "slogdet_and_inverse",
]

from support_tokens.margins.linalg.elimination import slogdet_and_inverse
from support_tokens.margins.linalg.lapack import each_matrix
from support_tokens.margins.linalg.sigma import SigmaMin, sigma_min, sigma_min_with_bound
from support_tokens.margins.linalg.slogdet import Slogdet, full_precision, is_near_singular, safe_slogdet
