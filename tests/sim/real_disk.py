"""Runs real disk tiers in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.sim.life import ServerLife
from tests.sim.server import Medium, Setup
from tests.sim.virtual_time import VirtualLoop
from tiers.adapters.wrapper import TierWrapper
from tiers.base import ReadOutcome, WriteOutcome
from tiers.lmdb.tier import LmdbTier


class OnThreads(TierWrapper):
    """Stops virtual time while the disk's threads work."""

    def _outside(self) -> Any:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return loop.outside()

    async def open(self) -> Any:
        with self._outside():
            return await self.inner.open()

    async def write(self, names: Any, buffers: Any) -> list[WriteOutcome]:
        with self._outside():
            return await self.inner.write(names, buffers)

    async def read(self, names: Any, into: Any) -> list[ReadOutcome]:
        with self._outside():
            return await self.inner.read(names, into)

    async def delete(self, names: Any) -> None:
        with self._outside():
            await self.inner.delete(names)

    async def present(self, names: Any) -> list[bool]:
        with self._outside():
            return await self.inner.present(names)

    async def touch(self, names: Any) -> None:
        with self._outside():
            await self.inner.touch(names)

    async def reset(self, epoch: int) -> None:
        with self._outside():
            await self.inner.reset(epoch)

    async def keys(self) -> AsyncIterator[Any]:
        with self._outside():
            async for batch in self.inner.keys():
                yield batch

    async def aclose(self) -> None:
        with self._outside():
            await self.inner.aclose()


class LmdbMedium(OnThreads, Medium):
    """A folder with a real LMDB tier; it can be closed and opened again."""

    def __init__(self, disk: LmdbTier) -> None:
        super().__init__(disk)
        self._disk = disk

    async def open(self) -> Any:
        with self._outside():
            # a server that was given no time to end has left the tier open
            await self._disk.aclose()
        return await super().open()

    @property
    def epoch(self) -> int:
        return self._disk.epoch


class ServerLifeOnDisk(ServerLife):
    """A world whose lower tiers are LMDB tiers in a folder."""

    def __init__(self, seed: int, folder: Path, setup: Setup | None = None) -> None:
        super().__init__(seed, setup)
        self._folder = folder

    def _make_medium(self, rank: int, tier: int) -> Medium:
        folder = self._folder / f"rank{rank}-tier{tier}"
        return LmdbMedium(LmdbTier(folder, 64 << 20, reserve_bytes=0, rank=rank))
