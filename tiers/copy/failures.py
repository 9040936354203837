"""Counts failed copies by kind; each becomes a ``TransferError`` of its job.

A broken GPU fails every copy, thousands per second. A kind of failure is logged when it first
occurs, and again whenever its count has grown tenfold.

Ownership: a lock guards each tally's counts; any thread may run work and count.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

from tiers.copy.base import TransferError

logger = logging.getLogger(__name__)

Work: TypeAlias = Callable[[], None]


class Tally:
    """Counts by kind, and selects the counts that are worth a log line: 1, 10, 100 and so on."""

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


def type_name(error: Exception) -> str:
    """Return the default kind of a failure: the name of its exception."""
    return type(error).__name__


class Failures:
    """Runs work and counts unexpected failures. ``kind_of`` names the kind of an exception:
    failures of one kind share a count and a log line."""

    def __init__(self, kind_of: Callable[[Exception], str] = type_name) -> None:
        self._tally = Tally()
        self._kind_of = kind_of

    def run(self, work: Work) -> TransferError | None:
        """Run ``work`` and return how it failed, if it did. A ``TransferError`` rejects a wrong
        request and is raised only to its caller; any other exception is counted and logged too."""
        try:
            work()
        except TransferError as error:
            return error
        except Exception as error:
            # fail only this copy: if the lane's thread died, every later copy would hang
            self._note(error)
            return TransferError(f"the copy failed: {type(error).__name__}: {error}")
        return None

    def counts(self) -> dict[str, int]:
        """Return the count of each kind: a driver function with its error code, or an exception."""
        return self._tally.counts()

    def _note(self, error: Exception) -> None:
        count = self._tally.add(self._kind_of(error))
        if count == 1:
            logger.error("a copy failed unexpectedly (%s)", error, exc_info=error)
        elif count:
            logger.error("%d copies have failed like this so far: %s", count, error)
