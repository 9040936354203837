"""The simulated engine: correct programs give correct bytes under every seed, and each missing wait
gives wrong bytes under some seed.

Every faulty program below is a correct one without a single wait; the planted fault must show as
wrong bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import numpy as np
import pytest

from tests.tiers.copy.known_caches import Cache, batch, contiguous_blocks, separate_layers
from tiers.copy.base import CopyBatch, Ticket, TransferError
from tiers.slab.slab import HostSlab
from tiers.testing.simulated_copy import SimulatedCopyEngine

SEEDS = range(40)
SLOTS = 4
BLOCKS = 12
POISON = 0xDB
"""The value with which the next owner fills memory at once."""


@pytest.fixture
def cache() -> Cache:
    return separate_layers([4096, 8192, 4096], BLOCKS, chunk_blocks=2)


@pytest.fixture
def slab(cache: Cache) -> Iterator[HostSlab]:
    one = HostSlab(cache.regions.chunk_bytes, SLOTS)
    yield one
    one.close()


class CacheAndSlab:
    """A cache, a slab and an engine, used as a model would use them."""

    def __init__(self, cache: Cache, slab: HostSlab, seed: int) -> None:
        self.cache = cache
        self.slab = slab
        self.engine = SimulatedCopyEngine(
            [cache.regions], slab, num_blocks=BLOCKS, seed=seed, automatic=True
        )
        cache.storage[:] = 0
        for slot in range(SLOTS):
            slab.slot(slot)[:] = 0

    def forward(self, blocks: list[int], value: int) -> None:
        """A forward pass that fills these blocks with ``value``, late."""
        for block in blocks:
            for region in self.cache.regions.regions:
                page = self.cache.page(region, block)
                self.engine.compute.launch(lambda page=page: page.fill(value))

    def attend(self, blocks: list[int]) -> list[int]:
        """A forward pass that reads these blocks, late; the values appear in the list."""
        seen: list[int] = []

        def kernel() -> None:
            for block in blocks:
                seen.extend(np.unique(self.cache.block(block)).tolist())

        self.engine.compute.launch(kernel)
        return seen

    def slot_values(self, slot: int) -> list[int]:
        return np.unique(self.slab.slot_view(slot, self.cache.regions.chunk_bytes)).tolist()

    def values(self, blocks: list[int]) -> list[int]:
        return np.unique(self.cache.chunk(blocks)).tolist()


Program = Callable[[CacheAndSlab, bool], Awaitable[bool]]
"""A small program: a world, and whether to omit the wait in question. Returns True if all bytes
were right."""


async def store_after_compute(world: CacheAndSlab, faulty: bool) -> bool:
    """A store must wait for the forward pass that wrote its blocks."""
    world.forward([3, 4], 7)
    after = None if faulty else world.engine.record_event()
    await world.engine.submit_store([batch([1], [[3, 4]])], after).completed()
    return world.slot_values(1) == [7]


async def load_after_compute(world: CacheAndSlab, faulty: bool) -> bool:
    """A load must wait for the forward pass that still reads the blocks it will overwrite."""
    world.forward([3, 4], 7)
    seen = world.attend([3, 4])
    after = None if faulty else world.engine.record_event()
    await world.engine.submit_load([batch([1], [[3, 4]])], after).completed()
    world.engine.run_all()
    return seen == [7, 7]


async def free_slot_after_load(world: CacheAndSlab, faulty: bool) -> bool:
    """A slot may be reused only when the load that reads it has ended."""
    world.slab.slot(1)[:] = 7
    ticket = world.engine.submit_load([batch([1], [[3, 4]])])
    if not faulty:
        await ticket.completed()
    world.slab.slot(1)[:] = POISON
    await ticket.completed()
    return world.values([3, 4]) == [7]


async def free_slot_after_store(world: CacheAndSlab, faulty: bool) -> bool:
    """An aborted store still writes: its slot may be reused only when the store has ended."""
    world.cache.storage[:] = 7
    ticket = world.engine.submit_store([batch([1], [[3, 4]])])
    if not faulty:
        await ticket.completed()
    world.slab.slot(1)[:] = 9  # the next owner, for example a read from disk
    await ticket.completed()
    return world.slot_values(1) == [9]


async def free_blocks_after_store(world: CacheAndSlab, faulty: bool) -> bool:
    """Blocks may be reused only when the store that reads them has ended."""
    world.cache.storage[:] = 7
    ticket = world.engine.submit_store([batch([1], [[3, 4]])])
    if not faulty:
        await ticket.completed()
    for region in world.cache.regions.regions:
        for block in (3, 4):
            world.cache.page(region, block).fill(POISON)
    await ticket.completed()
    return world.slot_values(1) == [7]


async def use_blocks_after_load(world: CacheAndSlab, faulty: bool) -> bool:
    """Loaded blocks may be read only when the load's ticket is done."""
    world.slab.slot(1)[:] = 7
    ticket = world.engine.submit_load([batch([1], [[3, 4]])], world.engine.record_event())
    if not faulty:
        await ticket.completed()
    seen = world.attend([3, 4])
    await ticket.completed()
    world.engine.run_all()
    return seen == [7, 7]


