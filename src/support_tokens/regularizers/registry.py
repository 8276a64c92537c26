"""Every arm by name, and arms as words on the command line and as objects in `config.json`."""

__all__ = ["ARMS", "arm_config", "arm_from_config", "arm_label", "parse_arm"]

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from support_tokens.errors import ArgumentError
from support_tokens.regularizers.barriers import Barrier, HeldMargin, InvariantBarrier
from support_tokens.regularizers.base import Arm, CrossEntropy
from support_tokens.regularizers.combined import Combined
from support_tokens.regularizers.condition import ConditionPenalty
from support_tokens.regularizers.consistency import SMART, RDrop
from support_tokens.regularizers.noise import EmbeddingDropout, LawNoise, NEFTune, TrainingNoise
from support_tokens.regularizers.variational import Variational
from support_tokens.regularizers.weights import EmbeddingDecay, EmbeddingScale, SigmaReparam, SpectralNorm

ARMS: dict[str, type] = {
    arm.name: arm
    for arm in (
        CrossEntropy,
        Barrier,
        TrainingNoise,
        HeldMargin,
        InvariantBarrier,
        ConditionPenalty,
        LawNoise,
        Variational,
        NEFTune,
        EmbeddingScale,
        EmbeddingDropout,
        EmbeddingDecay,
        RDrop,
        SMART,
        SpectralNorm,
        SigmaReparam,
    )
}
"""Every arm by name."""


def parse_arm(text: str) -> Arm:
    r"""Reads an arm from the command line: `NAME` or `NAME:OPTION=VALUE,...`, several joined by `+`.

    Args:
        text: For example `barrier:weight=0.05`, or `noise:scale=0.2+invariant:weight=0.02`.

    Returns:
        The arm.

    Raises:
        ArgumentError: Unknown arm or option, or a value that is out of range or no number where one is required.

    Example:
        >>> parse_arm("noise:scale=0.1,unit=absolute")
        TrainingNoise(scale=0.1, unit='absolute')
    """
    # A plus sign in a number such as 1e+3 is followed by a digit, and the name of an arm begins with a letter.
    parts = re.split(r"\+(?=\s*[a-z])", text)
    return _parse(text) if len(parts) == 1 else Combined(tuple(map(_parse, parts)))


def _parse(text: str) -> Arm:
    name, _, options = text.partition(":")
    values: dict[str, Any] = {}
    types = {field.name: field.type for field in dataclasses.fields(ARMS[name.strip()])} if name.strip() in ARMS else {}
    for given in filter(None, options.split(",")):
        key, separator, value = given.partition("=")
        key, value = key.strip(), value.strip()
        try:
            values[key] = value if types.get(key) is str and separator else float(value)
        except ValueError:
            raise ArgumentError(
                f"arm '{text}': option '{given}' is not written NAME=NUMBER; write for example barrier:weight=0.05."
            ) from None
        if types.get(key) is int and math.isfinite(values[key]) and values[key] == int(values[key]):
            values[key] = int(values[key])
    return arm_from_config({"name": name.strip(), **values})


def arm_from_config(config: Mapping) -> Arm:
    """Makes an arm from what `config.json` holds: its name and its options.

    Args:
        config: `{"name": ..., option: value, ...}`.

    Raises:
        ArgumentError: Unknown arm or option, or a value out of range.

    Example:
        >>> arm_from_config({"name": "noise", "scale": 0.1})
        TrainingNoise(scale=0.1, unit='matched')
    """
    options = {key: value for key, value in config.items() if key != "name"}
    name = config.get("name")
    if name == Combined.name:
        return Combined(tuple(map(arm_from_config, options.get("parts", ()))))
    if name not in ARMS:
        raise ArgumentError(f"there is no arm '{name}'; known arms are {', '.join(ARMS)}.")
    known = [f.name for f in dataclasses.fields(ARMS[name])]
    for key in options:
        if key not in known:
            raise ArgumentError(f"arm '{name}' has no option '{key}'; its options are: {', '.join(known) or 'none'}.")
    return ARMS[name](**options)


def arm_config(arm: Arm) -> dict:
    """What `config.json` records of an arm.

    Example:
        >>> arm_config(EmbeddingDropout(rate=0.05))
        {'name': 'dropout', 'rate': 0.05}
    """
    if isinstance(arm, Combined):
        return {"name": arm.name, "parts": [arm_config(part) for part in arm.parts]}
    return {"name": arm.name, **dataclasses.asdict(arm)}  # type: ignore[call-overload]


def arm_label(arm: Arm) -> str:
    """The arm with its first option, which is its strength, and with every other one that is not the default.

    Example:
        >>> arm_label(Barrier(weight=0.05)), arm_label(TrainingNoise(unit="absolute")), arm_label(CrossEntropy())
        ('barrier, weight 0.05', 'noise, scale 0.2, unit absolute', 'ce')
    """
    if isinstance(arm, Combined):
        return " + ".join(map(arm_label, arm.parts))
    options = {}
    for place, field in enumerate(dataclasses.fields(arm)):  # type: ignore[arg-type]
        value = getattr(arm, field.name)
        if place == 0 or value != field.default:
            options[field.name] = value if isinstance(value, str) else f"{value:g}"
    return ", ".join([arm.name, *(f"{key} {value}" for key, value in options.items())])
