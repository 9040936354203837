"""The in-process API under random calls, cancellations (also several of one call), slow, failing
and hanging tiers, resets and an end at any moment. In every case:

* a restored chunk is right, byte for byte;
* when a call has ended, in whatever way, its blocks belong to its caller: they get a new owner at
  once, nothing is written to them any more, and the new owner's bytes are never taken for the
  chunk;
* every call ends, and so does closing.

    python -m pytest tests/offload/manager/test_random.py
    KVTIERS_MANAGER_SEEDS=5000 python -m pytest tests/offload/manager/test_random.py
    KVTIERS_MANAGER_SEED=123 python -m pytest tests/offload/manager/test_random.py -k replay
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

import offload.worker.rank_memory
from offload.errors import ManagerClosedError, TierUnavailableError
from offload.manager import OffloadManager
from tests.offload.small_model import (
    BLOCKS,
    compute,
    keys,
    kv_caches,
    open_manager,
    wrong_blocks,
)
from tests.sim.virtual_time import run_virtually
from tiers.adapters.wrapper import TierWrapper
from tiers.base import Tier, TierError
from tiers.copy.base import CopyEngine
from tiers.testing.memory_tier import MemoryTier, SharedMemory, SharedMemoryTier
from tiers.testing.simulated_copy import SimulatedCopyEngine

SEEDS = int(os.environ.get("KVTIERS_MANAGER_SEEDS", "60"))
SEED = os.environ.get("KVTIERS_MANAGER_SEED")
PARTS = 6
CALLS = 40
CALLERS = 3
BLOCKS_EACH = BLOCKS // CALLERS
PROMPTS = 4
CHUNKS = 6
"""Number of chunks of each prompt. Together they exceed the CPU tier."""
LIMIT_S = 100.0
"""Virtual seconds, longer than any wait of a call."""


class Moody(TierWrapper):
    """A tier that takes its time, fails, and from time to time hangs for a minute."""

    def __init__(self, inner: Tier, rng: random.Random) -> None:
        super().__init__(inner)
        self._rng = rng
        self.is_tame = True  # for as long as it is open

    async def before(self, method: str, keys: Any) -> None:
        mood = self._rng.random()
        if self.is_tame or mood < 0.3:
            return
        if mood < 0.35:
            raise TierError("planted")
        if mood < 0.4:
            raise KeyError("planted, of a kind that no tier should raise")
        await asyncio.sleep(60.0 if mood > 0.97 else self._rng.random() * 0.05)


class Caller:
    """Makes one call after another, each with separate blocks."""

    def __init__(self, life: Life, number: int) -> None:
        self.life = life
        self.blocks = range(number * BLOCKS_EACH, (number + 1) * BLOCKS_EACH)
        self.mark = 1 + number
        self.number = number

    async def live(self) -> None:
        rng = self.life.rng
        for _ in range(CALLS):
            self.look()
            if self.life.is_closed:
                return
            what = rng.random()
            if what < 0.02:
                await self.reset()
            elif what < 0.5:
                await self.offload()
            else:
                await self.restore()
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random())

    def own(self) -> None:
        """Give the blocks a new owner."""
        self.mark = self.mark % 200 + CALLERS
        for cache in self.life.memory.values():
            cache[self.blocks.start : self.blocks.stop] = self.mark

    def look(self) -> None:
        """Assert that no other call has written to the blocks."""
        for layer, cache in self.life.memory.items():
            mine = cache[self.blocks.start : self.blocks.stop]
            assert (mine == self.mark).all(), f"{layer}: another call has written into these blocks"

    def chunks(self) -> tuple[list[bytes], list[int], int]:
        """The beginning of a prompt, blocks for it, and its group."""
        rng = self.life.rng
        first, count = rng.randrange(PROMPTS) * CHUNKS, rng.randint(1, CHUNKS)
        group = int(rng.random() < 0.2)
        return keys(count, first), rng.sample(self.blocks, count), group

    async def offload(self) -> None:
        names, blocks, group = self.chunks()
        compute(self.life.caches, names, blocks, group)
        await self.call("offload", self.life.manager.offload(names, blocks, group))
        self.own()

    async def restore(self) -> None:
        names, blocks, group = self.chunks()
        got = await self.call("restore", self.life.manager.restore(names, blocks, group))
        if got:
            wrong = wrong_blocks(self.life.caches, names[:got], blocks[:got], group)
            assert wrong == [], "restored with wrong bytes"
            self.life.seen["chunks"] += got
        self.own()

    async def reset(self) -> None:
        await self.call("reset", self.life.manager.reset(LIMIT_S / 2))

    async def call(self, what: str, work: Coroutine[Any, Any, Any]) -> int | None:
        """The result; ``None`` if the call was cancelled or failed."""
        rng, seen = self.life.rng, self.life.seen
        calling = asyncio.ensure_future(work)
        if rng.random() < 0.4:
            for _ in range(rng.randint(1, 3)):
                await self.pause()
                calling.cancel()
                seen["cancels"] += 1
        done, _ = await asyncio.wait([calling], timeout=LIMIT_S)
        assert done, f"{what} waits forever"
        seen[what] += 1
        try:
            return await calling
        except asyncio.CancelledError:
            seen[f"{what} cancelled"] += 1
        except (ManagerClosedError, TierUnavailableError):
            seen["refused"] += 1
        return None

    async def pause(self) -> None:
        for _ in range(self.life.rng.randint(0, 12)):
            await asyncio.sleep(0)
        if self.life.rng.random() < 0.2:
            await asyncio.sleep(self.life.rng.random() * 0.1)


class Life:
    """One manager, its callers and its end."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.caches = kv_caches()
        self.memory = {layer: cache.numpy() for layer, cache in self.caches.items()}
        self.is_closed = False
        self.manager: OffloadManager

    def tiers(self) -> list[Moody]:
        kinds: list[Callable[[], Tier]] = [
            lambda: MemoryTier(1 << 20),
            lambda: SharedMemoryTier(SharedMemory(1 << 20)),
        ]
        return [Moody(self.rng.choice(kinds)(), self.rng) for _ in range(self.rng.randint(0, 2))]

    async def live(self) -> None:
        tiers = self.tiers()
        self.manager = await open_manager(self.caches, tiers, slots=8, load_timeout_s=5.0)
        for tier in tiers:
            tier.is_tame = False
        callers = [Caller(self, number) for number in range(CALLERS)]
        for caller in callers:
            caller.own()
        living = [asyncio.ensure_future(caller.live()) for caller in callers]
        if self.rng.random() < 0.5:  # at a random moment
            await asyncio.wait(living, timeout=self.rng.random() * 10.0)
        else:
            await asyncio.gather(*living)
        await self.close()
        await asyncio.gather(*living)
        for caller in callers:
            caller.look()

    async def close(self) -> None:
        self.is_closed = True
        closing = asyncio.ensure_future(self.manager.aclose())
        await asyncio.sleep(0)
        if self.rng.random() < 0.5:
            for _ in range(self.rng.randint(1, 3)):
                for _ in range(self.rng.randint(0, 5)):
                    await asyncio.sleep(0)
                closing.cancel()
        done, _ = await asyncio.wait([closing], timeout=LIMIT_S)
        assert done, "closing waits forever"
        self.seen["closing cancelled"] += closing.cancelled()
        with pytest.raises(ManagerClosedError):
            self.manager.lookup([])


