r"""Frozen dataclasses to plain JSON values and back, with one sentence for whatever does not fit."""

__all__ = ["decode", "encode"]

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from support_tokens.errors import RunFolderError, SupportTokensError

T = TypeVar("T")


def encode(value: Any) -> Any:
    r"""Plain JSON values of a (nested) dataclass.

    Args:
        value: Dataclasses, tuples, mappings, text, numbers, booleans and None.

    Raises:
        RunFolderError: A number that JSON cannot hold, such as NaN, or a value of another type.

    Example:
        >>> from support_tokens.report.records.estimate import Estimate
        >>> encode((Estimate(1.5), "x"))
        [{'value': 1.5, 'low': None, 'high': None}, 'x']
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise RunFolderError(f"A result file holds finite numbers, but {value!r} was to be written; leave it out.")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise RunFolderError(
        f"A result file holds text, numbers, lists and objects, but a {type(value).__name__} was to be written; "
        "convert it first."
    )


def decode(cls: type[T], record: Any, *, whose: str, kind: str, schema_version: int) -> T:
    r"""The dataclass that plain JSON values describe, checked against its annotations.

    Args:
        cls: A dataclass whose fields are dataclasses, tuples, mappings, text, numbers, booleans, or None.
        record: Plain JSON values; keys that `cls` does not know are left aside.
        whose: Named in errors, usually the path of the file.
        kind: Required value of `record["kind"]`.
        schema_version: Required value of `record["schema_version"]`.

    Raises:
        RunFolderError: Another kind or version, a missing field, a value of a wrong type.
    """
    if not isinstance(record, Mapping) or record.get("kind") != kind:
        found = record.get("kind") if isinstance(record, Mapping) else type(record).__name__
        raise RunFolderError(
            f"{whose}: a file of kind {kind!r} is required, but this one is {found!r}; check the path."
        )
    if record.get("schema_version") != schema_version:
        raise RunFolderError(
            f"{whose}: schema version {schema_version} is required, but this file has "
            f"{record.get('schema_version')!r}; read it with the release that wrote it, or evaluate again."
        )
    try:
        return _decode(cls, record, "")
    except _Misfit as misfit:
        raise RunFolderError(f"{whose}: {misfit}; the file is corrupt, so evaluate again.") from None
    except RunFolderError:
        raise
    except SupportTokensError as error:
        raise RunFolderError(f"{whose}: {error}") from error


class _Misfit(Exception):
    """Where a value does not fit its annotation, and why."""


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in parameters:
            return None
        return _decode(next(p for p in parameters if p is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise _misfit(where, "a list", value)
        return tuple(_decode(parameters[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise _misfit(where, "an object", value)
        return {key: _decode(parameters[1], item, f"{where}.{key}") for key, item in value.items()}
    if is_dataclass(kind):
        return _decode_fields(kind, value, where)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if kind in (str, int, bool) and type(value) is kind:
        return value
    raise _misfit(
        where, {float: "a finite number", str: "text", int: "a whole number"}.get(kind, "a truth value"), value
    )


def _decode_fields(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise _misfit(where, "an object", value)
    hints = typing.get_type_hints(cls)
    found = {}
    for field in fields(cls):
        path = f"{where}.{field.name}" if where else field.name
        if field.name in value:
            found[field.name] = _decode(hints[field.name], value[field.name], path)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise _Misfit(f"{path} is missing")
    return cls(**found)


def _misfit(where: str, required: str, value: Any) -> _Misfit:
    received = repr(value)
    return _Misfit(f"{where} must be {required}, not {received[:60]}{'...' if len(received) > 60 else ''}")
