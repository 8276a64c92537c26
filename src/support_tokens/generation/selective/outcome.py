r"""What a threshold does to sequences: which predictions are answered, and how many of these are wrong."""

__all__ = ["Outcome", "ScoredSequences", "Threshold", "measure_threshold", "scored_sequences"]

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from support_tokens.errors import ArgumentError
from support_tokens.generation.selective.levels import Floats


@dataclass(frozen=True)
class Outcome:
    r"""Coverage and errors over sequences, each with equal weight whatever its length.

    Args:
        coverage: Mean fraction of the predictions of a sequence that are answered.
        error_share: Mean fraction of the predictions of a sequence that are answered and wrong.
    """

    coverage: float
    error_share: float

    @property
    def risk(self) -> float | None:
        """`error_share / coverage`, the error among the answered; None if nothing is answered."""
        return self.error_share / self.coverage if self.coverage else None


@dataclass(frozen=True)
class Threshold:
    r"""A calibrated threshold of one signal, with its guarantee.

    Args:
        signal: Name of the signal.
        value: Predictions that score at most this are answered; None: abstain from everything.
        prefix: Whether a sequence ends at the first score above it, as generation does.
        kind: `error share` (in expectation) or `selective risk` (with a confidence).
        risk: The bound.
        confidence: Probability with which the bound holds; None: it holds in expectation.
        sequences: Number of calibration sequences.
        measured: Outcome on these sequences; optimistic, because the threshold was selected on them.
    """

    signal: str
    value: float | None
    prefix: bool
    kind: str
    risk: float
    confidence: float | None
    sequences: int
    measured: Outcome

    @property
    def abstains(self) -> bool:
        """Whether no threshold meets the bound, so that nothing is answered."""
        return self.value is None

    @property
    def stop_above(self) -> dict[str, float]:
        """Argument for `generate(stop_above=...)`."""
        return {self.signal: -math.inf if self.value is None else self.value}

    @property
    def sentence(self) -> str:
        """The result of the calibration in one sentence."""
        bound = f"{self.kind} at or below {self.risk:g}"
        held = "in expectation" if self.confidence is None else f"with confidence {self.confidence:g}"
        if self.value is None:
            return (
                f"No threshold of {self.signal} keeps the {bound} {held} on {self.sequences} sequences, so everything "
                "is abstained from; allow a larger risk, calibrate on more sequences or choose another signal."
            )
        return (
            f"Answering while {self.signal} is at most {self.value:.6g} keeps the {bound} {held}, calibrated on "
            f"{self.sequences} sequences, of whose predictions it answers {100 * self.measured.coverage:.1f} %."
        )


@dataclass(frozen=True, eq=False)
class ScoredSequences:
    """Checked scores and errors of N sequences of T predictions.

    Args:
        score: `(N, T)`, the running maximum where a sequence ends at the first score above a threshold; `inf` at
            padding.
        error: `(N, T)`, between 0 and 1; 0 at padding.
        share: `(N, T)`, weight of a prediction: one over the number of predictions of its sequence; 0 at padding.
    """

    score: Floats
    error: Floats
    share: Floats

    def shares(self, thresholds: Floats) -> tuple[Floats, Floats]:
        """Fractions of each sequence that are answered, and answered and wrong, at each threshold: two `(N, K)`."""
        answered, wrong = (np.empty((len(self.score), len(thresholds))) for _ in range(2))
        for row, (score, error, share) in enumerate(zip(self.score, self.error, self.share, strict=True)):
            order = np.argsort(score, kind="stable")
            place = np.searchsorted(score[order], thresholds, side="right")
            answered[row] = np.concatenate(([0.0], share[order].cumsum()))[place]
            wrong[row] = np.concatenate(([0.0], (share * error)[order].cumsum()))[place]
        return answered, wrong

    def part(self, rows: slice) -> "ScoredSequences":
        """The sequences in `rows`."""
        return ScoredSequences(self.score[rows], self.error[rows], self.share[rows])

    def outcome(self, threshold: float | None) -> Outcome:
        """Coverage and errors under a threshold; None answers nothing."""
        if threshold is None:
            return Outcome(0.0, 0.0)
        answered = np.where(self.score <= threshold, self.share, 0.0)
        return Outcome(float(answered.sum(-1).mean()), float((answered * self.error).sum(-1).mean()))


def scored_sequences(
    score: ArrayLike, error: ArrayLike, valid: ArrayLike | None = None, *, prefix: bool = True
) -> ScoredSequences:
    r"""Checks scores and errors of sequences.

    Args:
        score: `(N, T)`, uncertainty of each prediction, or `(N,)`, one prediction per sequence.
        error: Same shape, between 0 and 1.
        valid: Same shape, False at padding; None: all are valid. Values at padding are ignored.
        prefix: Take the running maximum of the score along a sequence.

    Raises:
        ArgumentError: Shapes differ, a sequence has no valid prediction, or a number is out of range.

    Example:
        >>> scored_sequences([[0.3, 0.1, 0.5]], [[0, 1, 1]]).score.tolist()
        [[0.3, 0.3, 0.5]]
    """
    scores, errors = np.asarray(score, dtype=np.float64), np.asarray(error, dtype=np.float64)
    kept: NDArray[np.bool_] = np.ones(scores.shape, bool) if valid is None else np.asarray(valid).astype(bool)
    if scores.ndim not in (1, 2) or not scores.size or errors.shape != scores.shape or kept.shape != scores.shape:
        raise ArgumentError(
            "score, error and valid must have one shape, (N, T) or (N,), with at least one entry, received "
            f"{scores.shape}, {errors.shape} and {kept.shape}; pass one row per sequence."
        )
    rows = len(scores)
    scores, errors, kept = scores.reshape(rows, -1), errors.reshape(rows, -1), kept.reshape(rows, -1)
    if not kept.any(-1).all():
        raise ArgumentError(
            f"valid must have a True in each sequence, received none in sequence {int(np.argmin(kept.any(-1)))}; "
            "remove that sequence."
        )
    if not np.isfinite(scores[kept]).all():
        raise ArgumentError(
            f"score must be finite, received {int((~np.isfinite(scores[kept])).sum())} entries that are not; mark them "
            "in valid."
        )
    if not ((errors[kept] >= 0) & (errors[kept] <= 1)).all():
        raise ArgumentError(
            "error must lie between 0 and 1, received other numbers; pass 1 where a prediction is wrong and 0 where it "
            "is right."
        )
    if prefix:
        scores = np.maximum.accumulate(np.where(kept, scores, -np.inf), axis=-1)
    share = kept / kept.sum(-1, keepdims=True)
    return ScoredSequences(np.where(kept, scores, np.inf), np.where(kept, errors, 0.0), share)


def measure_threshold(
    threshold: Threshold, score: ArrayLike, error: ArrayLike, valid: ArrayLike | None = None
) -> Outcome:
    r"""Coverage and errors of a calibrated threshold on other sequences; arguments as in `scored_sequences`.

    Example:
        >>> from support_tokens.generation.selective import conformal_risk_control
        >>> threshold = conformal_risk_control([[0.1, 0.6]] * 9, [[0, 1]] * 9, risk=0.2)
        >>> measure_threshold(threshold, [[0.0, 0.2, 0.1]], [[0, 0, 1]])
        Outcome(coverage=0.3333333333333333, error_share=0.0)
    """
    return scored_sequences(score, error, valid, prefix=threshold.prefix).outcome(threshold.value)
