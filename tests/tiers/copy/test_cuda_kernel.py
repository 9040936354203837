"""Tests the copy kernel without a GPU: the bytes that it copies (its source is compiled for the
host), its code for four generations of GPUs, and its lists of copies while launches are queued."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.libcuda import COPY, ROOT, missing, triton_folder
from tests.patience import PATIENCE_S
from tests.tiers.copy.engine_on_libcuda import BLOCKS, SLOTS, SimulatedGpu
from tests.tiers.copy.known_caches import Cache, batch, contiguous_blocks, separate_layers
from tiers.copy import cuda_kernel
from tiers.copy.base import TransferError
from tiers.copy.cuda_kernel import LISTS
from tiers.copy.cuda_paths import CopyPath

ARCHITECTURES = (80, 90, 100, 120)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernel_is_assembled_without_spills(architecture: int, tmp_path: Path) -> None:
    """Ampere, Hopper and both Blackwells."""
    ptxas, ptx = str(triton_folder("bin") / "ptxas"), str(COPY / "copy_list.ptx")
    done = subprocess.run(
        [ptxas, "-v", f"-arch=sm_{architecture}", ptx, "-o", str(tmp_path / "kernel.cubin")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr
    assert (tmp_path / "kernel.cubin").stat().st_size > 0


def test_the_kernel_moves_16_bytes_at_once_and_needs_no_new_driver() -> None:
    ptx = (COPY / "copy_list.ptx").read_text()
    assert re.search(r"^\.version 7\.0$", ptx, re.MULTILINE)
    assert re.search(r"^\.target sm_80$", ptx, re.MULTILINE)
    moves = re.findall(r"\b((?:ld|st)\.global\.\S+)", ptx)
    assert {move for move in moves if move != "ld.global.u64"} == {
        "ld.global.v4.u32",
        "st.global.v4.u32",
    }


def test_the_ptx_was_compiled_from_the_source() -> None:
    digest = hashlib.sha256((COPY / "copy_list.cu").read_bytes()).hexdigest()
    assert (COPY / "copy_list.ptx").read_text().partition("\n")[0].endswith(digest)


def test_compiling_the_ptx_again_gives_the_same(tmp_path: Path) -> None:
    if not shutil.which("nvcc"):
        missing("nvcc is not installed")
    script, made = ROOT / "scripts/copy_kernel.sh", tmp_path / "made.ptx"
    subprocess.run([script, made], check=True, timeout=PATIENCE_S)
    assert made.read_text() == (COPY / "copy_list.ptx").read_text()


@pytest.mark.parametrize("make", [separate_layers, contiguous_blocks])
async def test_the_kernel_copies_exactly_its_list(make: object) -> None:
    """Sizes below, at and above what a warp holds (2 KiB); nothing between them is touched."""
    pages = [16, 32, 2032, 2048, 2064, 3 * 2048 - 16, 48]
    cache: Cache = make(pages, BLOCKS, chunk_blocks=2, padding=16)  # type: ignore[operator]  # a function
    world = SimulatedGpu(cache, path=CopyPath.KERNEL)
    try:
        rows = np.random.default_rng(0).permutation(BLOCKS).reshape(SLOTS, 2).tolist()
        before = cache.storage.copy()
        await world.engine.submit_store([batch(list(range(SLOTS)), rows)]).completed()
        for slot, row in enumerate(rows):
            np.testing.assert_array_equal(world.slot(slot), cache.chunk(row))
        cache.storage[:] = 0xA5
        expected = cache.storage.copy()
        loaded = rows[2]
        await world.engine.submit_load([batch([2], [loaded])]).completed()
        for region in cache.regions.regions:
            for block in loaded:
                start = region.address - cache.storage.ctypes.data + block * region.block_stride
                expected[start : start + region.page_bytes] = before[
                    start : start + region.page_bytes
                ]
        np.testing.assert_array_equal(cache.storage, expected)
    finally:
        world.close()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGpu]:
    """Every copy goes through the kernel, four copies per launch: one chunk."""
    monkeypatch.setattr(cuda_kernel, "LIST_COPIES", 4)
    one = SimulatedGpu(separate_layers([4096, 8192], BLOCKS, chunk_blocks=2), path=CopyPath.KERNEL)
    assert one.paths() == (CopyPath.KERNEL, CopyPath.KERNEL)
    yield one
    one.close()


def rows_of(chunk: int) -> list[list[int]]:
    return [[2 * chunk, 2 * chunk + 1]]


async def test_a_list_is_written_again_only_when_its_launch_has_run(world: SimulatedGpu) -> None:
    """More launches are queued than there are lists. The first one copies another chunk than the
    rest."""
    launches = world.cuda.calls("cuLaunchKernel")
    for slot in range(SLOTS):
        world.slot(slot)[:] = 0
    world.cuda.hold()
    tickets = [world.engine.submit_store([batch([0], rows_of(0))])]
    tickets += [
        world.engine.submit_store([batch([1 + n % 5], rows_of(1 + n % 5))])
        for n in range(LISTS + 2)
    ]

    def launched() -> int:
        return world.cuda.calls("cuLaunchKernel") - launches

    await until(lambda: launched() >= LISTS)
    # Of two waits, one is for the end of the first job and the other for its list.
    await until(lambda: world.cuda.calls("cuEventSynchronize") >= 2 or launched() > LISTS)
    assert launched() == LISTS
    world.cuda.release()
    for ticket in tickets:
        await ticket.completed()
    for slot in range(SLOTS):
        np.testing.assert_array_equal(world.slot(slot), world.cache.chunk(rows_of(slot)[0]))


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for another thread to do this."""
    while not is_so():  # noqa: ASYNC110  # set by a thread
        await asyncio.sleep(0.001)


