r"""Thresholds of a signal, calibrated on held-out sequences so that a stated risk is kept.

Two risks, two guarantees; both for scores u, errors e in [0, 1], and a sequence of n predictions of which those with
$u_t \le \tau$ are answered:

- error share $L(\tau) = \tfrac1n \sum_t e_t [u_t \le \tau]$, the share of **all** predictions that are answered and
  wrong. It grows with $\tau$, whatever the signal: conformal risk control bounds its expectation.
- selective risk $r(\tau) = E[L(\tau)] / E[C(\tau)]$ with coverage $C = \tfrac1n \sum_t [u_t \le \tau]$: what is wrong
  among the **answered**. It need not grow with $\tau$: learn-then-test bounds it with a confidence.

What must be exchangeable, or independent, is sequences. The tokens of a sequence depend on each other in any way.
"""

__all__ = ["betting_p_value", "conformal_risk_control", "learn_then_test"]

import math

import numpy as np
from numpy.typing import ArrayLike

from support_tokens.errors import ArgumentError
from support_tokens.generation.selective.levels import Floats
from support_tokens.generation.selective.outcome import Threshold, scored_sequences

CANDIDATES = 256
"""Thresholds that are tried at most where each is a test of its own."""


def conformal_risk_control(
    score: ArrayLike,
    error: ArrayLike,
    *,
    risk: float,
    valid: ArrayLike | None = None,
    signal: str = "score",
    prefix: bool = True,
) -> Threshold:
    r"""The largest threshold whose error share is at most `risk` in expectation, by conformal risk control.

    $$ \hat\tau = \max \Big( \tau : \frac{1 + \sum_{i=1}^n L_i(\tau)}{n + 1} \le \mathrm{risk} \Big)
       \quad\Rightarrow\quad E[L_{n+1}(\hat\tau)] \le \mathrm{risk}, $$

    over the draw of the n calibration sequences **and** of the next one. It holds for any signal and any model, if the
    n + 1 sequences are exchangeable: drawn from one source in one way. It says nothing about one given calibration set,
    nor about text of another source. It is a share of all predictions, so it is small too where little is answered.

    Args:
        score: Uncertainty of each prediction, `(N, T)`, or `(N,)` for one decision a sequence.
        error: Error of each between 0 and 1, same shape.
        risk: Bound of the expected share of answered and wrong predictions, between 0 and 1.
        valid: False at padding, same shape.
        signal: Name of the signal, for `generate`.
        prefix: A sequence ends at its first score above the threshold (generation that stops); False: every prediction
            is answered or not by itself.

    Returns:
        The threshold; it abstains from everything where `risk` is not reached, always if `risk < 1 / (N + 1)`.

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
    _check_share(risk, "risk")
    data = scored_sequences(score, error, valid, prefix=prefix)
    count = len(data.score)
    # One pass over all scores, from the least: the sum of the losses after each is exact at the last of equal ones.
    order = np.argsort(data.score, axis=None, kind="stable")
    scores, losses = data.score.ravel()[order], (data.share * data.error).ravel()[order].cumsum()
    last = np.append(scores[1:] > scores[:-1], True) & np.isfinite(scores)
    # A sum that meets the bound exactly must not miss it by rounding.
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
    r"""A large threshold whose selective risk is at most `risk` with the confidence asked for, by learn-then-test.

    $$ P\big( r(\hat\tau) \le \mathrm{risk} \big) \ge \mathrm{confidence} $$

    over the draw of the calibration sequences, for any signal and any model, if the sequences are independent draws
    from one source; $r$ is that of this source. The first sequences, a share `pilot`, choose where testing starts, at
    the threshold with the strongest evidence there, and from where it goes up; the others test
    $H_\tau: E[L(\tau)] \ge \mathrm{risk} \cdot E[C(\tau)]$ in this fixed order until one is not rejected
    (`betting_p_value`), so that the number of thresholds costs no confidence. Put the sequences in random order first.

    Args:
        score: Uncertainty of each prediction, `(N, T)`, or `(N,)` for one decision a sequence.
        error: Error of each between 0 and 1, same shape.
        risk: Bound of the error among the answered, between 0 and 1.
        confidence: Between 0 and 1.
        valid: False at padding, same shape.
        signal: Name of the signal, for `generate`.
        prefix: As in `conformal_risk_control`.
        pilot: Share of the sequences that choose the order of testing, between 0 and 1.

    Returns:
        The threshold; it abstains from everything where the first test is not rejected, as with few sequences.

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
    for name, share in (("risk", risk), ("confidence", confidence), ("pilot", pilot)):
        _check_share(share, name)
    data = scored_sequences(score, error, valid, prefix=prefix)
    count = len(data.score)
    if count < 2:
        raise ArgumentError(f"learn_then_test needs two sequences or more, received {count}; calibrate on hundreds.")
    first = min(max(1, round(pilot * count)), count - 1)
    scout, test = data.part(slice(first)), data.part(slice(first, None))
    distinct = np.unique(scout.score[np.isfinite(scout.score)])
    thresholds = np.unique(np.quantile(distinct, np.linspace(0, 1, CANDIDATES), method="lower"))
    ahead = betting_p_value(_gap(scout.shares(thresholds), risk), risk, level=1 - confidence)
    path = thresholds[int(np.argmin(ahead)) :]
    rejected = betting_p_value(_gap(test.shares(path), risk), risk, level=1 - confidence) <= 1 - confidence
    passed = int(np.argmin(np.append(rejected, False)))  # how many before the first that is not
    value = float(path[passed - 1]) if passed else None
    return Threshold(signal, value, prefix, "selective risk", risk, confidence, count, data.outcome(value))


def betting_p_value(x: Floats, mean: float, *, level: float = 0.05) -> Floats:
    r"""P-values of $H: E[X] \ge m$ for independent draws $X \in [0, 1]$, by betting against it.

    $$ p = \min_t K_t^{-1}, \qquad K_t = \prod_{i \le t} \big(1 + \nu_i (m - X_i)\big), $$

    a wealth that cannot grow in expectation under H, whence $P(p \le \delta) \le \delta$ (Ville). The bets
    $\nu_i \le 0.9 / (1 - m)$ look at the draws before i only. Where the draws vary little, as means over the tokens of
    a sequence do, it is far stronger than Hoeffding's and Bentkus' bounds, which know the mean alone.

    Args:
        x: Draws, `(n, ...)`, in the order in which they are bet on.
        mean: $m$, between 0 and 1.
        level: The bets are sized for this p-value; any value is valid.

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
    """`L - risk C + risk`, in [0, 1] for each sequence: its mean is below `risk` where the selective risk is."""
    answered, wrong = shares
    return wrong - risk * answered + risk


def _check_share(value: float, name: str) -> None:
    if not 0 < value < 1:
        raise ArgumentError(f"{name} must lie between 0 and 1, received {value!r}; 0.05 is 5 %.")
