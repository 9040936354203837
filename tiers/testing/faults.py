"""Wrappers for tiers that count, delay, hold, fail or damage, for tests and rehearsals.

They can be nested: ``FailingTier(CountingTier(MemoryTier(...)), ...)``. Each wrapper that injects a
fault counts in ``met`` how often it did so, which lets a test prove that its fault occurred.

A verifying tier reports damage as ``CORRUPT``; so does ``DamagingTier`` by default. With
``detected=False`` it returns damaged bytes as ``OK``, which no tier may do: a test of the layers
above must detect this.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np

from tiers.adapters.wrapper import SharedTierWrapper, TierWrapper
from tiers.base import (
    Buffer,
    Key,
    ReadOutcome,
    Tier,
    TierError,
    TierIoError,
    WriteOutcome,
)

DATA_METHODS = frozenset({"write", "read", "delete", "touch", "reset", "present"})


class CountingTier(TierWrapper):
    """Counts calls and keys by method."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        self.keys_seen: Counter[str] = Counter()

    async def before(self, method: str, keys: Sequence[Key]) -> None:
        self.calls[method] += 1
        self.keys_seen[method] += len(keys)


class FaultTier(TierWrapper):
    """The base of wrappers that inject a fault. ``when`` receives the number of the call (counted
    from 1 over all ``methods``) and returns True if the fault applies to it."""

    def __init__(
        self, inner: Tier, when: Callable[[int], bool], methods: Collection[str] = DATA_METHODS
    ) -> None:
        super().__init__(inner)
        self.met = 0
        self._when = when
        self._methods = frozenset(methods)
        self._calls = 0

    def count_call(self, method: str) -> bool:
        """Count this call; return True if the fault applies to it."""
        if method not in self._methods:
            return False
        self._calls += 1
        return self._when(self._calls)


def nth(number: int) -> Callable[[int], bool]:
    """A condition for ``when``: true only for the call with this number, counted from 1."""
    return lambda call: call == number


def from_nth(number: int) -> Callable[[int], bool]:
    """A condition for ``when``: true for the call with this number and for every later one."""
    return lambda call: call >= number


def always(_call: int) -> bool:
    """A condition for ``when``: true for every call."""
    return True


class FailingTier(FaultTier):
    """Raises an exception instead of passing the call on."""

    def __init__(
        self,
        inner: Tier,
        when: Callable[[int], bool] = always,
        methods: Collection[str] = DATA_METHODS,
        error: Callable[[], TierError] = lambda: TierIoError("injected"),
    ) -> None:
        super().__init__(inner, when, methods)
        self._error = error

    async def before(self, method: str, keys: Sequence[Key]) -> None:
        if self.count_call(method):
            self.met += 1
            raise self._error()


class HoldingTier(FaultTier):
    """Holds calls until ``release``, like a disk that hangs. ``waiting`` returns when a call is
    held."""

    def __init__(
        self,
        inner: Tier,
        when: Callable[[int], bool] = always,
        methods: Collection[str] = DATA_METHODS,
    ) -> None:
        super().__init__(inner, when, methods)
        self._released = asyncio.Event()
        self._held = asyncio.Event()

    async def before(self, method: str, keys: Sequence[Key]) -> None:
        if self.count_call(method) and not self._released.is_set():
            self.met += 1
            self._held.set()
            await self._released.wait()

    async def waiting(self) -> None:
        """Return as soon as a call is held."""
        await self._held.wait()

    def release(self) -> None:
        """Let all held and future calls through."""
        self._released.set()


class FailingSharedTier(SharedTierWrapper, FailingTier):
    """A ``FailingTier`` around a shared tier."""


class HoldingSharedTier(SharedTierWrapper, HoldingTier):
    """A ``HoldingTier`` around a shared tier."""


class SlowTier(FaultTier):
    """Waits ``delay_s`` plus ``delay_s_per_mib`` per MiB before reads and writes."""

    def __init__(
        self,
        inner: Tier,
        delay_s: float,
        delay_s_per_mib: float = 0.0,
        when: Callable[[int], bool] = always,
    ) -> None:
        super().__init__(inner, when, {"read", "write"})
        self._delay_s = delay_s
        self._delay_s_per_mib = delay_s_per_mib

    async def _delay(self, method: str, buffers: Sequence[Buffer]) -> None:
        if self.count_call(method):
            self.met += 1
            mib = sum(data.nbytes for data in buffers) / (1 << 20)
            await asyncio.sleep(self._delay_s + mib * self._delay_s_per_mib)

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        await self._delay("write", buffers)
        return await super().write(keys, buffers)

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        await self._delay("read", into)
        return await super().read(keys, into)


class FullTier(FaultTier):
    """Simulates a full disk: every record of an affected write is ``FULL``."""

    def __init__(self, inner: Tier, when: Callable[[int], bool] = always) -> None:
        super().__init__(inner, when, {"write"})

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        if self.count_call("write"):
            self.met += len(keys)
            return [WriteOutcome.FULL] * len(keys)
        return await super().write(keys, buffers)


class Damage(enum.Enum):
    """Kinds of damage to the bytes of records that are read."""

    FLIP = "one bit flipped"
    TRUNCATE = "second half zero"
    SWAP = "exchanged with the next record of the call"


class DamagingTier(FaultTier):
    """Damages every record that an affected ``read`` has found. ``met`` counts records."""

    def __init__(
        self,
        inner: Tier,
        damage: Damage,
        when: Callable[[int], bool] = always,
        *,
        detected: bool = True,
    ) -> None:
        super().__init__(inner, when, {"read"})
        self._damage = damage
        self._detected = detected

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        outcomes = await super().read(keys, into)
        found = [n for n, outcome in enumerate(outcomes) if outcome is ReadOutcome.OK]
        if not found or not self.count_call("read"):
            return outcomes
        for position in self._apply([into[n] for n in found]):
            self.met += 1
            if self._detected:
                outcomes[found[position]] = ReadOutcome.CORRUPT
        return outcomes

    def _apply(self, records: list[Buffer]) -> list[int]:
        """Damage the records and return the positions of the damaged ones."""
        if self._damage is Damage.SWAP:
            return self._swap(records)
        for data in records:
            if self._damage is Damage.FLIP:
                data[data.nbytes // 3] ^= 1 << self.met % 8
            else:
                data[data.nbytes // 2 :] = 0
        return list(range(len(records)))

    @staticmethod
    def _swap(records: list[Buffer]) -> list[int]:
        swapped = []
        for first in range(0, len(records) - 1, 2):
            one, two = records[first], records[first + 1]
            if one.nbytes == two.nbytes:
                kept = one.copy()
                np.copyto(one, two)
                np.copyto(two, kept)
                swapped += [first, first + 1]
        return swapped
