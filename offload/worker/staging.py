"""Slots through which chunks pass on their way from a lower tier to the GPU.

Each lower tier has a separate window, because a tier that hangs keeps its slots. Part of a window
is reserved for probes, which test whether a tier that hung works again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

PROBE_SHARE = 1 / 4
"""Share of its slots that a window reserves for probes, if that is at least one slot."""


class Window:
    """Slots that are granted to one caller at a time, so two callers cannot deadlock. ``size`` is
    the maximum number per call."""

    def __init__(self, slots: Sequence[int]) -> None:
        self.size = len(slots)
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self._turn = asyncio.Lock()
        self.give(slots)

    @property
    def free(self) -> int:
        """Number of free slots."""
        return self._free.qsize()

    async def take(self, count: int) -> list[int]:
        """Take ``count`` slots; wait until that many are free."""
        async with self._turn:
            return [await self._free.get() for _ in range(count)]

    def give(self, slots: Iterable[int]) -> None:
        """Return slots."""
        for slot in slots:
            self._free.put_nowait(slot)


class Staging:
    """The windows of all lower tiers, which divide ``slots``. With fewer slots than tiers they
    share one."""

    def __init__(self, slots: Sequence[int], tiers: int) -> None:
        shares = [slots[tier::tiers] for tier in range(tiers)]
        if not all(shares):
            shared = Window(slots)
            self._loads = self._probes = [shared] * tiers
            return
        cuts = [int(len(share) * PROBE_SHARE) for share in shares]
        self._loads = [Window(share[cut:]) for share, cut in zip(shares, cuts, strict=True)]
        self._probes = [
            Window(share[:cut]) if cut else loads
            for share, cut, loads in zip(shares, cuts, self._loads, strict=True)
        ]

    @property
    def free(self) -> int:
        """Number of free slots in all windows."""
        return sum(window.free for window in {*self._loads, *self._probes})

    def window(self, tier: int, *, probe: bool) -> Window:
        """The window from which a load from this tier takes its slots."""
        return (self._probes if probe else self._loads)[tier]
