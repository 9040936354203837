"""Failures of copies: each becomes a ``TransferError`` of its job, and is counted by kind.

A broken GPU fails every copy, thousands a second. The log gets a kind of failure when it is first
seen, and once more whenever its count has grown tenfold.

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
    """Counts by kind, and tells which counts are worth a line of log: 1, 10, 100 and so on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, kind: str) -> int:
        """Count one more; the new count if it is worth a line, else 0."""
        with self._lock:
            self._counts[kind] += 1
            count = self._counts[kind]
        return count if count == 10 ** (len(str(count)) - 1) else 0

    def counts(self) -> dict[str, int]:
        """How often each kind was counted."""
        with self._lock:
            return dict(self._counts)


def type_name(error: Exception) -> str:
    """The kind of a failure where nothing more is known of it."""
    return type(error).__name__


class Failures:
    """Runs work and counts failures that are no answer to a wrong request. ``kind_of`` names the
    kind of an exception: failures of one kind share a count and a log line."""

    def __init__(self, kind_of: Callable[[Exception], str] = type_name) -> None:
        self._tally = Tally()
        self._kind_of = kind_of

    def run(self, work: Work) -> TransferError | None:
        """Run ``work`` and say how it failed, if it did. A ``TransferError`` is the answer to a
        wrong request and goes to its caller alone; anything else is counted and logged too."""
        try:
            work()
        except TransferError as error:
            return error
        except Exception as error:  # a lane that dies would hang every later copy: fail this one
            self._note(error)
            return TransferError(f"the copy failed: {type(error).__name__}: {error}")
        return None

    def counts(self) -> dict[str, int]:
        """How often each kind was seen: a driver's function with its code, or an exception."""
        return self._tally.counts()

    def _note(self, error: Exception) -> None:
        count = self._tally.add(self._kind_of(error))
        if count == 1:
            logger.error("a copy failed in an unforeseen way (%s)", error, exc_info=error)
        elif count:
            logger.error("%d copies have failed like this by now: %s", count, error)
