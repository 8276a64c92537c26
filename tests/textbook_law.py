"""Textbook formulas of the regularizers that belong to the law: barriers and spreads, one position and key at a time.

Nothing here imports `support_tokens`. Embeddings are `x` (B, T, D); the mask `valid` (B, T) is True at real positions
(None: everywhere). Every figure per token is (B, T), in nats, zero at padding; `mean_over` averages it.
The law is that of Agarwal et al., "Support Tokens, Stability Margins, and a New Foundation for Robust LLMs"
(arXiv:2602.22271): strict causal mask, identity values. Position t attends to the valid positions before it. Under its
weights alpha_ts they have mean mu_t and covariance Sigma_t = sum_s alpha_ts (x_s - mu_t)(x_s - mu_t)^T.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "block_matrices",
    "block_spread",
    "hinge_barrier",
    "law_log_det",
    "law_mean",
    "log_barrier",
    "low_rank_moments",
    "map_penalty",
    "mean_over",
    "natural_zero",
    "normalized",
    "old_spread",
    "participation_ratio",
    "past_moments",
    "scale_free_barrier",
    "spread",
]


def keys_of(t: int, valid: Tensor) -> list[int]:
    """The valid positions before t, given the mask (T,) of one sequence."""
    return [s for s in range(t) if bool(valid[s])]


def covered(x: Tensor, valid: Tensor | None) -> Tensor:
    return torch.ones(x.shape[:2], dtype=torch.bool) if valid is None else valid.bool()


def softmax(scores: list[Tensor]) -> Tensor:
    """Exponentials over their sum, (n,), shifted by the largest score so that none overflows."""
    stacked = torch.stack(scores)
    exponentials = torch.exp(stacked - stacked.detach().max())
    return exponentials / exponentials.sum()


def moments(weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (D,) and covariance (D, D) of `keys` (n, D) under `weights` (n,)."""
    mean = torch.zeros_like(keys[0])
    for weight, key in zip(weights, keys, strict=True):
        mean = mean + weight * key
    covariance = torch.zeros(len(mean), len(mean), dtype=keys.dtype)
    for weight, key in zip(weights, keys, strict=True):
        covariance = covariance + weight * torch.outer(key - mean, key - mean)
    return mean, covariance


def per_token(x: Tensor, valid: Tensor | None, figure: Callable[[int, int, list[int]], Tensor]) -> Tensor:
    """`figure(b, t, keys)` at every valid position and zero elsewhere, (B, T)."""
    mask = covered(x, valid)
    zero = torch.zeros((), dtype=x.dtype)
    rows = []
    for b in range(x.shape[0]):
        rows.append(torch.stack([figure(b, t, keys_of(t, mask[b])) if mask[b, t] else zero for t in range(x.shape[1])]))
    return torch.stack(rows)


