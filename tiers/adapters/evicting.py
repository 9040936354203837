"""Any tier, kept below its capacity by a policy: for use without a scheduler above.

Inside vLLM the scheduler's index decides what every tier keeps, and calls ``delete``. In-process
users, benchmarks and the command line have no such index; they wrap their tier in this one.

The policy is any object shaped like ``policies.base.EvictionPolicy``; so are the two causes that
its ``remove`` wants and the facts that its ``insert`` wants (``describe``). When the tier is
fuller than the high watermark, victims go in the background until it is down to the low one, in
transactions of their own; a write waits for that only when it would not fit otherwise.
``admit`` and a budget of bytes per day keep an SSD from being written to death.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tiers.adapters.wrapper import TierWrapper
from tiers.base import Buffer, Key, ReadOutcome, Tier, TierError, TierInfo, WriteOutcome
from tiers.io.awaiting import settled

DAY_S = 86_400.0
VICTIMS_PER_DELETE = 64


class Policy(Protocol):
    """The part of an eviction policy that is used here."""

    def insert(self, key: Any, info: Any) -> None: ...
    def touch(self, keys: Sequence[Any]) -> None: ...
    def victims(self, count: int, evictable: Callable[[Any], bool]) -> list[Any]: ...
    def remove(self, key: Any, cause: Any) -> None: ...
    def clear(self) -> None: ...


class WriteBudget:
    """At most ``bytes_per_day``, saved up for at most ``burst_s`` (a leaky bucket)."""

    def __init__(
        self,
        bytes_per_day: float,
        burst_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = bytes_per_day / DAY_S
        self._most = self._rate * burst_s
        self._clock = clock
        self._left = self._most
        self._at = clock()

    def take(self, byte_count: int) -> bool:
        """Spend this much if it is there."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        if byte_count > self._left:
            return False
        self._left -= byte_count
        return True


