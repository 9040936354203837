"""Watches the operations of one lower tier on one rank: deadlines and results. Also limits
concurrent calls.

A late operation is not abandoned, because it may still use its buffers. It counts as a failure for
every ``timeout_s`` that it is late, which opens the tier's circuit breaker on the scheduler side.
After some time an operation that never ends is no longer reported, so the tier can be probed.

A tier may be third-party code. An answer without exactly one result per key is a ``TierIoError``:
if part of it were used, one key's bytes could be taken for another's.
"""

from __future__ import annotations

import asyncio
import logging
import reprlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from offload.messages.report import Observed
from policies.safe_text import safe_repr
from tiers.base import Buffer, ReadOutcome, Tier, TierIoError, WriteOutcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

LATE_REPORTS_MAX = 12
"""Maximum number of times that one operation is reported as late."""
CALLS_MIN, CALLS_MAX = 4, 16
QUICK_S, SLOW_S = 0.25, 1.0
"""After each call that takes at most ``QUICK_S``, a tier may get one more call at a time; after a
call that takes longer than ``SLOW_S``, half as many."""


class CallsInFlight:
    """Limits the calls of one kind that a tier gets at a time; ``calls_max`` is the highest limit.

    Many calls at a time keep a fast disk busy: small records need more of them than large ones. On
    a slow disk they would only wait for each other, until each of them counts as late.
    """

    def __init__(self, calls_max: int = CALLS_MAX) -> None:
        self._min, self._max = min(CALLS_MIN, calls_max), calls_max
        self.limit = self._min

    def ended(self, seconds: float) -> None:
        """Record the duration of a call."""
        if seconds <= QUICK_S:
            self.limit = min(self._max, self.limit + 1)
        elif seconds > SLOW_S:
            self.limit = max(self._min, self.limit // 2)


class TierMonitor:
    """Runs a tier's operations and reports their outcome.

    ``report`` is called on the loop's thread. ``count`` is the number of keys of a call.
    """

    def __init__(self, timeout_s: float, report: Callable[[Observed], None]) -> None:
        self._timeout_s = timeout_s
        self._report = report
        self._under_way = 0
        self._ended_at = 0.0

    def seconds_until_quiet(self, quiet_s: float) -> float:
        """Seconds until the tier will have been idle for ``quiet_s``, if no call comes in
        between."""
        if self._under_way:
            return quiet_s
        return self._ended_at + quiet_s - asyncio.get_running_loop().time()

    async def read(
        self, operation: Awaitable[Sequence[ReadOutcome]], count: int
    ) -> list[ReadOutcome]:
        """Run a read.

        Missing keys say nothing about the tier's health. But if the tier is too busy to read any of
        the keys, this counts as a failure, because it costs requests just as much.
        """
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
        """Run a write, which counts as failed if no record was accepted."""
        failure = Observed(writes_failed=1)
        found, late = await self._finish(operation, failure)
        outcomes = self._checked(found, count, WriteOutcome, failure)
        if WriteOutcome.OK in outcomes:
            if not late:
                self._report(Observed(writes_good=1))
        else:
            self._report(failure)
        return outcomes

    async def query(self, operation: Awaitable[Sequence[bool]], count: int) -> list[bool]:
        """Run a query. Its result says nothing about whether the tier can be read.

        A query counts as one failure at most, however late it ends and whatever its result is then:
        a store that does not answer is given up soon after the query has become late.
        """
        failure = Observed(reads_failed=1)
        found, late = await self._finish(operation, failure, once=True)
        return self._checked(found, count, bool, Observed() if late else failure)

    async def change(self, operation: Awaitable[None]) -> None:
        """Run a deletion, a use notification or a reset; if it fails, it counts as a failed
        write."""
        await self._finish(operation, Observed(writes_failed=1))

    async def _finish(
        self, operation: Awaitable[T], failure: Observed, *, once: bool = False
    ) -> tuple[T, bool]:
        """Wait for the end of an operation, however late; return whether it was late. With
        ``once``, its lateness and its exception are one failure."""
        self._under_way += 1
        try:
            return await self._wait(operation, failure, once=once)
        finally:
            self._under_way -= 1
            self._ended_at = asyncio.get_running_loop().time()

    async def _wait(
        self, operation: Awaitable[T], failure: Observed, *, once: bool
    ) -> tuple[T, bool]:
        task = asyncio.ensure_future(operation)
        late = 0
        try:
            while not (await asyncio.wait({task}, timeout=self._timeout_s))[0]:
                late += 1
                if late <= (1 if once else LATE_REPORTS_MAX):
                    self._report(failure)
        except asyncio.CancelledError:
            task.cancel()
            raise
        is_cancelled = task.cancelled()
        has_failed = is_cancelled or task.exception() is not None
        if has_failed and not (once and late):
            self._report(failure)
        if is_cancelled:  # if raised, it would look as if the caller had been cancelled
            raise TierIoError("the tier itself has cancelled a call")
        return task.result(), late > 0

    def _checked(self, found: Sequence[T], count: int, kind: type[T], failure: Observed) -> list[T]:
        is_answer = isinstance(found, Sequence) and len(found) == count
        if is_answer and all(isinstance(one, kind) for one in found):
            return list(found)
        self._report(failure)
        raise TierIoError(
            f"the tier was called with {count} keys and must return one {kind.__name__} for each, "
            f"but returned {reprlib.repr(found)}"
        )


class WatchedTier:
    """One lower tier whose operations are watched; ``report`` receives their outcomes.

    Every operation raises what the tier raises, and ``TierIoError`` for an invalid result.
    """

    def __init__(self, tier: Tier, timeout_s: float, report: Callable[[Observed], None]) -> None:
        self.tier = tier
        self.monitor = TierMonitor(timeout_s, report)

    async def read(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[ReadOutcome]:
        """Read records; see ``Tier.read`` and ``TierMonitor.read``."""
        return await self.monitor.read(self.tier.read(keys, buffers), len(keys))

    async def write(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        """Write records; see ``Tier.write`` and ``TierMonitor.write``."""
        return await self.monitor.write(self.tier.write(keys, buffers), len(keys))

    async def delete(self, keys: Sequence[bytes]) -> None:
        """Delete records."""
        await self.monitor.change(self.tier.delete(keys))

    async def touch(self, keys: Sequence[bytes]) -> None:
        """Tell the tier that these records were used."""
        await self.monitor.change(self.tier.touch(keys))

    async def reset(self, epoch: int) -> None:
        """Begin an epoch."""
        await self.monitor.change(self.tier.reset(epoch))


async def close_tier(tier: Tier, timeout_s: float) -> None:
    """Close a tier, or abandon it if it does not close in time.

    Never raises, so that the other tiers can be closed.
    """
    try:
        closing = asyncio.ensure_future(tier.aclose())
        done, _ = await asyncio.wait({closing}, timeout=timeout_s)
        if not done:
            closing.cancel()
            logger.warning("kvtiers: a tier did not close within %g s", timeout_s)
        elif closing.cancelled() or closing.exception() is not None:
            error = None if closing.cancelled() else closing.exception()
            logger.warning("kvtiers: a tier did not close: %s", safe_repr(error))
    except Exception as error:  # e.g. a call that does not return an awaitable
        logger.warning("kvtiers: a tier did not close: %s", safe_repr(error))
