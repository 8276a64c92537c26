r"""The tables of signals. Higher is always more uncertain.

Names are those of lm-polygraph where it has the estimator. Results name a signal of a layer `NAME (layer=L)`.
"""

__all__ = [
    "SEQUENCE_SIGNALS",
    "TOKEN_SIGNALS",
    "Quantities",
    "Signal",
    "chosen_signals",
    "sequence_values",
    "token_values",
]

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from support_tokens.errors import ArgumentError
from support_tokens.generation.signals.attention import rauq_of_sequence


@dataclass(frozen=True)
class Quantities:
    r"""Quantities of n positions of B sequences from which signals are computed.

    Args:
        common: `entropy`, `log_max_prob`, `log_chosen` and `log_density`, as far as needed, `(B, n)`.
        layers: By layer `log_abs_det`, `sign`, `sigma_min`, `log_pivot`, `rauq` `(B, n)`, `self_weight` and
            `confidence` `(B, H, n)`, as far as needed.
        read: True at tokens that are not padding, `(B, n)`.
        predicted: True where the next token is known, `(B, n)`.
    """

    common: Mapping[str, Tensor]
    layers: Mapping[int, Mapping[str, Tensor]]
    read: Tensor
    predicted: Tensor


@dataclass(frozen=True)
class Signal:
    """One signal.

    Args:
        name: Name in results.
        needs: Names of the quantities that it needs.
        of: Maps quantities to `(B, n)` for tokens, or, with a mask of positions, to `(B,)` for sequences.
        scope: `text`: one value; `layer`: one value per layer; `layers`: one value from all layers.
        follows: Whether it needs the token that follows.
        expensive: Whether it is computed only on request.
    """

    name: str
    needs: tuple[str, ...]
    of: Callable[..., Tensor]
    scope: Literal["text", "layer", "layers"] = "text"
    follows: bool = False
    expensive: bool = False


def _attention_score(q: Mapping[str, Tensor]) -> Tensor:
    # The epsilon of lm-polygraph: a vanishing weight counts at most 27.6 nats.
    return -(q["self_weight"] + 1e-12).log().mean(1)


TOKEN_SIGNALS: dict[str, Signal] = {
    signal.name: signal
    for signal in (
        Signal("TokenEntropy", ("entropy",), lambda q: q["entropy"]),
        Signal("MaximumTokenProbability", ("log_max_prob",), lambda q: -q["log_max_prob"]),
        Signal("NegativeLogLikelihood", ("log_chosen",), lambda q: -q["log_chosen"], follows=True),
        Signal("NegativeLogMargin", ("log_abs_det",), lambda q: -q["log_abs_det"], scope="layer"),
        Signal("NegativeSign", ("sign",), lambda q: -q["sign"], scope="layer"),
        Signal("NegativeSigmaMin", ("sigma_min",), lambda q: -q["sigma_min"], scope="layer", expensive=True),
        Signal("AttentionScore", ("self_weight",), _attention_score, scope="layer"),
        Signal("HiddenScore", ("log_pivot",), lambda q: q["log_pivot"], scope="layer"),
        Signal("RAUQ", ("rauq",), lambda q: q["rauq"], scope="layer", follows=True),
        Signal("NegativeLogDensity", ("log_density",), lambda q: -q["log_density"]),
    )
}
"""Signals of one token: of the prediction at its position, or of the position itself."""


def _sum(name: str) -> Callable[..., Tensor]:
    return lambda q, counted: torch.where(counted, TOKEN_SIGNALS[name].of(q), 0.0).sum(-1)


def _mean(name: str) -> Callable[..., Tensor]:
    return lambda q, counted: _sum(name)(q, counted) / counted.sum(-1)


def _largest(name: str) -> Callable[..., Tensor]:
    return lambda q, counted: torch.where(counted, TOKEN_SIGNALS[name].of(q), -torch.inf).amax(-1)


def _negative_fraction(q: Mapping[str, Tensor], counted: Tensor) -> Tensor:
    return ((q["sign"] < 0) & counted).sum(-1) / counted.sum(-1)


def _rauq(layers: Sequence[Mapping[str, Tensor]], counted: Tensor) -> Tensor:
    values = [rauq_of_sequence(q["confidence"], q["self_weight"], counted) for q in layers]
    return torch.stack(values).amax(0)


