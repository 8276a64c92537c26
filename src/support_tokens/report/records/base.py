"""What all records share: a kind, a version, JSON, and how files of earlier versions are read."""

__all__ = ["RECORD_KINDS", "Record", "RecordKind", "notebook_html", "renamed"]

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from support_tokens.errors import RunFolderError
from support_tokens.files import read_object, write_json
from support_tokens.report.schema import decode, encode

_VIEWS = "support_tokens.report.notebook"
R = TypeVar("R", bound="Record")


@dataclass(frozen=True)
class RecordKind:
    """One kind of record.

    Args:
        cls: Its class.
        version: The version that is written; a reader takes this one and all before it.
        upgrade: Takes an object of an earlier version and the number of that version, and returns the object of the
            current version; None where there is one version only.
    """

    cls: type["Record"]
    version: int
    upgrade: Callable[[Mapping[str, Any], int], Mapping[str, Any]] | None = None


RECORD_KINDS: dict[str, RecordKind] = {}
"""Every kind of record by its name in JSON."""


class Record:
    """A frozen value with a JSON file of its own: `class Sample(Record, kind="sample", version=2, upgrade=older)`."""

    kind: ClassVar[str]

    def __init_subclass__(
        cls,
        *,
        kind: str,
        version: int = 1,
        upgrade: Callable[[Mapping[str, Any], int], Mapping[str, Any]] | None = None,
    ) -> None:
        cls.kind = kind
        RECORD_KINDS[kind] = RecordKind(cls, version, upgrade)

    def record(self) -> dict[str, Any]:
        """The value as plain JSON values, schema version and kind first.

        Raises:
            RunFolderError: A number is not finite.
        """
        return {"schema_version": RECORD_KINDS[self.kind].version, "kind": self.kind, **encode(self)}

    @classmethod
    def from_record(cls: type[R], record: Any, *, source: str = "the record") -> R:
        """The value that plain JSON values describe, of this version or of an earlier one.

        Args:
            record: What `record` returned, after JSON.
            source: Named in errors, usually the path of the file.

        Raises:
            RunFolderError: Another kind, a later version, or a value that is missing, of a wrong type or out of bounds.
        """
        known = RECORD_KINDS[cls.kind]
        kind = record.get("kind") if isinstance(record, Mapping) else type(record).__name__
        if kind != cls.kind:
            raise RunFolderError(f"{source}: kind must be {cls.kind!r}, received {str(kind)[:60]!r}; check the path.")
        version = record.get("schema_version")
        if type(version) is not int or not 1 <= version <= known.version:
            raise RunFolderError(
                f"{source}: schema_version must be {_versions(known.version)}, received {str(version)[:60]}; read the "
                "file with the release that wrote it, or make it again."
            )
        if version < known.version:
            try:
                assert known.upgrade is not None, f"{cls.kind} has versions and no upgrade"
                record = known.upgrade(record, version)
            # An upgrade reads what no schema has checked yet.
            except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
                raise RunFolderError(
                    f"{source}: the record of version {version} cannot be read ({type(error).__name__}: "
                    f"{str(error)[:60]}); the file is corrupt, so make it again."
                ) from error
        return decode(cls, record, source=source)

    def _repr_html_(self) -> str:
        """The record in a notebook; the views stand above the records and are loaded when they are asked for."""
        return notebook_html(self)

    def to_json(self, path: str | Path) -> None:
        """Writes the record to `path`, atomically.

        Raises:
            RunFolderError: The file cannot be written, or a number is not finite.
        """
        write_json(path, self.record())

    @classmethod
    def from_json(cls: type[R], path: str | Path) -> R:
        """Reads what `to_json` wrote, of this version or of an earlier one.

        Raises:
            RunFolderError: The file is missing, is not JSON, or holds no record of this kind.
        """
        return cls.from_record(read_object(path), source=f"'{path}'")


def notebook_html(value: Any) -> str:
    """HTML of a record, or of a part of one, for a notebook."""
    return importlib.import_module(_VIEWS).fragment(value)


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Plain JSON values whose keys have other names, at any depth.

    Example:
        >>> renamed({"old": [{"old": 1}]}, {"old": "new"})
        {'new': [{'new': 1}]}
    """
    if isinstance(value, Mapping):
        return {names.get(key, key): renamed(item, names) for key, item in value.items()}
    return [renamed(item, names) for item in value] if isinstance(value, list) else value


def _versions(last: int) -> str:
    return "1" if last == 1 else f"1 to {last}"
