r"""Thresholds of a signal, calibrated on held-out sequences so that the risk stays below a bound.

For scores u, errors e in [0, 1], and a sequence of n predictions of which those with $u_t \le \tau$ are answered, there
are two risks and two guarantees:

- error share $L(\tau) = \tfrac1n \sum_t e_t [u_t \le \tau]$, the fraction of **all** predictions that are answered
  and wrong. It grows with $\tau$ for any signal; conformal risk control bounds its expectation.
- selective risk $r(\tau) = E[L(\tau)] / E[C(\tau)]$ with coverage $C = \tfrac1n \sum_t [u_t \le \tau]$: the errors
  among the **answered**. It need not grow with $\tau$; learn-then-test bounds it with a confidence.

Sequences must be exchangeable or independent. Tokens within a sequence may depend on each other in any way.
"""

__all__ = ["betting_p_value", "conformal_risk_control", "learn_then_test"]

import math

import numpy as np
from numpy.typing import ArrayLike

from support_tokens.errors import ArgumentError
from support_tokens.generation.selective.levels import Floats
from support_tokens.generation.selective.outcome import Threshold, scored_sequences

CANDIDATES = 256
"""Maximum number of thresholds tested by `learn_then_test`."""


def conformal_risk_control(
    score: ArrayLike,
    error: ArrayLike,
    *,
    risk: float,
    valid: ArrayLike | None = None,
    signal: str = "score",
    prefix: bool = True,
) -> Threshold:
    r"""The largest threshold whose expected error share is at most `risk`, by conformal risk control.

    $$ \hat\tau = \max \Big( \tau : \frac{1 + \sum_{i=1}^n L_i(\tau)}{n + 1} \le \mathrm{risk} \Big)
       \quad\Rightarrow\quad E[L_{n+1}(\hat\tau)] \le \mathrm{risk}, $$

    over the draw of the n calibration sequences **and** of the next one. It holds for any signal and any model if the
    n + 1 sequences are exchangeable. It does not hold given one calibration set, nor for text of another source. The
    error share is a fraction of all predictions, so it is also small where little is answered.

    Args:
        score: Uncertainty of each prediction, `(N, T)`, or `(N,)` for one prediction per sequence.
        error: Error of each between 0 and 1, same shape.
        risk: Bound on the expected fraction of predictions that are answered and wrong, between 0 and 1.
        valid: False at padding, same shape.
        signal: Name of the signal, for `generate`.
        prefix: Whether a sequence ends at its first score above the threshold, as generation does; False: each
            prediction is decided by itself.

    Returns:
        The threshold; it abstains from everything if no threshold meets `risk`, always for `risk < 1 / (N + 1)`.

    Raises:
        ArgumentError: Shapes or numbers are out of range.

    References:
        Angelopoulos, Bates, Fisch, Lei and Schuster, "Conformal Risk Control", ICLR 2024 (arXiv:2208.02814), theorem 1.

    Example:
        >>> threshold = conformal_risk_control([[0.1, 0.6]] * 9, [[0, 1]] * 9, risk=0.2, signal="entropy")
        >>> threshold.stop_above
        {'entropy': 0.1}
        >>> conformal_risk_control([[0.1, 0.6]] * 3, [[0, 1]] * 3, risk=0.2).abstains
        True
    """
    _check_fraction(risk, "risk")
    data = scored_sequences(score, error, valid, prefix=prefix)
    count = len(data.score)
    # Cumulative losses in ascending order of the scores; among equal scores the last one has the right sum.
    order = np.argsort(data.score, axis=None, kind="stable")
    scores, losses = data.score.ravel()[order], (data.share * data.error).ravel()[order].cumsum()
    last = np.append(scores[1:] > scores[:-1], True) & np.isfinite(scores)
    # The tolerance keeps a sum that equals the bound from missing it by rounding.
    kept = last & ((losses + 1) <= risk * (count + 1) * (1 + 1e-12))
    value = float(scores[kept].max()) if kept.any() else None
    return Threshold(signal, value, prefix, "error share", risk, None, count, data.outcome(value))