def mean_over(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean of `values` (B, T) over the positions where `mask` is True (None: over all), a scalar."""
    if mask is None:
        return values.mean()
    return torch.where(mask.bool(), values, torch.zeros_like(values)).sum() / mask.bool().sum()


# The law's barrier ----------------------------------------------------------------------------------------------------


def law_weights(x: Tensor, t: int, keys: list[int], w_q: Tensor, w_k: Tensor) -> Tensor:
    """alpha_ts over the keys of t, proportional to exp((W_Q x_t)^T (W_K x_s) / sqrt(R)); `x` is (T, D)."""
    return softmax([torch.dot(w_q @ x[t], w_k @ x[s]) / math.sqrt(len(w_q)) for s in keys])


def law_mean(x: Tensor, w_q: Tensor, w_k: Tensor, valid: Tensor | None = None) -> Tensor:
    """mu_t = sum_{s<t} alpha_ts x_s, (B, T, D), with `w_q`, `w_k` (R, D); zero where t has no key."""
    mask = covered(x, valid)
    sequences = []
    for b in range(x.shape[0]):
        means = []
        for t in range(x.shape[1]):
            keys = keys_of(t, mask[b])
            attends = bool(mask[b, t]) and bool(keys)
            weights = law_weights(x[b], t, keys, w_q, w_k) if attends else None
            means.append(torch.zeros_like(x[b, t]) if weights is None else moments(weights, x[b, keys])[0])
        sequences.append(torch.stack(means))
    return torch.stack(sequences)


def law_log_det(x: Tensor, w_q: Tensor, w_k: Tensor, valid: Tensor | None = None) -> Tensor:
    """log|det J_t| with J_t = I - Sigma_t A and A = W_K^T W_Q / sqrt(R), (B, T); `w_q`, `w_k` are (R, D).

    A position without a key has J_t = I, so its logarithm is zero.
    """
    coupling = w_k.T @ w_q / math.sqrt(len(w_q))

    def figure(b: int, t: int, keys: list[int]) -> Tensor:
        if not keys:
            return torch.zeros((), dtype=x.dtype)
        _, covariance = moments(law_weights(x[b], t, keys, w_q, w_k), x[b, keys])
        return torch.linalg.slogdet(torch.eye(x.shape[-1], dtype=x.dtype) - covariance @ coupling).logabsdet

    return per_token(x, valid, figure)


def log_barrier(log_det: Tensor) -> Tensor:
    """-log|det J_t| per token, (B, T): the margin-only penalty of arXiv:2602.22271."""
    return -log_det


def hinge_barrier(log_det: Tensor, target: float) -> Tensor:
    """max(0, m* - log|det J_t|) per token, (B, T), with the target margin m* in nats."""
    return torch.clamp(target - log_det, min=0.0)


def map_penalty(x: Tensor, mean: Tensor, log_det: Tensor, sigma: float) -> Tensor:
    """|x_t - mu_t|^2 / (2 sigma^2) - log|det J_t| per token, (B, T): minus the law's log density up to a constant."""
    return ((x - mean) ** 2).sum(-1) / (2 * sigma**2) - log_det


# Barrier and spread of embeddings of unit RMS -------------------------------------------------------------------------


def normalized(x: Tensor) -> Tensor:
    """x_t / rms(x_t), (B, T, D): every position has mean square one, |x_t|^2 = D."""
    return x / torch.sqrt((x**2).mean(-1, keepdim=True))


def past_moments(x: Tensor, t: int, keys: list[int], coupling: float) -> tuple[Tensor, Tensor]:
    """Weights (n,) proportional to exp(-c x_t^T x_s) and covariance (D, D) of the keys; `x` (T, D) has unit RMS.

    This is the law's own attention under the repulsive coupling A = -c I; c = 0 gives uniform weights.
    """
    weights = softmax([-coupling * torch.dot(x[t], x[s]) for s in keys])
    return weights, moments(weights, x[keys])[1]


def scale_free_barrier(x: Tensor, coupling: float, valid: Tensor | None = None) -> Tensor:
    """-log det(I + c Sigma_t) per token, (B, T), on the normalized embeddings: arXiv:2602.22271's barrier at A = -c I.

    Invariant under x_t -> r_t x_t with r_t > 0. Zero where t has no key, never positive for c >= 0.
    """
    unit = normalized(x)

    def figure(b: int, t: int, keys: list[int]) -> Tensor:
        if not keys:
            return torch.zeros((), dtype=x.dtype)
        _, covariance = past_moments(unit[b], t, keys, coupling)
        return -torch.linalg.slogdet(torch.eye(x.shape[-1], dtype=x.dtype) + coupling * covariance).logabsdet

    return per_token(x, valid, figure)


def participation_ratio(covariance: Tensor) -> Tensor:
    """(tr S)^2 / |S|_F^2 of a positive semidefinite matrix: D for a multiple of I, one for rank one."""
    return torch.trace(covariance) ** 2 / (covariance**2).sum()


def natural_zero(weights: Tensor, width: int, zero: str = "keys") -> Tensor:
    """The participation ratio that an isotropic cloud of D = `width` dimensions has under `weights` (n,), a scalar.

    - "keys": D n_t / (D + n_t), with n_t = 1 / sum_s alpha_s^2, the effective number of keys.
    - "centred": D (n_t - 1) / (D + n_t - 2), which accounts for the mean and for |x_s|^2 = D: uniform weights only.
    - "centring": D nu / (D + nu - 1), with nu = (tr C)^2 / |C|_F^2 the participation ratio of the centring matrix
      C = diag(alpha) - alpha alpha^T, that is of Sigma_t = X^T C X when the keys are orthonormal. Uniform weights have
      nu = n - 1, which is "centred". Two keys have nu = 1 whatever their weights, as Sigma_t has rank one.
    """
    if zero == "centring":
        nu = participation_ratio(torch.diag(weights) - torch.outer(weights, weights))
        return width * nu / (width + nu - 1)
    count = 1 / (weights**2).sum()
    if zero == "centred":
        return width * (count - 1) / (width + count - 2)
    return width * count / (width + count)


def spread(x: Tensor, coupling: float, valid: Tensor | None = None, zero: str = "keys") -> Tensor:
    """log(natural_zero / PR_t) per token, (B, T), with PR_t = (tr Sigma_t)^2 / |Sigma_t|_F^2 of the normalized past.

    Zero for an isotropic cloud, positive where few directions hold the variance. Zero by definition where t has fewer
    than two keys or where tr Sigma_t vanishes (all keys equal). Under uniform weights (c = 0) "keys" is at least
    log((D + 1) / (2 D + 1)) > -log 2 and "centring" at least log(D / (2 D - 1)) > -log 2, met by the D + 1 vertices of
    a regular simplex. Under other weights "keys" is above -log(D + 1), approached as c grows, and "centring" above
    -log D.
    """
    unit = normalized(x)
    width = x.shape[-1]

    def figure(b: int, t: int, keys: list[int]) -> Tensor:
        if len(keys) < 2:
            return torch.zeros((), dtype=x.dtype)
        weights, covariance = past_moments(unit[b], t, keys, coupling)
        if torch.trace(covariance) <= 1e-12 * width:
            return torch.zeros((), dtype=x.dtype)
        return torch.log(natural_zero(weights, width, zero) / participation_ratio(covariance))

    return per_token(x, valid, figure)


def old_spread(x: Tensor, coupling: float, valid: Tensor | None = None) -> Tensor:
    """(D / 2) log(1 + (c / (1 + c))^2 (D / PR_t - 1)) per token, (B, T), for comparison: it grows with D, has a floor.

    Zero by definition where `spread` is.
    """
    unit = normalized(x)
    width = x.shape[-1]

    def figure(b: int, t: int, keys: list[int]) -> Tensor:
        if len(keys) < 2:
            return torch.zeros((), dtype=x.dtype)
        _, covariance = past_moments(unit[b], t, keys, coupling)
        if torch.trace(covariance) <= 1e-12 * width:
            return torch.zeros((), dtype=x.dtype)
        excess = width / participation_ratio(covariance) - 1
        return width / 2 * torch.log(1 + (coupling / (1 + coupling)) ** 2 * excess)

    return per_token(x, valid, figure)


# Spread of an attention block -----------------------------------------------------------------------------------------


def block_matrices(left: Tensor, right: Tensor) -> Tensor:
    """M = sum_a L_a R_a, (D, D), from `left` (A, D, r) and `right` (A, r, D), formed in full."""
    total = torch.zeros(left.shape[1], right.shape[2], dtype=left.dtype)
    for outer, inner in zip(left, right, strict=True):
        total = total + outer @ inner
    return total


def block_spread(matrices: Tensor, form: str = "trace") -> Tensor:
    """How unevenly J_t = I + M_t stretches, per token, (B, T), from M (B, T, D, D): never negative, free of J's scale.

    - "trace": log(D |J|_F^2 / (tr J)^2), zero if and only if J is a multiple of I (Cauchy-Schwarz on J and I).
    - "symmetric": the same of (J + J^T) / 2, through |sym J|_F^2 = (|J|_F^2 + tr J^2) / 2: blind to small rotations.
    - "determinant": log(|J|_F^2 / D) - (2 / D) log|det J|, which is 2 / D times the log-barrier of J scaled to
      |J|_F^2 = D. Zero if and only if all singular values are equal (arithmetic against geometric mean of their
      squares), so blind to every rotation.
    """
    jacobian = torch.eye(matrices.shape[-1], dtype=matrices.dtype) + matrices

    def figure(j: Tensor) -> Tensor:
        width = len(j)
        square = (j**2).sum()
        if form == "determinant":
            return torch.log(square / width) - 2 / width * torch.linalg.slogdet(j).logabsdet
        if form == "symmetric":
            square = (square + torch.trace(j @ j)) / 2
        return torch.log(width * square / torch.trace(j) ** 2)

    return torch.stack([torch.stack([figure(j) for j in row]) for row in jacobian])


def low_rank_moments(
    left: Tensor, right: Tensor, shared: Tensor | None = None, coefficients: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Traces tr M, |M|_F^2 and tr M^2 of M = sum_a L_a R_a + sum_b c_b S_b, without forming M.

    Shapes: `left` (A, D, r), `right` (A, r, D), `shared` (N, D, D), `coefficients` (N,). The identities

        tr(L R)              = tr(R L)
        <L_a R_a, L_b R_b>   = <L_a^T L_b, R_a R_b^T>            <S, L R> = <L^T S, R>
        tr(L_a R_a L_b R_b)  = tr((R_a L_b)(R_b L_a))            tr(S L R) = tr(R S L)

    need inner products of r columns only; <S_a, S_b>, tr S_a and tr(S_a S_b) are computed once for all positions.
    J = I + M has tr J = D + tr M, |J|_F^2 = D + 2 tr M + |M|_F^2 and tr J^2 = D + 2 tr M + tr M^2.
    """
    zero = torch.zeros((), dtype=left.dtype)
    trace, square, power = zero, zero, zero
    for l_a, r_a in zip(left, right, strict=True):
        trace = trace + (r_a @ l_a).trace()
        for l_b, r_b in zip(left, right, strict=True):
            square = square + ((l_a.T @ l_b) * (r_a @ r_b.T)).sum()
            power = power + ((r_a @ l_b) * (r_b @ l_a).T).sum()
    if shared is None or coefficients is None:
        return trace, square, power
    for c_a, s_a in zip(coefficients, shared, strict=True):
        trace = trace + c_a * s_a.trace()
        for c_b, s_b in zip(coefficients, shared, strict=True):
            square = square + c_a * c_b * (s_a * s_b).sum()
            power = power + c_a * c_b * (s_a * s_b.T).sum()
        for l_b, r_b in zip(left, right, strict=True):
            square = square + 2 * c_a * ((l_b.T @ s_a) * r_b).sum()
            power = power + 2 * c_a * ((r_b @ s_a) * l_b.T).sum()
    return trace, square, power