@pytest.fixture(autouse=True)
def _late_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies run late and out of order, under a separate seed per manager."""
    made = 0

    def make(registration: Any, slab: Any, _device: torch.device) -> CopyEngine:
        nonlocal made
        made += 1
        blocks = registration.num_blocks
        return SimulatedCopyEngine(registration.groups, slab, num_blocks=blocks, seed=made)

    monkeypatch.setattr(offload.worker.rank_memory, "make_engine", make)


def live_through(seed: int) -> Counter[str]:
    life = Life(seed)
    try:
        run_virtually(life.live())
    except BaseException as error:  # adds the seed to whatever it was
        error.add_note(f"KVTIERS_MANAGER_SEED={seed} python -m pytest {__file__} -k replay")
        raise
    return life.seen


@pytest.mark.parametrize("part", range(PARTS))
def test_random_runs_keep_the_guarantees(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part, SEEDS, PARTS):
        seen += live_through(seed)
    for what in ("chunks", "offload cancelled", "restore cancelled", "closing cancelled"):
        assert seen[what] > 0, f"no run has covered {what}"
    print(dict(seen))


@pytest.mark.skipif(SEED is None, reason="KVTIERS_MANAGER_SEED: a life to see again")
def test_replay() -> None:
    print(live_through(int(SEED or 0)))
