"""A real LMDB tier whose writes are slowed does not keep chunks out of the CPU tier, and one that
keeps up receives everything.

Planner, executor and tier are those of an ``OffloadManager``; stores are planned with the
connector's calls, which wait for the disk and give up writes as decision 0090 says. Time is virtual
except for real work of the disk's threads (``tests.sim.virtual_time``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from offload.index.chunk_batch import ChunkBatch
from offload.manager import OffloadManager
from offload.manager.arguments import checked_batch
from offload.planner.own_chunks import OwnChunks
from tests.offload.small_model import (
    BLOCKS,
    compute,
    keys,
    kv_caches,
    open_manager,
    simulated_engines,
    wrong_blocks,
)
from tests.sim.real_disk import OnThreads
from tests.sim.virtual_time import run_virtually
from tiers.adapters.wrapper import TierWrapper
from tiers.base import Key, Tier
from tiers.lmdb.tier import LmdbTier

SLOTS = 46
"""Of which two are for staging."""
TURNS = 16
PIECE = 4
PIECE_S = 0.1
STORES_PER_S = PIECE / PIECE_S


class SlowedWrites(TierWrapper):
    """Writes this many chunks per second, one call after the other."""

    def __init__(self, inner: Tier, chunks_per_s: float) -> None:
        super().__init__(inner)
        self._chunks_per_s = chunks_per_s
        self._turn = asyncio.Lock()

    async def before(self, method: str, keys: Sequence[Key]) -> None:
        if method == "write":
            async with self._turn:
                await asyncio.sleep(len(keys) / self._chunks_per_s)


class Server:
    """Answers prompts over a CPU tier and, if ``rate`` is not 0, a disk that writes this share of
    what is computed."""

    def __init__(self, folder: Path, rate: float) -> None:
        disk = OnThreads(LmdbTier(folder / "tier", 64 << 20, reserve_bytes=0))
        self.tiers = [SlowedWrites(disk, rate * STORES_PER_S)] if rate else []
        self.caches = kv_caches()
        self.manager: OffloadManager
        self.hits = 0

    async def __aenter__(self) -> Server:
        self.manager = await open_manager(
            self.caches, self.tiers, SLOTS, tier_timeout_s=600, break_even=False
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.manager.aclose(600)

    async def answer(self, names: Sequence[bytes]) -> None:
        """Load the head of a prompt that the CPU tier holds, compute the rest piece by piece, and
        store it with the calls of the connector; none of it may be refused."""
        planner = self.manager.planner
        run = checked_batch(names, range(len(names)), 0, {0: 1}, BLOCKS)
        hit = [*(key in planner.cpu for key in run.keys), False].index(False)
        if hit:
            assert await self.manager.restore(names[:hit], range(hit)) == hit
            assert wrong_blocks(self.caches, names[:hit], range(hit)) == []
        self.hits += hit
        own, stored = planner.stores.own_chunks(), hit
        for first in range(hit, len(names), PIECE):
            end = min(first + PIECE, len(names))
            compute(self.caches, names[first:end], run.blocks[first:end])
            await asyncio.sleep(PIECE_S)
            stored += self._store(run.part(stored, end), own)
        stored += self._store(run.part(stored, len(run)), own, ended=True)
        assert stored == len(names)
        planner.uses.ended(run.keys)
        await asyncio.sleep(PIECE_S)  # copies take no time
        assert not planner.stores.storing

    def _store(self, run: ChunkBatch, own: OwnChunks, *, ended: bool = False) -> int:
        stores = self.manager.planner.stores
        settled = stores.plan(run, own, ended=ended, may_wait=stores.may_wait(len(run)))
        self.manager._pump()
        return settled


async def hits_of(folder: Path, rate: float) -> tuple[int, float]:
    """Repeat two prompts, with a new one after each. Returns the chunks that were hit in the CPU
    tier, and the writes that were given up."""
    async with Server(folder, rate) as server:
        for turn in range(TURNS):
            await server.answer(keys(8, 8 * (turn % 2)))
            await server.answer(keys(8, 100 + 8 * turn))
        totals = server.manager.planner.totals()
        given_up = sum(n for name, n in totals.items() if name.startswith("writes_given_up:"))
        server.manager.planner.check()
        return server.hits, given_up


def test_a_disk_of_a_tenth_of_the_store_rate_costs_the_cpu_tier_no_hits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated_engines(monkeypatch, automatic=True)
    alone, _ = run_virtually(hits_of(tmp_path / "none", 0.0))
    slow, given_up = run_virtually(hits_of(tmp_path / "slow", 0.1))
    assert alone == (TURNS - 2) * 8
    assert given_up > 0, "the disk must be too slow for what is stored"
    assert slow >= 0.99 * alone


async def one_pass(folder: Path, rate: float) -> None:
    names = keys(60)  # the CPU tier holds 44
    async with Server(folder, rate) as server:
        await server.answer(names)
        await server.manager.flush(600)
        assert server.manager.lookup(names) == len(names)
        assert len(server.manager.planner.lower[0]) == len(names)
        for first in range(0, len(names), 16):
            part = names[first : first + 16]
            assert await server.manager.restore(part, range(len(part))) == len(part)
            assert wrong_blocks(server.caches, part, range(len(part))) == []


def test_a_disk_that_keeps_up_holds_a_prompt_longer_than_the_cpu_tier_after_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated_engines(monkeypatch, automatic=True)
    run_virtually(one_pass(tmp_path, 1.25))
