"""The host copy engine: right bytes for every layout, order, errors, cancellation, closing."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.patience import PATIENCE_S
from tests.tiers.copy.known_caches import (
    Cache,
    batch,
    contiguous_blocks,
    random_bytes,
    separate_layers,
)
from tiers.copy import host_loop as host_copy_loop
from tiers.copy.base import TransferError
from tiers.copy.host_engine import HostCopyEngine
from tiers.copy.host_loop import Addresses, copy_loop, memmove_loop
from tiers.slab.slab import HostSlab

PAGES = {
    "equal": [16384] * 4,
    "mixed": [8192, 32768, 4096],
    "odd": [4099, 300, 12_289],
    "tiny": [64, 1, 7],
}
LOOPS = {"native": copy_loop, "memmove": lambda: memmove_loop}


def caches() -> Iterator[tuple[str, Cache]]:
    for name, pages in PAGES.items():
        for chunk_blocks in (1, 3):
            yield (
                f"{name}-separate-{chunk_blocks}",
                separate_layers(pages, 24, chunk_blocks=chunk_blocks, padding=64),
            )
            yield (
                f"{name}-contiguous-{chunk_blocks}",
                contiguous_blocks(pages, 24, chunk_blocks=chunk_blocks),
            )


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("name", "cache"), [pytest.param(n, c, id=n) for n, c in caches()])
async def test_stored_bytes_are_right_and_come_back(name: str, cache: Cache, loop: str) -> None:
    regions = cache.regions
    slab = HostSlab(regions.chunk_bytes, 8)
    engine = HostCopyEngine([regions], slab, num_blocks=24, loop=LOOPS[loop]())
    rng = np.random.default_rng(1)
    blocks = rng.permutation(24)[: 4 * regions.chunk_blocks].reshape(4, -1)
    blocks[3] = np.arange(regions.chunk_blocks) + 5  # a run of consecutive blocks
    before = cache.storage.copy()
    job = [batch([6, 0, 3, 5], blocks.tolist())]
    try:
        await engine.submit_store(job).completed()
        for slot, row in zip([6, 0, 3, 5], blocks, strict=True):
            np.testing.assert_array_equal(
                slab.slot_view(slot, regions.chunk_bytes), cache.chunk(row.tolist())
            )
        assert (cache.storage == before).all(), "a store must not write to the KV cache"
        cache.storage[:] = 0xEE
        await engine.submit_load(job).completed()
        touched = np.zeros(24, dtype=bool)
        touched[blocks.ravel()] = True
        for block in range(24):
            for region in regions.regions:
                start = region.address - cache.storage.ctypes.data + block * region.block_stride
                page = slice(start, start + region.page_bytes)
                expected = before[page] if touched[block] else np.uint8(0xEE)
                assert (cache.storage[page] == expected).all()
                before[page] = 0xEE
        # The rest of ``before`` is padding, which no copy may touch.
        padding = before != 0xEE
        assert (cache.storage[padding] == 0xEE).all()
    finally:
        engine.close()
        slab.close()


@pytest.fixture
def cache() -> Cache:
    return separate_layers([4096, 8192], 8, chunk_blocks=2)


@pytest.fixture
def slab(cache: Cache) -> Iterator[HostSlab]:
    one = HostSlab(cache.regions.chunk_bytes, 4)
    one.slot(0)[:] = one.slot(1)[:] = one.slot(2)[:] = one.slot(3)[:] = 0xEE
    yield one
    one.close()


@pytest.fixture
def engine(cache: Cache, slab: HostSlab) -> Iterator[HostCopyEngine]:
    one = HostCopyEngine([cache.regions], slab, num_blocks=8)
    yield one
    one.close()


async def test_a_skipped_block_is_neither_read_nor_written(
    cache: Cache, slab: HostSlab, engine: HostCopyEngine
) -> None:
    await engine.submit_store([batch([1], [[-1, 3]])]).completed()
    half = cache.regions.block_bytes
    assert (slab.slot(1)[:half] == 0xEE).all()
    np.testing.assert_array_equal(slab.slot(1)[half : 2 * half], cache.block(3))
    kept = cache.block(0)
    await engine.submit_load([batch([1], [[-1, 5]])]).completed()
    np.testing.assert_array_equal(cache.block(5), cache.block(3))
    np.testing.assert_array_equal(cache.block(0), kept)


async def test_a_batch_out_of_range_fails_its_ticket_and_moves_nothing(
    cache: Cache, slab: HostSlab, engine: HostCopyEngine
) -> None:
    before = cache.storage.copy()
    for job in ([batch([0], [[0, 8]])], [batch([0], [[0, 1]]), batch([4], [[2, 3]])]):
        ticket = engine.submit_store(job)
        with pytest.raises(TransferError, match="requested"):
            await ticket.completed()
        assert ticket.done()
        with pytest.raises(TransferError, match="requested"):
            await engine.submit_load(job).completed()
    assert all((slab.slot(i) == 0xEE).all() for i in range(4))
    assert (cache.storage == before).all()
    await engine.submit_store([batch([0], [[0, 1]])]).completed()  # the lane continues


class HeldLoop:
    """A copy loop whose calls on the store lane each wait for a permit."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)

    def __call__(self, to: Addresses, source: Addresses, sizes: Addresses) -> None:
        if threading.current_thread().name == "kvtiers-store":
            self.permits.acquire()
        copy_loop()(to, source, sizes)


