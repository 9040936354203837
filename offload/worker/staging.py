"""Slots through which chunks pass on their way from a lower tier to the GPU.

Each lower tier has a window of its own, because a tier that hangs keeps what it was given; and a
part of the window is for probes, because they find out whether a tier that hung works again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

PROBE_SHARE = 4
"""A window of at least so many slots gives one in so many to probes."""


class Window:
    """Some slots, granted to one asker at a time so that two cannot deadlock; ``size`` is the most
    that one may ask for."""

    def __init__(self, slots: Sequence[int]) -> None:
        self.size = len(slots)
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self._turn = asyncio.Lock()
        self.give(slots)

    @property
    def free(self) -> int:
        """Slots that nobody has."""
        return self._free.qsize()

    async def take(self, count: int) -> list[int]:
        """``count`` slots, when there are so many."""
        async with self._turn:
            return [await self._free.get() for _ in range(count)]

    def give(self, slots: Iterable[int]) -> None:
        """Put slots back."""
        for slot in slots:
            self._free.put_nowait(slot)


class Staging:
    """The windows of all lower tiers over ``slots``. With fewer slots than tiers they share one."""

    def __init__(self, slots: Sequence[int], tiers: int) -> None:
        shares = [slots[tier::tiers] for tier in range(tiers)]
        if not all(shares):
            shared = Window(slots)
            self._loads = self._probes = [shared] * tiers
            return
        cuts = [len(share) // PROBE_SHARE for share in shares]
        self._loads = [Window(share[cut:]) for share, cut in zip(shares, cuts, strict=True)]
        self._probes = [
            Window(share[:cut]) if cut else loads
            for share, cut, loads in zip(shares, cuts, self._loads, strict=True)
        ]

    @property
    def free(self) -> int:
        """Slots that nobody has, in all windows."""
        return sum(window.free for window in {*self._loads, *self._probes})

    def window(self, tier: int, *, probe: bool) -> Window:
        """Where a load from this tier finds its slots."""
        return (self._probes if probe else self._loads)[tier]
