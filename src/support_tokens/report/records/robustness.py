r"""The records that a robustness report is made of: frozen, plain numbers and text, checked against themselves."""

__all__ = [
    "CALIBRATION_BINS",
    "Area",
    "ArmRecord",
    "BootstrapRecord",
    "Choice",
    "DataRecord",
    "Difference",
    "MarginCounts",
    "MarginHistogram",
    "MarginTrace",
    "PerturbationRecord",
    "Result",
    "SentenceMargins",
    "Split",
    "StructureFigures",
]

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from support_tokens.errors import ArgumentError
from support_tokens.report.records.estimate import Estimate

CALIBRATION_BINS = 15
"""Bins of equal width that confidence is sorted into."""


@dataclass(frozen=True)
class ArmRecord:
    """One arm; `embedding_rms` by seed, their mean over that of the baseline, `rms_ratio`; `seconds` of training."""

    name: str
    label: str
    description: str
    seconds: float | None
    embedding_rms: tuple[float, ...]
    rms_ratio: float


@dataclass(frozen=True)
class PerturbationRecord:
    """One perturbation: the curve (`family`) and place on it (`strength` on `axis`), and all that defines it."""

    name: str
    family: str
    strength: float
    axis: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class DataRecord:
    """The evaluation data: sequences of at most `length` tokens; tokens and characters that are predicted; SHA-256."""

    sequences: int
    length: int
    tokens: int
    characters: int | None
    checksum: str


@dataclass(frozen=True)
class BootstrapRecord:
    """How the intervals were made, and over what: sequences, or sequences and seeds."""

    method: str
    confidence: float
    resamples: int
    seed: int
    over: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """An arm under a perturbation: `bits` a unit (mean over seeds) and its ratio to clean, `degradation`.

    `calibration` is the expected calibration error of the likeliest token, `calibration_by_seed` its parts; older
    reports have none.
    """

    arm: str
    perturbation: str
    bits: Estimate
    degradation: Estimate
    bits_by_seed: tuple[float, ...]
    degradation_by_seed: tuple[float, ...]
    n_sequences: int
    n_tokens: int
    calibration: Estimate | None = None
    calibration_by_seed: tuple[float, ...] = ()


@dataclass(frozen=True)
class Area:
    """Area under an arm's curves of a family from 0 to `upper`, divided by `upper`: the mean height of the curves."""

    arm: str
    family: str
    upper: float
    bits: Estimate
    degradation: Estimate


@dataclass(frozen=True)
class Difference:
    """`arm` minus `against`, paired; `of` is the name of a perturbation or, for areas, of a family."""

    arm: str
    against: str
    of: str
    bits: Estimate
    degradation: Estimate
    calibration: Estimate | None = None


@dataclass(frozen=True)
class Choice:
    """Bits of an arm on the sequences that arms are chosen on: clean, or the mean height of the curves of a family."""

    arm: str
    of: str
    bits: float


@dataclass(frozen=True)
class Split:
    """Each other sequence to choose arms on, from the first (`choice`), the rest to judge them on (`judged`).

    An arm chosen on the text it is judged on would look better than it is. The trained models are the same in both, so
    the luck of their seeds is not divided.
    """

    choice: tuple[Choice, ...]
    judged: tuple[Difference, ...]


@dataclass(frozen=True)
class StructureFigures:
    r"""One arm's embeddings and the attention that reads them, a list over seeds each.

    `setting` says on which embeddings: the arm's own, or scaled to the size of the baseline's.
    """

    arm: str
    setting: str
    layer: int
    view: str
    n_positions: int
    embedding_rms: tuple[float, ...]
    effective_rank: tuple[float, ...]
    dispersion: tuple[float, ...]
    signal_to_noise: tuple[float, ...]
    log_margin_mean: tuple[float, ...]
    log_margin_min: tuple[float, ...]
    sigma_min_low: tuple[float, ...]
    negative_share: tuple[float, ...]
    attractive_share: tuple[float, ...]
    coupling_levels: tuple[float, ...]
    coupling_quantiles: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class MarginCounts:
    """Histogram of one arm's log margins; `negative_counts` are those of them with a negative determinant.

    `below` and `above` lie outside of the shared edges, `singular` have log margin minus infinity and stand in no bin.
    """

    arm: str
    n: int
    counts: tuple[int, ...]
    negative_counts: tuple[int, ...]
    below: int
    above: int
    singular: int
    mean: float | None
    minimum: float | None
    negative_share: float


@dataclass(frozen=True)
class MarginHistogram:
    """Histograms of several arms over the same edges; `source`, `layer` and `view` say whose margins they are."""

    source: str
    layer: int
    view: str
    edges: tuple[float, ...]
    arms: tuple[MarginCounts, ...]

    def __post_init__(self) -> None:
        bins = {len(of_arm) for counts in self.arms for of_arm in (counts.counts, counts.negative_counts)}
        if bins != {len(self.edges) - 1} or any(counts.n < 1 for counts in self.arms):
            raise ArgumentError(
                f"A histogram of {len(self.edges)} edges must have one count fewer for each arm, of some margins, "
                f"but its numbers of counts are {sorted(bins)}."
            )


@dataclass(frozen=True)
class MarginTrace:
    """Log margins along a text for one arm; None at a singular position; `support` are the smallest among the valid."""

    arm: str
    tokens: tuple[str, ...]
    log_abs_det: tuple[float | None, ...]
    sign: tuple[int, ...]
    valid: tuple[bool, ...]
    support: tuple[int, ...]

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if {len(self.log_abs_det), len(self.sign), len(self.valid)} != {n} or not all(0 <= t < n for t in self.support):
            raise ArgumentError(
                f"The margins of arm {self.arm!r} along the text must be one for each of its {n} tokens, its support "
                "tokens among them, but they are not."
            )


@dataclass(frozen=True)
class SentenceMargins:
    """A held-out text, read by each arm; `source`, `layer` and `view` say whose margins they are."""

    source: str
    layer: int
    view: str
    arms: tuple[MarginTrace, ...]
