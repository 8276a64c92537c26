"""Results in memory, each behind a name that cannot be guessed; nothing of a visitor becomes a file."""

__all__ = ["Results"]

import json
import secrets
import threading
from collections import OrderedDict

from support_tokens.analysis import MarginReport
from support_tokens.report.tokens import changes_html, margins_html


class Results:
    """The latest results; older ones are forgotten.

    Args:
        most: How many are kept.

    Example:
        >>> Results().get("no such name", "html") is None
        True
    """

    def __init__(self, most: int = 32) -> None:
        self._most = most
        self._kept: OrderedDict[str, tuple[MarginReport, dict[str, bytes]]] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, report: MarginReport) -> str:
        """Keeps the page and the JSON of a report, and returns the name they are kept under."""
        text = json.dumps(report.record.record(), indent=2, ensure_ascii=False, allow_nan=False)
        made = {"html": margins_html(report.record).encode(), "json": text.encode()}
        name = secrets.token_urlsafe(24)
        with self._lock:
            self._kept[name] = (report, made)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return name

    def get(self, name: str, kind: str) -> bytes | None:
        """The `html` or `json` kept under a name, or None."""
        with self._lock:
            return self._kept[name][1].get(kind) if name in self._kept else None

    def changes(self, before: str, after: str) -> str | None:
        """The page of what changed between two results, or None if one is not kept.

        Raises:
            ArgumentError: They share no layer and view.
        """
        with self._lock:
            if before not in self._kept or after not in self._kept:
                return None
            reports = self._kept[before][0], self._kept[after][0]
        return changes_html(reports[0].compare(reports[1]))
