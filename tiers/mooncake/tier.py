"""The tier over a Mooncake store, which engines of many machines share.

The store's master knows where objects are; clients hold objects and transfer them to each other.
The store evicts by itself, so any record may disappear at any time. Reading it is then a miss. See
``mooncake.client`` for records and their names.

While the master is unreachable, every call raises ``TierIoError``, and the client reconnects by
itself. The master may have come back empty, so the tier then reports the loss of all records, and
caches of its content must be refreshed.

Ownership: everything belongs to the event loop's thread. Calls of the store run in daemon threads
of the tier, with separate ones for presence queries. The tier waits until a read or write ends,
because the store uses the caller's memory until then. Mooncake's own timeout is some seconds, or
half a minute if a peer hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from tiers.base import (
    Buffer,
    Key,
    ReadOutcome,
    SharedTier,
    StoredKeys,
    TierClosedError,
    TierInfo,
    TierIoError,
    WriteOutcome,
    stored_keys,
)
from tiers.io.threads import DaemonThreads, in_thread, settled
from tiers.io.timed_calls import TimedCalls
from tiers.mooncake.bulletin import POST_TIMEOUT_S, Notice, NoticeKeeper
from tiers.mooncake.client import CALL_RECORDS_MAX, MooncakeClient, MooncakeSettings
from tiers.record import (
    HEADER_BYTES,
    NO_NAMESPACE,
    Identity,
    check_identity,
    check_key,
    check_payload,
)

OPEN_TIMEOUT_S = 60.0
"""Longer than a client tries to register its memory (``REGISTER_TIMEOUT_S``)."""
CLOSE_TIMEOUT_S = 5.0

T = TypeVar("T")


class MooncakeTier(SharedTier):
    """A tier over a Mooncake store. ``memory`` is the address range of the slab. When the tier
    opens, it registers this memory and the bounce buffers of its ``threads``. ``notice`` describes
    this tier's records to other engines and is kept in the store while the tier is open."""

    def __init__(
        self,
        settings: MooncakeSettings,
        *,
        namespace: bytes = NO_NAMESPACE,
        rank: int = 0,
        epoch: int = 0,
        memory: range | None = None,
        threads: int = 4,
        notice: Notice | None = None,
    ) -> None:
        self._settings = settings
        self._identity = Identity(namespace, rank)
        check_identity(self._identity)
        self._epoch = epoch
        self._memory = memory
        self._count = threads
        self._notice = notice
        self._keeper: NoticeKeeper | None = None
        self._client: MooncakeClient | None = None
        self._on_loss: Callable[[], None] = lambda: None
        self._is_failing = False
        self._counts: Counter[str] = Counter()

    async def open(self) -> TierInfo:
        opening = in_thread(self._join)
        try:
            done, _ = await asyncio.wait([opening], timeout=OPEN_TIMEOUT_S)
        except asyncio.CancelledError:
            opening.add_done_callback(_leave)
            raise
        if not done:
            opening.add_done_callback(_leave)
            raise TierIoError(f"the Mooncake store at {self._settings.master} does not answer")
        client = opening.result()
        self._loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as undo:
            undo.callback(client.close)
            self._data = DaemonThreads("tier-mooncake", self._count)
            undo.callback(self._data.stop)
            self._calls = TimedCalls("tier-mooncake-ask", 2, "the Mooncake store")
            undo.pop_all()
        self._client = client
        if self._notice is not None:
            await self._post(self._notice)
        return TierInfo(
            "mooncake",
            self._settings.segment_bytes,
            0,
            0,
            persistent=False,
            epoch=self._epoch,
            found_epoch=self._epoch,
        )

    def footprint_bytes(self, payload_bytes: int) -> int:
        return payload_bytes + HEADER_BYTES

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        self._check_open()
        records: dict[Key, Buffer] = {}
        for key, data in zip(keys, buffers, strict=True):
            check_key(key)
            check_payload(data.nbytes)
            records.setdefault(key, data)
        outcomes = await self._batches(MooncakeClient.put, list(records), list(records.values()))
        found = dict(zip(records, outcomes, strict=True))
        self._counts["written"] += sum(o is WriteOutcome.OK for o in outcomes)
        return [found[key] for key in keys]

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        self._check_open()
        if len(keys) != len(into):
            raise ValueError(f"{len(keys)} keys and {len(into)} buffers")
        found = await self._batches(MooncakeClient.get, keys, into)
        self._counts.update(f"read_{outcome.value}" for outcome in found)
        return found

    async def present(self, keys: Sequence[Key]) -> list[bool]:
        client = self._check_open()
        if not keys:
            return []
        return await self._calls.call(self._call, client.present, keys, self._epoch)

    async def delete(self, keys: Sequence[Key]) -> None:
        client = self._check_open()
        if keys:
            await settled(self._data.run(self._call, client.remove, keys, self._epoch))

    async def touch(self, keys: Sequence[Key]) -> None:
        self._check_open()  # the store itself tracks recency

    async def keys(self) -> AsyncIterator[StoredKeys]:
        self._check_open()
        for batch in stored_keys(()):  # a Mooncake store cannot list its records
            yield batch

    async def reset(self, epoch: int) -> None:
        self._check_open()
        self._epoch = max(epoch, self._epoch + 1)

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            threads: list[DaemonThreads | TimedCalls] = [self._data, self._calls]
            if self._keeper is not None:
                self._keeper.stop()
                threads.append(self._keeper.threads)
            closing = in_thread(_close, client, threads)
            await asyncio.wait([closing], timeout=CLOSE_TIMEOUT_S)

    def on_loss(self, call: Callable[[], None]) -> None:
        self._on_loss = call

    def stats(self) -> dict[str, Any]:
        return dict(self._counts)

    # -- inside ------------------------------------------------------------------------------

    def _join(self) -> MooncakeClient:
        return MooncakeClient(self._settings, self._identity, self._memory, calls=self._count)

    async def _post(self, notice: Notice) -> None:
        """Post the notice and keep it posted."""
        self._keeper = NoticeKeeper(notice, self._check_open())
        try:
            with contextlib.suppress(TimeoutError):  # the keeper keeps trying
                await asyncio.wait_for(self._keeper.posted.wait(), POST_TIMEOUT_S)
        except asyncio.CancelledError:
            await self.aclose()
            raise

    def _check_open(self) -> MooncakeClient:
        if self._client is None:
            raise TierClosedError("the Mooncake tier is not open")
        return self._client

    async def _batches(
        self,
        call: Callable[[MooncakeClient, Sequence[Key], int, Sequence[Buffer]], list[T]],
        keys: Sequence[Key],
        buffers: Sequence[Buffer],
    ) -> list[T]:
        """Run ``call`` for all records, in batches and in as many threads as are free. Raises the
        exception of the first batch that failed, after all batches have ended."""
        client, epoch = self._check_open(), self._epoch
        running = [
            self._data.run(
                self._call,
                call,
                client,
                keys[at : at + CALL_RECORDS_MAX],
                epoch,
                buffers[at : at + CALL_RECORDS_MAX],
            )
            for at in range(0, len(keys), CALL_RECORDS_MAX)
        ]
        results = await settled(asyncio.gather(*running, return_exceptions=True))
        found: list[T] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            found += result
        return found

    def _call(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a call of the store, on a thread of the tier, unless the master is known to be
        unreachable."""
        client = self._client
        if client is None:
            raise TierClosedError("the Mooncake tier was closed")
        was_failing = self._is_failing
        if was_failing and not client.is_healthy:
            raise TierIoError("the Mooncake master does not answer")
        try:
            result = call(*arguments)
        except TierIoError:
            self._is_failing = True
            raise
        if was_failing:
            self._loop.call_soon_threadsafe(self._back)
        return result

    def _back(self) -> None:
        """Handle the return of the master, which may be a new, empty one."""
        if self._is_failing:
            self._is_failing = False
            self._counts["returns"] += 1
            if self._keeper is not None:
                self._keeper.look_now()
            self._on_loss()


def _leave(opening: asyncio.Future[MooncakeClient]) -> None:
    """Close a client that connected too late."""
    if not opening.cancelled() and opening.exception() is None:
        in_thread(opening.result().close)


def _close(client: MooncakeClient, threads: Sequence[DaemonThreads | TimedCalls]) -> None:
    for pool in threads:
        pool.stop()
    client.close()
