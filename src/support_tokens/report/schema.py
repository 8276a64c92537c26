"""Frozen dataclasses to plain JSON values and back, checked against their annotations."""

__all__ = ["AT_LEAST_ONE", "FRACTION", "NON_NEGATIVE", "POSITIVE", "Bound", "decode", "encode"]

import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, TypeVar

from support_tokens.errors import RunFolderError, SupportTokensError

T = TypeVar("T")

_LARGEST = 1e18
"""No figure of ours is larger; what is would overflow in the first sum or plot that it enters."""


@dataclass(frozen=True)
class Bound:
    """What an annotation `Annotated[type, Bound(...)]` asks of a number, or of the length of a list or text.

    Args:
        low: Smallest value.
        high: Largest value.
        open: Whether `low` itself is excluded.
    """

    low: float
    high: float = math.inf
    open: bool = False

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.open else f"at least {self.low:g}"
        return low if self.high == math.inf else f"{low} and at most {self.high:g}"

    def admits(self, value: float) -> bool:
        """Whether the number lies within the bound."""
        return (value > self.low if self.open else value >= self.low) and value <= self.high


AT_LEAST_ONE = Bound(1)
NON_NEGATIVE = Bound(0)
POSITIVE = Bound(0, open=True)
FRACTION = Bound(0, 1)


def encode(value: Any) -> Any:
    r"""Plain JSON values of a (nested) dataclass.

    Args:
        value: Dataclasses, tuples, mappings, text, numbers, booleans and None.

    Returns:
        The same as dicts and lists; a field that is None by default is left out.

    Raises:
        RunFolderError: A number that JSON cannot hold, such as NaN, or a value of another type.

    Example:
        >>> from support_tokens.report.records.estimate import Estimate
        >>> encode((Estimate(1.5), "x"))
        [{'value': 1.5}, 'x']
    """
    if is_dataclass(value) and not isinstance(value, type):
        found = ((field, getattr(value, field.name)) for field in fields(value))
        return {field.name: encode(item) for field, item in found if item is not None or field.default is not None}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise RunFolderError(f"Numbers in a result file must be finite, received {value!r}; leave the figure out.")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise RunFolderError(
        f"Values in a result file must be text, numbers, lists or objects, received a {type(value).__name__}; "
        "convert it first."
    )


def decode(cls: type[T], record: Any, *, source: str) -> T:
    r"""The dataclass that plain JSON values describe, checked against its annotations and their bounds.

    Args:
        cls: A dataclass whose fields are dataclasses, tuples, mappings, text, numbers, booleans, or None, each
            possibly `Annotated` with a `Bound`.
        record: Plain JSON values; keys that `cls` does not have are ignored.
        source: Named in errors, usually the path of the file.

    Raises:
        RunFolderError: A missing field, a value of a wrong type or out of its bounds, or values that contradict each
            other.
    """
    try:
        return _decode(cls, record, "")
    except _Misfit as misfit:
        raise RunFolderError(f"{source}: {misfit}; the file is corrupt, so make it again.") from None
    except RunFolderError:
        raise
    except SupportTokensError as error:
        raise RunFolderError(f"{source}: {error}") from error
    except RecursionError:
        raise RunFolderError(f"{source}: values are nested too deeply; make the file again.") from None


class _Misfit(Exception):
    """Where a value does not fit its annotation, and why."""


def _decode(kind: Any, value: Any, path: str) -> Any:
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is typing.Annotated:
        decoded, bound = _decode(parameters[0], value, path), parameters[1]
        size = decoded if isinstance(decoded, int | float) else len(decoded)
        if not bound.admits(size):
            raise _misfit(path, str(bound) if size is decoded else f"of a length that is {bound}", value)
        return decoded
    if origin in (typing.Union, types.UnionType):
        return _decode(_member(parameters, value), value, path)
    if kind is types.NoneType and value is None:
        return None
    if origin is tuple:
        if not isinstance(value, list):
            raise _misfit(path, "a list", value)
        return tuple(_decode(parameters[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise _misfit(path, "an object", value)
        return {key: _decode(parameters[1], item, f"{path}.{key}") for key, item in value.items()}
    if is_dataclass(kind):
        return _decode_fields(kind, value, path)
    if kind in (float, int) and isinstance(value, kind | int) and not isinstance(value, bool):
        if -_LARGEST <= value <= _LARGEST or (kind is int and abs(value) < 2**64):
            return kind(value)
    elif kind in (str, bool) and type(value) is kind:
        return value
    raise _misfit(
        path, {float: "a finite number", str: "text", int: "a whole number", bool: "a truth value"}[kind], value
    )


def _member(parameters: tuple, value: Any) -> Any:
    """The type of a union that a value is to be read as: None, its own, or else the first."""
    exact = {typing.get_args(p)[0] if typing.get_origin(p) is typing.Annotated else p: p for p in parameters}
    return exact.get(type(value), next(p for p in parameters if p is not types.NoneType))


def _decode_fields(cls: Any, value: Any, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise _misfit(path or "the record", "an object", value)
    hints = _hints(cls)
    arguments = {}
    for field in fields(cls):
        place = f"{path}.{field.name}" if path else field.name
        if field.name in value:
            arguments[field.name] = _decode(hints[field.name], value[field.name], place)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise _Misfit(f"{place} is missing")
    return cls(**arguments)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _misfit(path: str, required: str, value: Any) -> _Misfit:
    received = repr(value)
    return _Misfit(f"{path} must be {required}, not {received[:60]}{'...' if len(received) > 60 else ''}")
