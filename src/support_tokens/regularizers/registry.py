"""Every regularizer by name, and regularizers as words on the command line and as objects in `config.json`."""

__all__ = [
    "REGULARIZERS",
    "parse_regularizer",
    "regularizer_config",
    "regularizer_from_config",
    "regularizer_label",
]

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from support_tokens.errors import ArgumentError
from support_tokens.regularizers.adversarial import ALUM, SDBN, FreeLB, Smart
from support_tokens.regularizers.barriers import Barrier, ScaleFreeBarrier, TargetMargin
from support_tokens.regularizers.base import CrossEntropy, Regularizer, Sum, parts_of
from support_tokens.regularizers.consistency import RDrop
from support_tokens.regularizers.noise import EmbeddingDropout, NEFTune, Noise
from support_tokens.regularizers.sharpness import SAM
from support_tokens.regularizers.spread import Spread
from support_tokens.regularizers.weights import EmbeddingDecay, EmbeddingScale, SigmaReparam, SpectralNorm

REGULARIZERS: dict[str, type[Regularizer]] = {
    regularizer.name: regularizer
    for regularizer in (
        CrossEntropy,
        Barrier,
        Spread,
        ScaleFreeBarrier,
        TargetMargin,
        Smart,
        Noise,
        FreeLB,
        ALUM,
        SDBN,
        SAM,
        RDrop,
        NEFTune,
        EmbeddingDropout,
        EmbeddingDecay,
        SpectralNorm,
        SigmaReparam,
        EmbeddingScale,
    )
}
"""Every regularizer by name."""


def parse_regularizer(text: str) -> Regularizer:
    r"""Reads a regularizer from the command line: `NAME` or `NAME:OPTION=VALUE,...`, several joined by `+`.

    Args:
        text: For example `barrier:weight=0.05`, or `smart:weight=0.15+spread:weight=0.02`.

    Returns:
        The regularizer.

    Raises:
        ArgumentError: Unknown name or option, or a value that is out of range or no number where one is required.

    Example:
        >>> parse_regularizer("noise:scale=0.1,unit=absolute")
        Noise(scale=0.1, unit='absolute')
    """
    # A plus sign in a number such as 1e+3 is followed by a digit, and a name begins with a letter.
    parts = re.split(r"\+(?=\s*[a-z])", text)
    return _parse(text) if len(parts) == 1 else Sum(tuple(map(_parse, parts)))


def _fields(name: str) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(REGULARIZERS[name])  # type: ignore[arg-type]


def _parse(text: str) -> Regularizer:
    name, _, options = text.partition(":")
    name, values = name.strip(), {}
    types = {field.name: field.type for field in _fields(name)} if name in REGULARIZERS else {}
    for given in filter(None, options.split(",")):
        key, separator, value = given.partition("=")
        key, value = key.strip(), value.strip()
        if types.get(key) is str and separator:
            values[key] = value
            continue
        try:
            number = float(value)
        except ValueError:
            raise ArgumentError(
                f"option '{given}' of '{text}' must be written NAME=NUMBER, received '{value}' for the number; write "
                "for example barrier:weight=0.05."
            ) from None
        whole = types.get(key) is int and math.isfinite(number) and number == int(number)
        values[key] = int(number) if whole else number
    return regularizer_from_config({"name": name, **values})


def regularizer_from_config(config: Mapping) -> Regularizer:
    """Makes a regularizer from what `config.json` holds: its name and its options.

    Args:
        config: `{"name": ..., option: value, ...}`, or `{"name": "sum", "parts": [...]}`.

    Raises:
        ArgumentError: Unknown name or option, or a value out of range.

    Example:
        >>> regularizer_from_config({"name": "noise", "scale": 0.1})
        Noise(scale=0.1, unit='relative')
    """
    options: dict[str, Any] = {key: value for key, value in config.items() if key != "name"}
    name = config.get("name")
    if name == Sum.name:
        return Sum(tuple(map(regularizer_from_config, options.get("parts", ()))))
    if not isinstance(name, str) or name not in REGULARIZERS:
        raise ArgumentError(f"a regularizer must be one of {', '.join(REGULARIZERS)}, received {name!r}; choose one.")
    known = [field.name for field in _fields(name)]
    for key in options:
        if key not in known:
            raise ArgumentError(
                f"an option of regularizer '{name}' must be one of {', '.join(known) or 'none'}, received '{key}'; "
                "leave it out."
            )
    return REGULARIZERS[name](**options)


def regularizer_config(regularizer: Regularizer) -> dict:
    """What `config.json` records of a regularizer.

    Example:
        >>> regularizer_config(EmbeddingDropout(rate=0.05))
        {'name': 'dropout', 'rate': 0.05}
    """
    if isinstance(regularizer, Sum):
        return {"name": regularizer.name, "parts": [regularizer_config(part) for part in regularizer.parts]}
    return {"name": regularizer.name, **dataclasses.asdict(regularizer)}  # type: ignore[call-overload]


def regularizer_label(regularizer: Regularizer) -> str:
    """Each part with its first option, which is its strength, and with every other one that is not the default.

    Example:
        >>> regularizer_label(Barrier(weight=0.05)), regularizer_label(Noise(unit="absolute")), regularizer_label(SAM())
        ('barrier, weight 0.05', 'noise, scale 0.2, unit absolute', 'sam, weight 1')
        >>> regularizer_label(Spread(at="adversarial") + Smart(weight=0.15))
        'smart, weight 0.15 + spread, weight 0.02, at adversarial'
    """
    return " + ".join(map(_label, parts_of(regularizer)))


def _label(regularizer: Regularizer) -> str:
    options = {}
    for place, field in enumerate(dataclasses.fields(regularizer)):  # type: ignore[arg-type]
        value = getattr(regularizer, field.name)
        if place == 0 or value != field.default:
            options[field.name] = value if isinstance(value, str) else f"{value:g}"
    return ", ".join([regularizer.name, *(f"{key} {value}" for key, value in options.items())])
