"""Counts failures by kind, and selects those that are worth a log line.

A broken device fails thousands of operations per second. A kind of failure is logged when it first
occurs, and again whenever its count has grown tenfold.
"""

from __future__ import annotations

import threading
from collections import Counter


class Tally:
    """Counts by kind, and selects the counts that are worth a log line: 1, 10, 100 and so on. Any
    thread may count, under a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, kind: str) -> int:
        """Count one more; returns the new count if it is worth a log line, else 0."""
        with self._lock:
            self._counts[kind] += 1
            count = self._counts[kind]
        return count if count == 10 ** (len(str(count)) - 1) else 0

    def counts(self) -> dict[str, int]:
        """Return the count of each kind."""
        with self._lock:
            return dict(self._counts)