def learn_then_test(
    score: ArrayLike,
    error: ArrayLike,
    *,
    risk: float,
    confidence: float = 0.95,
    valid: ArrayLike | None = None,
    signal: str = "score",
    prefix: bool = True,
    pilot: float = 0.25,
) -> Threshold:
    r"""A large threshold whose selective risk is at most `risk` with a given confidence, by learn-then-test.

    $$ P\big( r(\hat\tau) \le \mathrm{risk} \big) \ge \mathrm{confidence} $$

    over the draw of the calibration sequences, for any signal and any model, if the sequences are independent draws
    from one source, whose risk is $r$. A first part of the sequences (`pilot`) chooses the threshold with the strongest
    evidence, from which testing goes upwards; the others test $H_\tau: E[L(\tau)] \ge \mathrm{risk} \cdot E[C(\tau)]$
    in this fixed order until one is not rejected (`betting_p_value`), so that the number of thresholds costs no
    confidence. Shuffle the sequences first.

    Args:
        score: Uncertainty of each prediction, `(N, T)`, or `(N,)` for one prediction per sequence.
        error: Error of each between 0 and 1, same shape.
        risk: Bound on the error among the answered, between 0 and 1.
        confidence: Between 0 and 1.
        valid: False at padding, same shape.
        signal: Name of the signal, for `generate`.
        prefix: As in `conformal_risk_control`.
        pilot: Fraction of the sequences that choose where testing starts, between 0 and 1.

    Returns:
        The threshold; it abstains from everything if the first test is not rejected, as with few sequences.

    Raises:
        ArgumentError: Shapes or numbers are out of range, or there are fewer than two sequences.

    References:
        Angelopoulos, Bates, Candès, Jordan and Lei, "Learn then Test", 2021 (arXiv:2110.01052).

    Example:
        >>> draws = np.random.default_rng(0)
        >>> score = draws.random((400, 20))
        >>> error = draws.random((400, 20)) < score
        >>> threshold = learn_then_test(score, error, risk=0.3, prefix=False, signal="entropy")
        >>> 0.45 < threshold.value < 0.6
        True
        >>> threshold.kind, threshold.confidence, threshold.measured.coverage > 0.45
        ('selective risk', 0.95, True)
    """
    for name, value in (("risk", risk), ("confidence", confidence), ("pilot", pilot)):
        _check_fraction(value, name)
    data = scored_sequences(score, error, valid, prefix=prefix)
    count = len(data.score)
    if count < 2:
        raise ArgumentError(f"score must have at least 2 sequences, received {count}; calibrate on hundreds.")
    first = min(max(1, round(pilot * count)), count - 1)
    scout, test = data.part(slice(first)), data.part(slice(first, None))
    distinct = np.unique(scout.score[np.isfinite(scout.score)])
    thresholds = np.unique(np.quantile(distinct, np.linspace(0, 1, CANDIDATES), method="lower"))
    ahead = betting_p_value(_gap(scout.shares(thresholds), risk), risk, level=1 - confidence)
    path = thresholds[int(np.argmin(ahead)) :]
    rejected = betting_p_value(_gap(test.shares(path), risk), risk, level=1 - confidence) <= 1 - confidence
    passed = int(np.argmin(np.append(rejected, False)))  # number of rejections before the first that fails
    value = float(path[passed - 1]) if passed else None
    return Threshold(signal, value, prefix, "selective risk", risk, confidence, count, data.outcome(value))


def betting_p_value(x: Floats, mean: float, *, level: float = 0.05) -> Floats:
    r"""P-values of $H: E[X] \ge m$ for independent draws $X \in [0, 1]$, by betting.

    $$ p = \min_t K_t^{-1}, \qquad K_t = \prod_{i \le t} \big(1 + \nu_i (m - X_i)\big), $$

    a wealth that does not grow in expectation under H, so $P(p \le \delta) \le \delta$ by Ville's inequality. The bets
    $\nu_i \le 0.9 / (1 - m)$ depend on earlier draws only. For draws of small variance, such as means over the tokens
    of a sequence, it is far stronger than the bounds of Hoeffding and Bentkus, which use the mean alone.

    Args:
        x: Draws, `(n, ...)`, in the order of betting.
        mean: $m$, between 0 and 1.
        level: P-value for which the bets are sized; the result is valid for any.

    Returns:
        `(...)`, at most 1.

    References:
        Waudby-Smith and Ramdas 2024 (arXiv:2010.09686), section 4; as used by Bates et al. 2021 (arXiv:2101.02703).

    Example:
        >>> bool(betting_p_value(np.full(200, 0.05), 0.1) < 0.01), float(betting_p_value(np.full(200, 0.2), 0.1))
        (True, 1.0)
    """
    steps = np.arange(1, len(x) + 1).reshape(-1, *[1] * (x.ndim - 1))
    centre = (0.5 + x.cumsum(0)) / (steps + 1)
    spread = (0.25 + np.square(x - centre).cumsum(0)) / (steps + 1)
    before = np.concatenate((np.full_like(x[:1], 0.25), spread[:-1]))
    bets = np.minimum(np.sqrt(2 * math.log(1 / level) / (len(x) * before)), 0.9 / (1 - mean))
    wealth = np.log1p(bets * (mean - x)).cumsum(0).max(0)
    return np.exp(-np.maximum(wealth, 0.0))


def _gap(shares: tuple[Floats, Floats], risk: float) -> Floats:
    """`L - risk C + risk` of each sequence, in [0, 1]; its mean is below `risk` exactly if the selective risk is."""
    answered, wrong = shares
    return wrong - risk * answered + risk


def _check_fraction(value: float, name: str) -> None:
    if not 0 < value < 1:
        raise ArgumentError(f"{name} must be between 0 and 1, received {value!r}; pass 0.05 for 5 %.")