SEQUENCE_SIGNALS: dict[str, Signal] = {
    signal.name: signal
    for signal in (
        Signal("MaximumSequenceProbability", ("log_chosen",), _sum("NegativeLogLikelihood"), follows=True),
        Signal("Perplexity", ("log_chosen",), _mean("NegativeLogLikelihood"), follows=True),
        Signal("MeanTokenEntropy", ("entropy",), _mean("TokenEntropy"), follows=True),
        Signal("MeanNegativeLogMargin", ("log_abs_det",), _mean("NegativeLogMargin"), scope="layer"),
        Signal("MaximumNegativeLogMargin", ("log_abs_det",), _largest("NegativeLogMargin"), scope="layer"),
        Signal("NegativeSignShare", ("sign",), _negative_fraction, scope="layer"),
        Signal("MaximumNegativeSigmaMin", ("sigma_min",), _largest("NegativeSigmaMin"), scope="layer", expensive=True),
        Signal("AttentionScore", ("self_weight",), _sum("AttentionScore"), scope="layer"),
        Signal("HiddenScore", ("log_pivot",), _mean("HiddenScore"), scope="layer"),
        Signal("RAUQ", ("confidence", "self_weight"), _rauq, scope="layers", follows=True),
        Signal("MeanNegativeLogDensity", ("log_density",), _mean("NegativeLogDensity")),
    )
}
"""Signals of one sequence. Those with `follows` aggregate over positions with a known next token, others over all.

`Perplexity` is the mean negative log-likelihood in nats, without the exponential, as in lm-polygraph. `RAUQ` is the
maximum over layers of the paper's formula; lm-polygraph adds 1 to it.
"""


def chosen_signals(
    table: Mapping[str, Signal], names: Sequence[str] | None, *, law: bool, default: Sequence[str] | None = None
) -> tuple[Signal, ...]:
    """The signals of these names; for None `default`, or all that are neither expensive nor need a missing law.

    Raises:
        ArgumentError: There is no such signal, or it needs a law and none is given.

    Example:
        >>> [signal.name for signal in chosen_signals(TOKEN_SIGNALS, ["TokenEntropy"], law=False)]
        ['TokenEntropy']
    """
    if isinstance(names, str):
        raise ArgumentError(f"signals must be a sequence of names, received the text {names!r}; pass [{names!r}].")
    if names is None:
        names = default or [s.name for s in table.values() if not s.expensive and (law or "log_density" not in s.needs)]
    for name in names:
        if name not in table:
            raise ArgumentError(f"signals may name {', '.join(table)}, received {name!r}; choose among these.")
        if "log_density" in table[name].needs and not law:
            raise ArgumentError(f"law must be given for {name}, received none; fit an EmbeddingPrior and pass it.")
    return tuple(table[name] for name in dict.fromkeys(names))


def token_values(signals: Sequence[Signal], quantities: Quantities) -> dict[str, Tensor]:
    """Signals of every token, `(B, n)` by name; NaN at padding, and where a needed next token is unknown."""
    values: dict[str, Tensor] = {}
    for signal in signals:
        known = quantities.predicted if signal.follows else quantities.read
        for name, q in _named(signal, quantities):
            values[name] = signal.of(q).masked_fill(~known, torch.nan)
    return values


def sequence_values(signals: Sequence[Signal], quantities: Quantities, counted: Tensor) -> dict[str, Tensor]:
    """Signals of every sequence, `(B,)` by name, over positions `counted` `(B, n)`; NaN where there is none."""
    values: dict[str, Tensor] = {}
    for signal in signals:
        rows = counted & (quantities.predicted if signal.follows else quantities.read)
        for name, q in _named(signal, quantities):
            values[name] = signal.of(q, rows).masked_fill(~rows.any(-1), torch.nan)
    return values


def _named(signal: Signal, quantities: Quantities) -> list[tuple[str, Any]]:
    if signal.scope == "text":
        return [(signal.name, quantities.common)]
    if signal.scope == "layers":
        return [(signal.name, list(quantities.layers.values()))]
    return [(f"{signal.name} (layer={layer})", q) for layer, q in quantities.layers.items()]