async def test_a_lane_completes_in_order_and_the_lanes_are_independent(
    cache: Cache, slab: HostSlab
) -> None:
    held = HeldLoop()
    engine = HostCopyEngine([cache.regions], slab, num_blocks=8, loop=held)
    try:
        first = engine.submit_store([batch([0], [[0, 1]])])
        second = engine.submit_store([batch([1], [[-1, 2]])])
        empty = engine.submit_store([])
        assert not first.done()
        held.permits.release()
        await first.completed()
        assert not second.done()
        assert not empty.done()
        await engine.submit_load([batch([0], [[4, 5]])]).completed()
        assert not second.done()
        held.permits.release(2)
        await asyncio.gather(second.completed(), empty.completed(), second.completed())
        np.testing.assert_array_equal(cache.block(4), cache.block(0))
    finally:
        held.permits.release(10)
        engine.close()


async def test_cancelling_the_wait_does_not_cancel_the_copy(cache: Cache, slab: HostSlab) -> None:
    held = HeldLoop()
    engine = HostCopyEngine([cache.regions], slab, num_blocks=8, loop=held)
    try:
        ticket = engine.submit_store([batch([0], [[0, 1]])])
        wait = asyncio.ensure_future(ticket.completed())
        await asyncio.sleep(0)
        wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait
        assert not ticket.done()
        held.permits.release()
        await ticket.completed()
        np.testing.assert_array_equal(
            slab.slot_view(0, cache.regions.chunk_bytes), cache.chunk([0, 1])
        )
    finally:
        held.permits.release(10)
        engine.close()


async def test_an_unexpected_error_fails_only_one_ticket(
    cache: Cache, slab: HostSlab, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        calls = 0

        def __call__(self, to: Addresses, source: Addresses, sizes: Addresses) -> None:
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError("boom")

    engine = HostCopyEngine([cache.regions], slab, num_blocks=8, loop=Broken())
    try:
        bad = engine.submit_store([batch([0], [[0, 1]])])
        good = engine.submit_store([batch([0], [[0, 1]])])
        with pytest.raises(TransferError, match="RuntimeError: boom"):
            await bad.completed()
        await good.completed()
        assert "a copy failed unexpectedly" in caplog.text
        assert engine.failures() == {"RuntimeError": 1}
    finally:
        engine.close()


async def test_closing_finishes_what_was_submitted_and_refuses_more(
    cache: Cache, slab: HostSlab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies begin when ``close`` waits for them, however fast the lanes are."""
    waits, join = threading.Event(), threading.Thread.join

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        waits.set()
        join(thread, timeout)

    def late(*copies: Any) -> None:
        assert waits.wait(PATIENCE_S)
        copy_loop()(*copies)

    monkeypatch.setattr(threading.Thread, "join", joined)
    before = set(threading.enumerate())
    engine = HostCopyEngine([cache.regions], slab, num_blocks=8, loop=late)
    tickets = [engine.submit_store([batch([i % 4], [[0, 1]])]) for i in range(50)]
    engine.close()
    engine.close()
    ended = all(ticket.done() for ticket in tickets), set(threading.enumerate()) <= before
    waits.set()
    assert ended == (True, True)
    for late in (engine.submit_store([]), engine.submit_load([])):
        with pytest.raises(TransferError, match="closed"):
            await late.completed()


def test_the_native_loop_compiles_on_this_machine() -> None:
    """If it did not compile, every other test would silently use the slow loop."""
    assert copy_loop() is not memmove_loop


def test_compiling_leaves_no_object_that_breaks_scans_of_modules() -> None:
    """vLLM's CPU worker calls ``vars(x).get`` on every object with ``__dict__`` in every module.
    After an import of llvmlite, one object used to make this call fail."""
    copy_loop()
    assert "llvmlite.binding.ffi" in sys.modules
    for name, module in list(sys.modules.items()):
        if name.startswith("llvmlite"):
            for value in list(vars(module).values()):
                if hasattr(value, "__dict__"):
                    vars(value).get("kernel")


def test_without_a_compiler_the_slow_loop_is_used_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError("no JIT here")

    monkeypatch.setattr(host_copy_loop, "_compiled_loop", fail)
    host_copy_loop.copy_loop.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert host_copy_loop.copy_loop() is memmove_loop
            assert host_copy_loop.copy_loop() is memmove_loop
        assert caplog.text.count("could not be compiled (OSError: no JIT here)") == 1
    finally:
        host_copy_loop.copy_loop.cache_clear()


@pytest.mark.parametrize("loop", LOOPS)
def test_every_length_and_alignment_is_copied_exactly(loop: str) -> None:
    """Lengths around the streaming threshold and step; every byte outside the target must be
    untouched."""
    copy = LOOPS[loop]()
    source = random_bytes(16384, seed=3)
    target = np.empty(16384, dtype=np.uint8)
    shift = -target.ctypes.data % 64
    for size in (0, 1, 63, 255, 256, 4095, 4096, 4097, 4351, 4352, 8192 + 255):
        for to in (0, 1, 32, 64):
            for start in (0, 3, 64):
                target[:] = 0xEE
                at = shift + to
                copy(
                    np.array([target.ctypes.data + at]),
                    np.array([source.ctypes.data + start]),
                    np.array([size]),
                )
                assert (target[at : at + size] == source[start : start + size]).all()
                assert (target[:at] == 0xEE).all()
                assert (target[at + size :] == 0xEE).all()
