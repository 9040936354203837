"""Watches one lower tier's operations on one rank: a deadline for each, and how they went.

An operation that is late is not given up, because it may still use its buffers: it counts as a
failure for every ``timeout_s`` that it is late, which opens the tier's breaker on the scheduler
side. One that never ends falls silent some time, so that the tier may be tried without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from offload.plans import Observed
from tiers.base import ReadOutcome, WriteOutcome

T = TypeVar("T")

LATE_REPORTS_MAX = 12
"""How often one operation is reported as late."""


class TierWatch:
    """``report`` takes what was seen, on the loop's thread."""

    def __init__(self, timeout_s: float, report: Callable[[Observed], None]) -> None:
        self._timeout_s = timeout_s
        self._report = report

    async def read(self, operation: Awaitable[list[ReadOutcome]]) -> list[ReadOutcome]:
        """A read. A tier that does not have the keys says nothing of its health; one that was too
        busy for all of them costs requests as much as one that fails."""
        outcomes, late = await self._finish(operation, Observed(reads_failed=1))
        if ReadOutcome.OK in outcomes:
            if not late:
                self._report(Observed(reads_good=1))
        elif ReadOutcome.CORRUPT in outcomes or ReadOutcome.BUSY in outcomes:
            self._report(Observed(reads_failed=1))
        return outcomes

    async def write(self, operation: Awaitable[list[WriteOutcome]]) -> list[WriteOutcome]:
        """A write; it failed if nothing of it was taken."""
        outcomes, late = await self._finish(operation, Observed(writes_failed=1))
        if WriteOutcome.OK in outcomes:
            if not late:
                self._report(Observed(writes_good=1))
        else:
            self._report(Observed(writes_failed=1))
        return outcomes

    async def ask(self, operation: Awaitable[list[bool]]) -> list[bool]:
        """A question. Its answer says nothing of whether the tier can be read."""
        return (await self._finish(operation, Observed(reads_failed=1)))[0]

    async def change(self, operation: Awaitable[None]) -> None:
        """A deletion, a note of use or a reset; counts among the writes if it fails."""
        await self._finish(operation, Observed(writes_failed=1))

    async def _finish(self, operation: Awaitable[T], failure: Observed) -> tuple[T, bool]:
        """Wait for the end, however late; whether it was late."""
        task = asyncio.ensure_future(operation)
        late = 0
        try:
            while not (await asyncio.wait({task}, timeout=self._timeout_s))[0]:
                late += 1
                if late <= LATE_REPORTS_MAX:
                    self._report(failure)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.exception() is not None:
            self._report(failure)
        return task.result(), late > 0
