"""The read-only tier over a store of many machines.

A read from another machine may hang for a long time, and presence queries must be answered
meanwhile, so reads and queries have separate threads and a deadline. Other engines come and go
while this one runs, so the source looks for them regularly.

Ownership: everything belongs to the event loop's thread. Three threads call the source at a time:
one reads, one answers presence queries, and one looks for other engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from tiers.adapters.read_only import RecordSource, SharedReadOnlyTier
from tiers.base import Key, TierInfo
from tiers.io.threads import DaemonThreads, in_thread
from tiers.io.timed_calls import TimedCalls

logger = logging.getLogger(__name__)

LOOK_S = 60.0
"""Interval at which the source looks for other engines."""
SOURCE_CLOSE_TIMEOUT_S = 5.0


class RemoteSource(RecordSource, Protocol):
    """A source that several threads may call at once, and that finds other engines later."""

    def refresh(self) -> None:
        """Find the engines that exist at present."""
        ...


class RemoteReadOnlyTier(SharedReadOnlyTier):
    """See the module's docstring."""

    def __init__(self, open_source: Callable[[], RemoteSource]) -> None:
        """``open_source`` runs in a thread when the tier is opened."""
        super().__init__(self._opened)
        self._open_source = open_source
        self._source: RemoteSource | None = None
        self._calls: TimedCalls | None = None
        self._lookers: DaemonThreads | None = None
        self._looking: asyncio.Task[None] | None = None

    async def open(self) -> TierInfo:
        info = await super().open()
        self._calls = TimedCalls("tier-read-only-ask", 1, "the store of others")
        self._lookers = DaemonThreads("tier-read-only-look", 1)
        self._looking = asyncio.create_task(self._look_again())
        return info

    async def present(self, keys: Sequence[Key]) -> list[bool]:
        self._check_open()
        assert self._calls is not None
        if self._is_over or not keys:
            return [False] * len(keys)
        assert self._source is not None
        found = await self._calls.call(self._source.have, list(keys))
        return [here and key not in self._bad for key, here in zip(keys, found, strict=True)]

    async def aclose(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        threads, self._threads = self._threads, None
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()
        if threads is not None:
            pools = [pool for pool in (threads, self._lookers, self._calls) if pool is not None]
            # the search continues even if no call waits for it any more
            closing = in_thread(_close, pools, self._sources)
            await asyncio.wait([closing], timeout=SOURCE_CLOSE_TIMEOUT_S)

    def _opened(self) -> Sequence[RecordSource]:
        """Open the source, on the tier's thread."""
        self._source = self._open_source()
        return (self._source,)

    async def _look_again(self) -> None:
        assert self._source is not None
        assert self._lookers is not None
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._lookers.run(self._source.refresh)
            except Exception as error:  # the tier's own calls report the error, too
                logger.debug("kvtiers: cannot look for other engines: %r", error)


def _close(pools: Sequence[DaemonThreads | TimedCalls], sources: Sequence[RecordSource]) -> None:
    for pool in pools:
        pool.stop()
    for source in sources:
        source.close()