async def load_after_store(world: CacheAndSlab, faulty: bool) -> bool:
    """The lanes are independent: a slot can be loaded only when its store has ended."""
    world.cache.storage[:] = 7
    stored = world.engine.submit_store([batch([1], [[3, 4]])])
    if not faulty:
        await stored.completed()
    await world.engine.submit_load([batch([1], [[8, 9]])]).completed()
    await stored.completed()
    return world.values([8, 9]) == [7]


async def one_job_per_slot(world: CacheAndSlab, faulty: bool) -> bool:
    """A slot may be given to the next job only when the last one has ended: here a load still reads
    it."""
    world.slab.slot(1)[:] = 7
    first = world.engine.submit_load([batch([1], [[3, 4]])])
    if not faulty:
        await first.completed()
    second = world.engine.submit_store([batch([1], [[5, 6]])])
    await asyncio.gather(first.completed(), second.completed())
    return world.values([3, 4]) == [7]


async def two_stores_on_a_slot(world: CacheAndSlab, faulty: bool) -> bool:
    """The same lane keeps two stores in order, but when the owner of the first one reads the slot,
    the slot may already contain the bytes of the second."""
    world.cache.storage[:] = 7
    first = world.engine.submit_store([batch([1], [[3, 4]])])
    if faulty:
        world.cache.page(world.cache.regions.regions[0], 5)[:] = 8
        second = world.engine.submit_store([batch([1], [[5, 6]])])
    await first.completed()
    right = world.slot_values(1) == [7]
    if not faulty:
        second = world.engine.submit_store([batch([1], [[5, 6]])])
    await second.completed()
    return right


PROGRAMS: list[Program] = [
    store_after_compute,
    load_after_compute,
    free_slot_after_load,
    free_slot_after_store,
    free_blocks_after_store,
    use_blocks_after_load,
    load_after_store,
    one_job_per_slot,
    two_stores_on_a_slot,
]
BY_NAME = [pytest.param(program, id=program.__name__) for program in PROGRAMS]


async def outcomes(program: Program, cache: Cache, slab: HostSlab, faulty: bool) -> list[int]:
    """The seeds under which the program gave wrong bytes."""
    wrong = []
    for seed in SEEDS:
        world = CacheAndSlab(cache, slab, seed)
        if not await program(world, faulty):
            wrong.append(seed)
        world.engine.close()
        if not faulty:
            assert world.engine.hazards == [], f"seed {seed}"
    return wrong


@pytest.mark.parametrize("program", BY_NAME)
async def test_a_program_that_waits_is_right_under_every_seed(
    program: Program, cache: Cache, slab: HostSlab
) -> None:
    assert await outcomes(program, cache, slab, faulty=False) == []


@pytest.mark.parametrize("program", BY_NAME)
async def test_a_program_that_does_not_wait_is_detected(
    program: Program, cache: Cache, slab: HostSlab
) -> None:
    assert len(await outcomes(program, cache, slab, faulty=True)) >= len(SEEDS) // 8


class EarlyEngine(SimulatedCopyEngine):
    """An engine with the fault that its loads are reported before their event."""

    def submit_load(self, batches: list[CopyBatch], after: object | None = None) -> Ticket:  # type: ignore[override]  # narrower on purpose, for the test
        super().submit_load(batches, after)
        return super().submit_store([])  # the other lane's ticket: finished too early


