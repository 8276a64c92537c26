"""Structure of embeddings and attention, a list over seeds for each figure."""

__all__ = ["StructureFigures"]

from dataclasses import dataclass
from typing import Annotated

from support_tokens.errors import ArgumentError
from support_tokens.report.schema import AT_LEAST_ONE, FRACTION


@dataclass(frozen=True)
class StructureFigures:
    r"""Embeddings of an arm and the attention that reads them, one figure a seed in each column.

    Args:
        arm: Its name.
        setting: On which embeddings: the arm's own, or scaled to the size of the baseline's, say.
        layer: Block.
        view: `noise` ($I - D_t$) or `block` ($I + D_t$).
        n_positions: Positions whose margins and coupling were computed, over all seeds.
        embedding_rms: Root mean square of the embeddings.
        effective_rank: Exponential of the entropy of the spectrum of their covariance.
        dispersion: 0 where all tokens have one embedding, 1 where the embeddings have mean zero.
        signal_to_noise: Mean square of the output of attention over that of $x_t - \mu_t$; empty where unknown.
        log_margin_mean: Mean log margin, nats.
        log_margin_min: Smallest log margin, nats.
        sigma_min_low: 5 % quantile of $\sigma_{\min}(J_t)$.
        negative_fraction: Fraction of positions with $\det J_t < 0$.
        attractive_fraction: Positive part of the spectrum of the coupling, over the sum of its absolute values.
        coupling_levels: Levels of the quantiles of that spectrum.
        coupling_quantiles: The quantiles, a tuple a seed.

    Raises:
        ArgumentError: Columns of different lengths.
    """

    arm: str
    setting: str
    layer: int
    view: str
    n_positions: Annotated[int, AT_LEAST_ONE]
    embedding_rms: Annotated[tuple[float, ...], AT_LEAST_ONE]
    effective_rank: tuple[float, ...]
    dispersion: tuple[float, ...]
    signal_to_noise: tuple[float, ...]
    log_margin_mean: tuple[float, ...]
    log_margin_min: tuple[float, ...]
    sigma_min_low: tuple[float, ...]
    negative_fraction: tuple[Annotated[float, FRACTION], ...]
    attractive_fraction: tuple[Annotated[float, FRACTION], ...]
    coupling_levels: tuple[float, ...]
    coupling_quantiles: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        columns = (
            self.embedding_rms, self.effective_rank, self.dispersion, self.log_margin_mean, self.log_margin_min,
            self.sigma_min_low, self.negative_fraction, self.attractive_fraction, self.coupling_quantiles,
        )  # fmt: skip
        lengths = {len(column) for column in columns} | {len(self.signal_to_noise) or len(self.embedding_rms)}
        if len(lengths) != 1:
            raise ArgumentError(
                f"The structure of arm {self.arm!r} must have one figure a seed in each column, but its columns "
                f"have the lengths {sorted(lengths)}; evaluate again."
            )