class EvictingTier(TierWrapper):
    """See the module. A record that is not admitted is ``FULL``, as if there were no room."""

    def __init__(
        self,
        inner: Tier,
        policy: Policy,
        *,
        describe: Callable[[Key, int], Any],
        causes: tuple[Any, Any],
        high: float = 0.95,
        low: float = 0.90,
        admit: Callable[[Key, Any], bool] | None = None,
        budget: WriteBudget | None = None,
    ) -> None:
        """``describe(key, payload bytes)`` gives the policy's info; ``causes`` are its words for
        evicted and dropped; ``high`` and ``low`` are shares of the capacity."""
        super().__init__(inner)
        if not 0 < low <= high <= 1:
            raise ValueError(f"watermarks need 0 < low <= high <= 1, got {low} and {high}")
        self._policy = policy
        self._describe = describe
        self._evicted, self._dropped = causes
        self._high, self._low = high, low
        self._admit = admit
        self._budget = budget
        self._sizes: dict[Key, int] = {}
        self._busy: Counter[Key] = Counter()
        self._used_bytes = self._capacity_bytes = 0
        self._evicting: asyncio.Task[None] | None = None
        self._counts: Counter[str] = Counter()

    def __contains__(self, key: Key) -> bool:
        """Whether a record is kept; from any thread, true of a moment ago."""
        return key in self._sizes

    async def open(self) -> TierInfo:
        info = await self.inner.open()
        self._capacity_bytes = info.capacity_bytes
        self._policy.clear()
        self._sizes.clear()
        self._used_bytes = 0
        async for batch in self.inner.keys():
            for key, payload_bytes in batch.pairs():
                self._enter(key, payload_bytes)
        return info

    def _enter(self, key: Key, payload_bytes: int) -> None:
        self._sizes[key] = self.footprint_bytes(payload_bytes)
        self._used_bytes += self._sizes[key]
        self._policy.insert(key, self._describe(key, payload_bytes))

    def _leave(self, key: Key, cause: Any) -> None:
        size = self._sizes.pop(key, None)
        if size is not None:
            self._used_bytes -= size
            self._policy.remove(key, cause)

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        outcomes = [WriteOutcome.OK] * len(keys)
        chosen: dict[Key, int] = {}
        for position, (key, data) in enumerate(zip(keys, buffers, strict=True)):
            if key in self._sizes or key in chosen:
                continue
            if self._is_wanted(key, data.nbytes):
                chosen[key] = position
            else:
                outcomes[position] = WriteOutcome.FULL
        await self._make_room(sum(self.footprint_bytes(buffers[n].nbytes) for n in chosen.values()))
        written = await self.inner.write(list(chosen), [buffers[n] for n in chosen.values()])
        for (key, position), outcome in zip(chosen.items(), written, strict=True):
            outcomes[position] = outcome
            if outcome is WriteOutcome.OK and key not in self._sizes:
                self._enter(key, buffers[position].nbytes)
        if self._used_bytes > self._high * self._capacity_bytes:
            self._start_evicting(0)
        return outcomes

    def _is_wanted(self, key: Key, payload_bytes: int) -> bool:
        if self._admit is not None and not self._admit(key, self._describe(key, payload_bytes)):
            self._counts["not_admitted"] += 1
            return False
        if self._budget is not None and not self._budget.take(payload_bytes):
            self._counts["over_budget"] += 1
            return False
        return True

    async def _make_room(self, incoming_bytes: int) -> None:
        """Wait until this much fits, or until nothing more can be evicted."""
        while self._used_bytes + incoming_bytes > self._capacity_bytes:
            before = self._used_bytes
            self._start_evicting(incoming_bytes)
            if self._evicting is not None:
                await asyncio.wait([self._evicting])
            if self._used_bytes >= before:
                return

    def _start_evicting(self, incoming_bytes: int) -> None:
        if self._evicting is None or self._evicting.done():
            target = self._low * self._capacity_bytes - incoming_bytes
            self._evicting = asyncio.ensure_future(self._evict_to(max(0.0, target)))

    async def _evict_to(self, target_bytes: float) -> None:
        while self._used_bytes > target_bytes:
            victims = self._choose(self._used_bytes - target_bytes)
            if not victims:
                return
            for key in victims:
                self._leave(key, self._evicted)
            self._counts["evicted"] += len(victims)
            try:
                await self.inner.delete(victims)
            except TierError:
                # The tier itself is gone; whoever uses it next is told by its own call.
                return

    def _choose(self, excess_bytes: float) -> list[Key]:
        """Victims for about this many bytes, no more than one transaction's worth."""
        found: list[Key] = []
        for key in self._policy.victims(VICTIMS_PER_DELETE, lambda key: not self._busy[key]):
            if excess_bytes <= 0:
                break
            excess_bytes -= self._sizes.get(key, 0)
            found.append(key)
        return found

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        self._busy.update(keys)
        try:
            outcomes = await self.inner.read(keys, into)
        finally:
            self._busy.subtract(keys)
            for key in keys:
                if self._busy[key] <= 0:
                    del self._busy[key]
        found = [k for k, got in zip(keys, outcomes, strict=True) if got is ReadOutcome.OK]
        lost = [
            key
            for key, outcome in zip(keys, outcomes, strict=True)
            if outcome in (ReadOutcome.MISS, ReadOutcome.CORRUPT) and key in self._sizes
        ]
        if lost:  # deleted as well, in case one was written again in the meantime
            await self.delete(lost)
        await self.touch(found)
        return outcomes

    async def touch(self, keys: Sequence[Key]) -> None:
        self._policy.touch(keys)
        # The tier's own order is oldest first; a request's head is its youngest key.
        await self.inner.touch(list(reversed(keys)))

    async def delete(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._leave(key, self._dropped)
        await self.inner.delete(keys)

    async def reset(self, epoch: int) -> None:
        self._policy.clear()
        self._sizes.clear()
        self._used_bytes = 0
        await self.inner.reset(epoch)

    async def aclose(self) -> None:
        if self._evicting is not None:
            await settled(self._evicting)
        await self.inner.aclose()

    def stats(self) -> dict[str, Any]:
        return {**self.inner.stats(), **self._counts}
