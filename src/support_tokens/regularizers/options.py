"""Options of frozen values: default, documentation and bounds of a field in one place, checked at construction."""

__all__ = ["check_options", "option"]

import math
from dataclasses import MISSING, field
from typing import Any

from support_tokens.errors import ArgumentError


def option(
    default: Any, text: str, *, least: float = 0.0, most: float = math.inf, choices: tuple[str, ...] = ()
) -> Any:
    """A dataclass field with its documentation and its bounds, or the words it may be, in `metadata`.

    Args:
        default: Its default, of the field's type.
        text: One phrase of documentation; the command line shows it.
        least: Smallest number.
        most: Largest number.
        choices: The words it may be.
    """
    return field(default=default, metadata={"help": text, "least": least, "most": most, "choices": choices})


def check_options(value: Any, prefix: str = "") -> None:
    """Checks every option of a frozen value against its bounds.

    Args:
        value: A dataclass some of whose fields are made by `option`.
        prefix: Begins the message.

    Raises:
        ArgumentError: An option is not of its type, not finite, out of its bounds or none of its words.
    """
    for name, described in value.__dataclass_fields__.items():
        if not described.metadata:
            continue
        received, least, most = getattr(value, name), described.metadata["least"], described.metadata["most"]
        if choices := described.metadata["choices"]:
            if received not in choices:
                raise ArgumentError(f"{prefix}{name} must be one of {', '.join(choices)}, received {received!r}.")
            continue
        whole = described.type is int
        fits = isinstance(received, int if whole else int | float) and not isinstance(received, bool)
        if not (fits and math.isfinite(received) and least <= received <= most):
            kind = "a whole number" if whole else "a finite number"
            bounds = f"of at least {least:g}" + (f" and at most {most:g}" if math.isfinite(most) else "")
            example = "" if described.default is MISSING else f", such as {described.default!r}"
            raise ArgumentError(
                f"{prefix}{name} must be {kind} {bounds}, received {received!r}; pass such a value{example}."
            )
