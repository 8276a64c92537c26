r"""The table of signals: what each needs, and what it makes of it. Higher is more uncertain, always.

Names are those of lm-polygraph where it has the estimator. A signal of a layer is called `NAME (layer=L)` in results.
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
    r"""What n positions of B sequences were found to be, before it is made a signal.

    Args:
        common: `entropy`, `log_max_prob`, `log_chosen` and `log_density`, those that were wanted, `(B, n)`.
        layers: By layer `log_abs_det`, `sign`, `sigma_min`, `log_pivot`, `rauq` `(B, n)`, `self_weight` and
            `confidence` `(B, H, n)`, those that were wanted.
        read: True at real tokens, `(B, n)`.
        predicted: True where a real token is known to follow, `(B, n)`.
    """

    common: Mapping[str, Tensor]
    layers: Mapping[int, Mapping[str, Tensor]]
    read: Tensor
    predicted: Tensor


@dataclass(frozen=True)
class Signal:
    """One entry of the table.

    Args:
        name: As in results.
        needs: Names of quantities.
        of: From quantities to `(B, n)` for a token, or, with the positions that count, to `(B,)` for a sequence.
        scope: `text`: one of a text; `layer`: each layer has one of its own; `layers`: one of all layers at once.
        follows: Whether it needs the token that follows, and so says nothing of a prediction before that is known.
        expensive: Whether it is left out unless asked for.
    """

    name: str
    needs: tuple[str, ...]
    of: Callable[..., Tensor]
    scope: Literal["text", "layer", "layers"] = "text"
    follows: bool = False
    expensive: bool = False


def _attention_score(q: Mapping[str, Tensor]) -> Tensor:
    # The same small number as in lm-polygraph, so that a weight that vanishes counts 27.6 nats and no more.
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
"""Signals of one token: of the prediction made at its position, or of the position itself."""


def _sum(name: str) -> Callable[..., Tensor]:
    return lambda q, counted: torch.where(counted, TOKEN_SIGNALS[name].of(q), 0.0).sum(-1)


def _mean(name: str) -> Callable[..., Tensor]:
    return lambda q, counted: _sum(name)(q, counted) / counted.sum(-1)


def _largest(name: str) -> Callable[..., Tensor]:
    return lambda q, counted: torch.where(counted, TOKEN_SIGNALS[name].of(q), -torch.inf).amax(-1)


def _share_folded(q: Mapping[str, Tensor], counted: Tensor) -> Tensor:
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
        Signal("NegativeSignShare", ("sign",), _share_folded, scope="layer"),
        Signal("MaximumNegativeSigmaMin", ("sigma_min",), _largest("NegativeSigmaMin"), scope="layer", expensive=True),
        Signal("AttentionScore", ("self_weight",), _sum("AttentionScore"), scope="layer"),
        Signal("HiddenScore", ("log_pivot",), _mean("HiddenScore"), scope="layer"),
        Signal("RAUQ", ("confidence", "self_weight"), _rauq, scope="layers", follows=True),
        Signal("MeanNegativeLogDensity", ("log_density",), _mean("NegativeLogDensity")),
    )
}
"""Signals of one sequence. Those of predictions count positions with a known next token, the others all that were read.

`Perplexity` is the mean negative log-likelihood in nats, as in lm-polygraph, which takes no exponential. `RAUQ` is the
largest over the layers asked for, by the paper's formula; lm-polygraph adds 1 to it.
"""


def chosen_signals(
    table: Mapping[str, Signal], names: Sequence[str] | None, *, law: bool, default: Sequence[str] | None = None
) -> tuple[Signal, ...]:
    """The entries of a table that were asked for; None: `default`, or all that are not expensive and can be had.

    Raises:
        ArgumentError: There is no such signal, or it needs a law and none is there.

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
            raise ArgumentError(f"signals may name {', '.join(table)}, received {name!r}; choose of these.")
        if "log_density" in table[name].needs and not law:
            raise ArgumentError(f"{name} needs a law of embeddings, received none; fit an EmbeddingPrior and pass it.")
    return tuple(table[name] for name in dict.fromkeys(names))


def token_values(signals: Sequence[Signal], found: Quantities) -> dict[str, Tensor]:
    """Signals of every token, `(B, n)` by name; NaN at padding, and where the token that follows is needed and not
    known."""
    values: dict[str, Tensor] = {}
    for signal in signals:
        known = found.predicted if signal.follows else found.read
        for name, q in _named(signal, found):
            values[name] = signal.of(q).masked_fill(~known, torch.nan)
    return values


def sequence_values(signals: Sequence[Signal], found: Quantities, counted: Tensor) -> dict[str, Tensor]:
    """Signals of every sequence, `(B,)` by name, over the positions that count `(B, n)`; NaN where none does."""
    values: dict[str, Tensor] = {}
    for signal in signals:
        rows = counted & (found.predicted if signal.follows else found.read)
        for name, q in _named(signal, found):
            values[name] = signal.of(q, rows).masked_fill(~rows.any(-1), torch.nan)
    return values


def _named(signal: Signal, found: Quantities) -> list[tuple[str, Any]]:
    if signal.scope == "text":
        return [(signal.name, found.common)]
    if signal.scope == "layers":
        return [(signal.name, list(found.layers.values()))]
    return [(f"{signal.name} (layer={layer})", q) for layer, q in found.layers.items()]