async def test_a_list_whose_launch_left_no_event_is_kept_until_its_stream_has_run(
    world: SimulatedGpu,
) -> None:
    """If the list were reused, the launch would do the copies of a later job, before that job may
    begin."""
    launches, waits = (world.cuda.calls(name) for name in ("cuLaunchKernel", "cuStreamSynchronize"))
    world.slot(5)[:] = 9
    old = world.cache.chunk(rows_of(5)[0])
    world.cuda.hold()
    world.cuda.fail("cuEventRecord", 2, nth=1)
    tickets = [world.engine.submit_load([batch([0], rows_of(0))]) for _ in range(LISTS)]
    await until(lambda: world.cuda.calls("cuLaunchKernel") == launches + LISTS)
    world.cuda.launch(lambda: None)  # on the model's stream, which is blocked
    late = world.engine.submit_load([batch([5], rows_of(5))], world.engine.record_event())
    await until(
        lambda: (
            world.cuda.calls("cuStreamSynchronize") > waits
            or world.cuda.calls("cuLaunchKernel") > launches + LISTS
        )
    )
    world.cuda.release(world.engine._load.stream)
    with pytest.raises(TransferError, match="cuEventRecord"):
        await tickets[0].completed()
    for ticket in tickets[1:]:
        await ticket.completed()
    np.testing.assert_array_equal(world.cache.chunk(rows_of(5)[0]), old)
    world.cuda.release()
    await late.completed()
    assert (world.cache.chunk(rows_of(5)[0]) == 9).all()


async def test_a_job_longer_than_all_lists_is_copied(world: SimulatedGpu) -> None:
    slots = [n % SLOTS for n in range(3 * LISTS)]
    rows = [rows_of(slot)[0] for slot in slots]
    await world.engine.submit_store([batch(slots, rows)]).completed()
    for slot in range(SLOTS):
        np.testing.assert_array_equal(world.slot(slot), world.cache.chunk(rows_of(slot)[0]))


async def test_closing_keeps_the_lists_until_queued_launches_have_run(world: SimulatedGpu) -> None:
    for slot in range(SLOTS):
        world.slot(slot)[:] = 0
    launches, destroyed = (
        world.cuda.calls(name) for name in ("cuLaunchKernel", "cuStreamDestroy_v2")
    )
    world.cuda.hold()
    tickets = [world.engine.submit_store([batch([n], rows_of(n))]) for n in range(SLOTS)]
    await until(lambda: world.cuda.calls("cuLaunchKernel") == launches + SLOTS)
    closing = asyncio.create_task(asyncio.to_thread(world.engine.close))
    # The load lane has no work, so it is closed; then the store lane waits for its launches.
    await until(lambda: world.cuda.calls("cuStreamDestroy_v2") > destroyed)
    assert not any(ticket.done() for ticket in tickets)
    world.cuda.release()
    await closing
    for slot, ticket in enumerate(tickets):
        await ticket.completed()
        np.testing.assert_array_equal(world.slot(slot), world.cache.chunk(rows_of(slot)[0]))


@pytest.mark.parametrize("name", ["cuMemcpyAsync", "cuLaunchKernel", "cuEventRecord"])
async def test_lists_stay_right_after_a_launch_that_failed(world: SimulatedGpu, name: str) -> None:
    for slot in range(SLOTS):
        world.slot(slot)[:] = 0
    world.cuda.hold()
    world.cuda.fail(name, 2, nth=2)  # the second of three launches
    failing = world.engine.submit_store([batch([0, 1, 2], [rows_of(n)[0] for n in range(3)])])
    others = [world.engine.submit_store([batch([3], rows_of(3))]) for _ in range(2 * LISTS)]
    await asyncio.to_thread(world.cuda.await_call, "cuEventSynchronize")
    assert not failing.done()
    world.cuda.release()
    with pytest.raises(TransferError, match=name):
        await failing.completed()
    for ticket in others:
        await ticket.completed()
    for slot in (0, 3):
        np.testing.assert_array_equal(world.slot(slot), world.cache.chunk(rows_of(slot)[0]))


@pytest.mark.parametrize(
    ("name", "nth"),
    [
        ("cuModuleLoadData", 1),
        ("cuModuleGetFunction", 1),
        ("cuMemAlloc_v2", 1),
        ("cuMemAlloc_v2", 2),
        ("cuMemHostRegister_v2", SLOTS + 1),
        ("cuMemHostRegister_v2", SLOTS + 2),
        ("cuLaunchKernel", 1),
        ("cuLaunchKernel", 2),
        ("cuStreamSynchronize", 1),
    ],
)
async def test_without_the_kernel_the_batch_copies_everything(
    name: str, nth: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever its set-up fails, everything that was set up is released (``strict_cuda``
    counts)."""
    cache = separate_layers([4096, 8192], BLOCKS, chunk_blocks=2)
    with caplog.at_level(logging.WARNING, "tiers.copy.cuda_engine"):
        world = SimulatedGpu(cache, failing=(name, nth))
    try:
        assert caplog.text.count("the gather/scatter kernel cannot be used (") == 1
        assert world.paths() == (CopyPath.BATCH, CopyPath.BATCH)
        assert world.cuda.count("allocated") == 0
        assert world.cuda.count("registered") == SLOTS
        await world.engine.submit_store([batch([0], [[0, 1]])]).completed()
        np.testing.assert_array_equal(world.slot(0), cache.chunk([0, 1]))
    finally:
        world.close()
