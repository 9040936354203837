"""Watches one lower tier's operations on one rank: a deadline for each, and how they went.

An operation that is late is not given up, because it may still use its buffers: it counts as a
failure for every ``timeout_s`` that it is late, which opens the tier's breaker on the scheduler
side. One that never ends falls silent some time, so that the tier may be tried without it.

A tier may be somebody else's code. An answer that does not say one thing about each key is a
``TierIoError``: taken as far as it goes, it could pass one key's bytes off as another's.
"""

from __future__ import annotations

import asyncio
import logging
import reprlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from offload.messages.report import Observed
from tiers.base import ReadOutcome, Tier, TierIoError, WriteOutcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

LATE_REPORTS_MAX = 12
"""How often one operation is reported as late."""


class TierMonitor:
    """``report`` takes what was seen, on the loop's thread. ``count`` is the number of keys that a
    call is about."""

    def __init__(self, timeout_s: float, report: Callable[[Observed], None]) -> None:
        self._timeout_s = timeout_s
        self._report = report
        self._under_way = 0
        self._ended_at = 0.0

    def seconds_until_quiet(self, quiet_s: float) -> float:
        """How long until nothing will have been asked of the tier for ``quiet_s`` seconds, if
        nothing is asked from now on."""
        if self._under_way:
            return quiet_s
        return self._ended_at + quiet_s - asyncio.get_running_loop().time()

    async def read(
        self, operation: Awaitable[Sequence[ReadOutcome]], count: int
    ) -> list[ReadOutcome]:
        """A read. A tier that does not have the keys says nothing of its health; one that was too
        busy for all of them costs requests as much as one that fails."""
        failure = Observed(reads_failed=1)
        found, late = await self._finish(operation, failure)
        outcomes = self._checked(found, count, ReadOutcome, failure)
        if ReadOutcome.OK in outcomes:
            if not late:
                self._report(Observed(reads_good=1))
        elif ReadOutcome.CORRUPT in outcomes or ReadOutcome.BUSY in outcomes:
            self._report(failure)
        return outcomes

    async def write(
        self, operation: Awaitable[Sequence[WriteOutcome]], count: int
    ) -> list[WriteOutcome]:
        """A write; it failed if nothing of it was taken."""
        failure = Observed(writes_failed=1)
        found, late = await self._finish(operation, failure)
        outcomes = self._checked(found, count, WriteOutcome, failure)
        if WriteOutcome.OK in outcomes:
            if not late:
                self._report(Observed(writes_good=1))
        else:
            self._report(failure)
        return outcomes

    async def ask(self, operation: Awaitable[Sequence[bool]], count: int) -> list[bool]:
        """A question. Its answer says nothing of whether the tier can be read."""
        failure = Observed(reads_failed=1)
        found, _ = await self._finish(operation, failure)
        return self._checked(found, count, bool, failure)

    async def change(self, operation: Awaitable[None]) -> None:
        """A deletion, a note of use or a reset; counts among the writes if it fails."""
        await self._finish(operation, Observed(writes_failed=1))

    async def _finish(self, operation: Awaitable[T], failure: Observed) -> tuple[T, bool]:
        """Wait for the end, however late; whether it was late."""
        self._under_way += 1
        try:
            return await self._wait(operation, failure)
        finally:
            self._under_way -= 1
            self._ended_at = asyncio.get_running_loop().time()

    async def _wait(self, operation: Awaitable[T], failure: Observed) -> tuple[T, bool]:
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
        if task.cancelled():  # passed on it would look as if the caller had been cancelled
            self._report(failure)
            raise TierIoError("the tier has cancelled a call itself")
        if task.exception() is not None:
            self._report(failure)
        return task.result(), late > 0

    def _checked(self, found: Sequence[T], count: int, kind: type[T], failure: Observed) -> list[T]:
        is_answer = isinstance(found, Sequence) and len(found) == count
        if is_answer and all(isinstance(one, kind) for one in found):
            return list(found)
        self._report(failure)
        raise TierIoError(
            f"the tier was asked about {count} keys and did not answer with as many "
            f"{kind.__name__}s, but with {reprlib.repr(found)}"
        )


async def close_tier(tier: Tier, timeout_s: float) -> None:
    """Close a tier, or leave behind one that does not end in time. Whatever a tier raises, the
    others can be closed."""
    try:
        closing = asyncio.ensure_future(tier.aclose())
        done, _ = await asyncio.wait({closing}, timeout=timeout_s)
        if not done:
            closing.cancel()
            logger.warning("kvtiers: a tier did not close within %g s", timeout_s)
        elif closing.cancelled() or closing.exception() is not None:
            error = None if closing.cancelled() else closing.exception()
            logger.warning("kvtiers: a tier did not close: %r", error)
    except Exception as error:  # a call that returns nothing to wait for, say
        logger.warning("kvtiers: a tier did not close: %r", error)
