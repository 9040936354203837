"""Failures of copies: each becomes a ``TransferError`` of its job, and is counted by kind.

A broken GPU fails every copy, thousands a second. The log gets a kind of failure when it is first
seen, and once more whenever its count has grown tenfold.

Ownership: one lock guards the counts; any thread may run work.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

from tiers.copy import TransferError
from tiers.cuda_driver import DriverError

logger = logging.getLogger(__name__)

Work: TypeAlias = Callable[[], None]


class Failures:
    """Runs work and keeps account of what went wrong in ways that no caller asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

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
        with self._lock:
            return dict(self._counts)

    def _note(self, error: Exception) -> None:
        kind = error.kind if isinstance(error, DriverError) else type(error).__name__
        with self._lock:
            self._counts[kind] += 1
            count = self._counts[kind]
        if count == 1:
            logger.error("a copy failed in an unforeseen way (%s)", error, exc_info=error)
        elif count == 10 ** (len(str(count)) - 1):
            logger.error("%d copies have failed like this by now: %s", count, error)
