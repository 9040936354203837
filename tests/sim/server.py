"""The server of a simulated world: a real planner and its ranks, which may be killed and
restarted."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from offload.index.capacity import ByteCapacity, SlotCapacity
from offload.index.tier_index import TierIndex
from offload.layout.keys import group_of
from offload.planner.planner import Planner, PlannerSettings
from offload.planner.tier_health import HealthLimits, TierHealths
from offload.planner.work_limits import WorkLimits
from offload.planner.write_through import WRITES_FLYING_MAX, QueueSettings
from policies.base import EntryInfo
from policies.eviction.lru import LruPolicy
from tests.sim.content import (
    SLOT_BYTES,
    group_infos,
)
from tests.sim.rank import LIMITS, STAGING, Rank
from tests.sim.weather import Sky, Weather
from tiers.base import Tier
from tiers.testing.memory_tier import MemoryTier

FAILURES = 3


LOOKUP_MAX, LOOKUP_MIN = 4, 2
"""Number of chunks that the lookups of a step may query together, and that each may always
query."""


@dataclass(frozen=True)
class Setup:
    """The size of a world and the rates of its faults. ``pause_s`` is the longest of the usual
    pauses between two steps."""

    ranks: int = 2
    slots: int = 12
    disk_chunks: int = 48
    tiers: int = 1
    blocks: int = 90
    trouble: float = 0.02
    copy_failures: float = 0.0
    patience: float = 0.9
    lying: bool = False
    step_chunks: int = 4
    pause_s: float = 0.02
    look_ahead: float = 0.0
    wait_for_reads: str = "never"

    @classmethod
    def drawn(cls, rng: random.Random) -> Setup:
        """A world of random size."""
        return cls(
            ranks=rng.choice((1, 2, 2, 3)),
            slots=rng.choice((6, 12, 24)),
            disk_chunks=rng.choice((24, 48, 120)),
            tiers=rng.choice((1, 1, 2)),
            blocks=rng.choice((60, 90, 150)),
            trouble=rng.choice((0.0, 0.03, 0.08)),
            copy_failures=rng.choice((0.0, 0.0, 0.02)),
            step_chunks=rng.choice((2, 4, 9, 2048)),
            look_ahead=rng.choice((0.0, 0.25, 0.5)),
            wait_for_reads=rng.choice(("never", "never", "auto", "always")),
        )


class Medium(Tier):
    """The state that survives the process."""

    @property
    def epoch(self) -> int:
        """The epoch of its records."""
        raise NotImplementedError


class KeptMedium(MemoryTier, Medium):
    """A disk in memory."""

    async def aclose(self) -> None:
        self._open = False


class Server:
    """Planner, ranks, and the media that survive them. All randomness comes from ``rng``."""

    def __init__(self, seed: int, setup: Setup | None = None) -> None:
        self.rng = random.Random(seed)
        self.setup = setup or Setup.drawn(self.rng)
        self.events: Counter[str] = Counter()
        self.hits: Counter[int] = Counter()
        self.checked = self.steps = self.turns = self.epoch = self._names = 0
        self.now: Callable[[], float] = lambda: 0.0
        self.weathers: list[list[Weather]] = []
        self.media: list[list[Medium]] = []
        self.ranks: list[Rank] = []
        self.free: list[int] = []
        self.met: Counter[Sky] = Counter()
        self.wrong: list[str] = []
        self._unforgotten = False

    # -- start and end of the server ------------------------------------------------------------

    def _make_medium(self, rank: int, tier: int) -> Medium:
        capacity = self.setup.disk_chunks * (tier + 1) * SLOT_BYTES
        return KeptMedium(capacity, namespace=bytes(16), rank=rank)

    async def _begin(self) -> None:
        self.now = asyncio.get_running_loop().time
        for rank in range(self.setup.ranks):
            self.media.append([self._make_medium(rank, t) for t in range(self.setup.tiers)])
            self.weathers.append([Weather(self.rng) for _ in range(self.setup.tiers)])
        await self._start()

    async def _start(self) -> None:
        """Start the workers, and make a planner from the contents of all their tiers."""
        setup = self.setup
        self.ranks = [
            await Rank.start(
                number,
                self.rng,
                self.media[number],
                self.weathers[number],
                slots=setup.slots,
                blocks=setup.blocks,
                copy_failures=setup.copy_failures,
                lying=setup.lying,
            )
            for number in range(setup.ranks)
        ]
        self.free = list(range(1, setup.blocks))
        self.rng.shuffle(self.free)
        cpu = TierIndex("cpu", SlotCapacity(setup.slots, STAGING), LruPolicy())
        lower = [
            TierIndex(
                f"disk{t}",
                ByteCapacity(setup.disk_chunks * (t + 1) * SLOT_BYTES),
                LruPolicy(),
                low_watermark=0.9,
            )
            for t in range(setup.tiers)
        ]
        limits = HealthLimits(FAILURES, load_timeout_s=LIMITS.load_timeout_s)
        health = TierHealths([index.name for index in lower], limits)
        queues = QueueSettings(flying_max=WRITES_FLYING_MAX, batch=4)
        self.max_store, self.max_load = setup.slots, 2 * setup.slots
        self.planner = Planner(
            group_infos(setup.tiers),
            cpu,
            lower,
            PlannerSettings(
                WorkLimits(
                    store_chunks=self.max_store,
                    load_chunks=self.max_load,
                    load_blocks=setup.blocks // 2,
                    waiting_writes=setup.slots * 3 // 4,
                    step_chunks=setup.step_chunks,
                ),
                ranks=setup.ranks,
                queue_settings=[queues] * setup.tiers,
                look_ahead=setup.look_ahead,
                wait_for_reads=setup.wait_for_reads,
            ),
            health=health,
        )
        lookups = self.planner.budget.lookups
        lookups.chunks, lookups.chunks_min = LOOKUP_MAX, LOOKUP_MIN
        lookups.renew()
        for tier in range(setup.tiers):
            await self._recover(tier)

    async def _recover(self, tier: int) -> None:
        for rank in self.ranks:
            await self._open_under_epoch(rank, tier)
        held = [await keys_of(rank.tiers[tier]) for rank in self.ranks]
        everywhere = set(held[0]).intersection(*held)
        keys = [key for key in held[0] if key in everywhere]
        infos = [EntryInfo(group_of(key), size_bytes=SLOT_BYTES) for key in keys]
        rejected = self.planner.lower[tier].recover(keys, infos)
        known = set().union(*held)
        self.planner.deletes.add(tier, [*sorted(known - set(keys)), *rejected])
        self.events["recovered"] += len(keys) - len(rejected)

    async def _open_under_epoch(self, rank: Rank, tier: int) -> None:
        """A tier that is opened under a later epoch than its own forgets its records."""
        medium = self.media[rank.number][tier]
        if medium.epoch < self.epoch:
            await medium.reset(self.epoch)

    async def _end(self, timeout_s: float) -> None:
        for rank in self.ranks:
            await rank.stop(timeout_s)
            rank.slab.close()
        for weathers in self.weathers:
            for weather in weathers:
                self.met += weather.met
                weather.met.clear()


async def keys_of(tier: Tier) -> list[bytes]:
    found: list[bytes] = []
    async for batch in tier.keys():
        found += batch.keys
    return found
