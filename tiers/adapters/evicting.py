"""A tier that evicts: keeps any tier below its capacity by a policy, without a planner above it.

Inside vLLM the planner decides what every tier keeps and calls ``delete``. The connector's
secondary tier (``offload.connector.secondary_tier``) has no planner, so it wraps its tier in
``EvictingTier``.

The policy is any object shaped like ``policies.base.EvictionPolicy``. When the tier is fuller than
the high watermark, a background task evicts victims in small transactions until the tier is down to
the low watermark. A write waits for this task only if it would not fit otherwise.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tiers.adapters.wrapper import TierWrapper
from tiers.base import Buffer, Key, ReadOutcome, Tier, TierError, TierInfo, WriteOutcome
from tiers.io.threads import settled

VICTIMS_PER_DELETE = 64


class Policy(Protocol):
    """The methods of an eviction policy that ``EvictingTier`` calls."""

    def insert(self, key: Any, info: Any) -> None: ...
    def touch(self, keys: Sequence[Any]) -> None: ...
    def victims(self, count: int, evictable: Callable[[Any], bool]) -> list[Any]: ...
    def remove(self, key: Any, cause: Any) -> None: ...
    def clear(self) -> None: ...


class EvictingTier(TierWrapper):
    """See the module's docstring. Everything belongs to the event loop's thread, unless stated
    otherwise."""

    def __init__(
        self,
        inner: Tier,
        policy: Policy,
        *,
        describe: Callable[[Key, int], Any],
        causes: tuple[Any, Any],
        high: float = 0.95,
        low: float = 0.90,
    ) -> None:
        """``describe(key, payload bytes)`` returns the arguments for the policy's ``insert``;
        ``causes`` are the arguments for its ``remove``, for an evicted and for a dropped record;
        ``high`` and ``low`` are shares of the capacity."""
        super().__init__(inner)
        if not 0 < low <= high <= 1:
            raise ValueError(f"watermarks need 0 < low <= high <= 1, got {low} and {high}")
        self._policy = policy
        self._describe = describe
        self._evicted, self._dropped = causes
        self._high, self._low = high, low
        self._sizes: dict[Key, int] = {}
        self._busy: Counter[Key] = Counter()
        self._used_bytes = self._capacity_bytes = 0
        self._evicting: asyncio.Task[None] | None = None
        self._counts: Counter[str] = Counter()

    def __contains__(self, key: Key) -> bool:
        """True if the tier holds the record. Any thread may call this; the answer is a hint."""
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
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers")
        outcomes = [WriteOutcome.OK] * len(keys)
        chosen: dict[Key, int] = {}
        for position, key in enumerate(keys):
            if key not in self._sizes and key not in chosen:
                chosen[key] = position
        await self._make_space(
            sum(self.footprint_bytes(buffers[n].nbytes) for n in chosen.values())
        )
        written = await self.inner.write(list(chosen), [buffers[n] for n in chosen.values()])
        for (key, position), outcome in zip(chosen.items(), written, strict=True):
            outcomes[position] = outcome
            if outcome is WriteOutcome.OK and key not in self._sizes:
                self._enter(key, buffers[position].nbytes)
        if self._used_bytes > self._high * self._capacity_bytes:
            self._start_evicting(0)
        return outcomes

    async def _make_space(self, incoming_bytes: int) -> None:
        """Wait until the incoming bytes fit, or until nothing more can be evicted."""
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
                return  # the medium has failed: the next call of the tier raises the error

    def _choose(self, excess_bytes: float) -> list[Key]:
        """Choose victims with about this many bytes in total, at most as many as one transaction
        deletes."""
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
        if lost:  # delete these too, because one of them may have been written again meanwhile
            await self.delete(lost)
        await self.touch(found)
        return outcomes

    async def touch(self, keys: Sequence[Key]) -> None:
        self._policy.touch(keys)
        # in reverse: the key that is touched last is the youngest, and this must be the head of the
        # request
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