@pytest.mark.parametrize("engine", [SimulatedCopyEngine, EarlyEngine])
async def test_an_engine_that_reports_loads_early_is_detected(
    engine: type[SimulatedCopyEngine], cache: Cache, slab: HostSlab
) -> None:
    """With the engine as it is, nothing is found, so the finding is the early report."""
    found = []
    for seed in SEEDS:
        world = CacheAndSlab(cache, slab, seed)
        world.engine = engine([cache.regions], slab, num_blocks=BLOCKS, seed=seed)
        world.slab.slot(1)[:] = 7
        await world.engine.submit_load(
            [batch([1], [[3, 4]])], world.engine.record_event()
        ).completed()
        seen = world.attend([3, 4])
        world.engine.close()
        found.append(set(seen))
    wrong = [seen for seen in found if seen != {7}]
    assert all(seen <= {0, 7} for seen in wrong), "the bytes from before the load, and no others"
    assert bool(wrong) == (engine is EarlyEngine)


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (one_job_per_slot, "load job 1 and store job 2 share slots [1]"),
        (two_stores_on_a_slot, "store job 1 and store job 2 share slots [1]"),
        (load_after_store, "store job 1 and load job 2 share slots [1]"),
    ],
)
async def test_jobs_that_share_a_slot_are_named_under_every_seed(
    program: Program, text: str, cache: Cache, slab: HostSlab
) -> None:
    for seed in SEEDS:
        world = CacheAndSlab(cache, slab, seed)
        await program(world, True)
        world.engine.close()
        assert world.engine.hazards == [text], f"seed {seed}"


async def test_jobs_that_share_a_block_are_named(cache: Cache, slab: HostSlab) -> None:
    world = CacheAndSlab(cache, slab, seed=0)
    engine = world.engine
    engine.submit_store([batch([0], [[3, 4]])])
    engine.submit_store([batch([1], [[4, 5]])])  # two readers are allowed
    assert engine.hazards == []
    engine.submit_load([batch([2], [[5, 6]])])
    assert engine.hazards == ["store job 2 and load job 3 share blocks [(0, 5)]"]
    engine.close()


async def test_compute_that_waits_twice_for_a_store_waits_from_the_first_time_on(
    cache: Cache, slab: HostSlab
) -> None:
    """A fence may name the same store again in the next step: a load between the two is behind the
    first one."""
    engine = CacheAndSlab(cache, slab, seed=0).engine
    store = engine.submit_store([batch([0], [[3, 4]])])
    assert store.submitted is not None
    engine.hold_compute(store.submitted.result())
    after = engine.record_event()
    engine.hold_compute(store.submitted.result())
    engine.submit_load([batch([2], [[3, 4]])], after)
    assert engine.hazards == []
    engine.close()


async def test_the_same_seed_gives_the_same_run(cache: Cache, slab: HostSlab) -> None:
    def trace(seed: int) -> list[tuple[bool, bool, bool]]:
        engine = SimulatedCopyEngine(
            [cache.regions], slab, num_blocks=BLOCKS, seed=seed, automatic=False
        )
        tickets = [
            engine.submit_store([batch([0, 1], [[0, 1], [2, 3]])]),
            engine.submit_load([batch([2], [[4, 5]])]),
            engine.submit_store([batch([3], [[0, 1]])]),
        ]
        seen = []
        while engine.advance():
            seen.append(tuple(ticket.done() for ticket in tickets))
        assert engine.idle
        return seen

    runs = {seed: trace(seed) for seed in range(10)}
    assert all(trace(seed) == run for seed, run in runs.items())
    assert len({str(run) for run in runs.values()}) > 1, "the seed must matter"
    assert all(not done[2] or done[0] for run in runs.values() for done in run), "lane order"


@pytest.mark.parametrize("seed", range(5))
async def test_many_jobs_move_the_right_bytes(seed: int) -> None:
    """Without any fault, it is an ordinary copy engine."""
    cache = contiguous_blocks([300, 5000], BLOCKS, chunk_blocks=3)
    slab = HostSlab(cache.regions.chunk_bytes, SLOTS)
    engine = SimulatedCopyEngine([cache.regions], slab, num_blocks=BLOCKS, seed=seed)
    rows = np.random.default_rng(seed).permutation(BLOCKS).reshape(SLOTS, 3).tolist()
    before = cache.storage.copy()
    try:
        stores = [engine.submit_store([batch([i], [rows[i]])]) for i in range(SLOTS)]
        await asyncio.gather(*(ticket.completed() for ticket in stores))
        cache.storage[:] = POISON
        loads = [engine.submit_load([batch([i], [rows[i]])]) for i in range(SLOTS)]
        await asyncio.gather(*(ticket.completed() for ticket in loads))
        assert (cache.storage == before).all()
        assert engine.hazards == []
        with pytest.raises(TransferError, match="block 12"):
            await engine.submit_load([batch([0], [[10, 11, 12]])]).completed()
    finally:
        engine.close()
        slab.close()
    with pytest.raises(TransferError, match="closed"):
        await engine.submit_store([]).completed()
