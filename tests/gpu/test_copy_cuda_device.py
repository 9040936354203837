"""The CUDA engine on a real device: bytes, order against compute, pinning, errors.

Written without access to a GPU; needs torch with CUDA but no part of vLLM. No asyncio plugin is
required: each test drives its own loop.
"""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tiers.copy.base import CopyBatch, GroupRegions, PageRegion, Ticket, TransferError
from tiers.copy.cuda_engine import CudaCopyEngine, gpu_node
from tiers.copy.cuda_paths import CopyPath
from tiers.cuda_driver import load_driver
from tiers.slab.cuda_registrar import CudaRegistrar
from tiers.slab.slab import HostSlab, SlabError

torch: Any = pytest.importorskip("torch")

BLOCKS = 64
SLOTS = 24
LAYERS = 8
EVENT = object()
LONG_CYCLES = 200_000_000
"""About a tenth of a second on the GPU: long compared with everything that the host does."""


class Device:
    """A cache on the GPU, a pinned slab and an engine."""

    def __init__(
        self, page_bytes: int, *, contiguous: bool, path: CopyPath, chunk_blocks: int = 2
    ) -> None:
        self.page_bytes = page_bytes
        shape = (BLOCKS, LAYERS, page_bytes) if contiguous else (LAYERS, BLOCKS, page_bytes)
        self.tensor = torch.randint(0, 255, shape, dtype=torch.uint8, device="cuda")
        self.contiguous = contiguous
        stride = self.tensor.stride()
        block_stride, layer_stride = (
            (stride[0], stride[1]) if contiguous else (stride[1], stride[0])
        )
        regions = tuple(
            PageRegion(
                f"layer.{i}", self.tensor.data_ptr() + i * layer_stride, block_stride, page_bytes
            )
            for i in range(LAYERS)
        )
        group = GroupRegions(0, chunk_blocks, regions)
        self.chunk_bytes = group.chunk_bytes
        self.chunk_blocks = chunk_blocks
        self.slab = HostSlab(group.chunk_bytes, SLOTS, pin=True, piece_bytes=1 << 20)
        self.engine = CudaCopyEngine([group], self.slab, num_blocks=BLOCKS, path=path)

    def blocks(self, ids: list[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The expected content of a slot with these blocks."""
        index = torch.tensor(ids, device="cuda")
        picked = self.tensor[index] if self.contiguous else self.tensor[:, index].transpose(0, 1)
        return picked.cpu().numpy().ravel()

    def fill(self, ids: list[int], value: int) -> None:
        """Write to blocks on the current stream."""
        for block in ids:
            page = self.tensor[block] if self.contiguous else self.tensor[:, block]
            page.fill_(value)

    def job(self, slots: list[int], rows: list[list[int]]) -> list[CopyBatch]:
        return [CopyBatch(0, np.array(rows, dtype=np.int64), np.array(slots, dtype=np.int64))]

    def slot(self, slot: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self.slab.slot_view(slot, self.chunk_bytes)

    def close(self) -> None:
        self.engine.close()
        self.slab.close()


def wait(*tickets: Ticket) -> None:
    async def all_of_them() -> None:
        for ticket in tickets:
            await ticket.completed()

    asyncio.run(all_of_them())


@pytest.fixture(params=list(CopyPath), ids=lambda path: f"by-{path.name.lower()}")
def path(request: pytest.FixtureRequest) -> CopyPath:
    chosen: CopyPath = request.param
    if chosen is CopyPath.BATCH and not load_driver().has_batch_copy:
        pytest.skip("the driver has no batched copy (CUDA before 12.8)")
    return chosen


@pytest.fixture
def device(path: CopyPath) -> Iterator[Device]:
    one = Device(32768, contiguous=False, path=path)
    assert {choice.path for choice in one.engine.choices().values()} == {path}
    yield one
    one.close()


@pytest.mark.parametrize("contiguous", [False, True], ids=["separate", "contiguous"])
@pytest.mark.parametrize("page_bytes", [1024, 8192 + 48, 32768, 262144])
def test_bytes_are_right_both_ways(page_bytes: int, contiguous: bool, path: CopyPath) -> None:
    one = Device(page_bytes, contiguous=contiguous, path=path)
    try:
        rows = np.random.default_rng(0).permutation(BLOCKS)[: 2 * SLOTS].reshape(SLOTS, 2)
        rows[0] = [5, 6]
        job = one.job(list(range(SLOTS)), rows.tolist())
        job[0].blocks[3, 0] = -1
        one.slot(3)[:] = 0
        wait(one.engine.submit_store(job, one.engine.record_event()))
        for slot, row in enumerate(rows.tolist()):
            expected = one.blocks(row)
            if slot == 3:
                expected[: expected.size // 2] = 0
            np.testing.assert_array_equal(one.slot(slot), expected)
        before = one.tensor.clone()
        one.tensor.zero_()
        wait(one.engine.submit_load(job, one.engine.record_event()))
        touched = torch.zeros(BLOCKS, dtype=torch.bool, device="cuda")
        touched[torch.tensor(job[0].blocks[job[0].blocks >= 0], device="cuda")] = True
        after = one.tensor if contiguous else one.tensor.transpose(0, 1)
        right = before if contiguous else before.transpose(0, 1)
        assert torch.equal(after[touched], right[touched])
        assert int(after[~touched].max()) == 0
    finally:
        one.close()


def test_a_store_waits_for_the_kernel_that_writes_its_blocks(device: Device) -> None:
    device.fill([3, 4], 1)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    device.fill([3, 4], 7)
    ticket = device.engine.submit_store(device.job([1], [[3, 4]]), device.engine.record_event())
    wait(ticket)
    assert (device.slot(1) == 7).all()


def test_without_the_event_a_store_reads_too_early(device: Device) -> None:
    """The test above can fail: the streams really are independent."""
    device.fill([3, 4], 1)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    device.fill([3, 4], 7)
    wait(device.engine.submit_store(device.job([1], [[3, 4]])))
    assert (device.slot(1) == 1).all()
    torch.cuda.synchronize()


def values_read_before_a_load(device: Device, after: object | None) -> tuple[set[int], set[int]]:
    """Runs a long kernel, a copy that reads the blocks, and a load into them; returns what the copy
    read, and the blocks' content at the end."""
    device.fill([3, 4], 1)
    device.slot(1)[:] = 7
    # now, because an allocation may wait for the long kernel
    seen = torch.empty_like(device.tensor)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    seen.copy_(device.tensor)
    if after is EVENT:
        after = device.engine.record_event()
    wait(device.engine.submit_load(device.job([1], [[3, 4]]), after))
    torch.cuda.synchronize()
    index = [3, 4]
    old = seen[index] if device.contiguous else seen[:, index]
    new = device.tensor[index] if device.contiguous else device.tensor[:, index]
    return set(old.unique().tolist()), set(new.unique().tolist())


def test_a_load_waits_for_the_kernel_that_reads_its_blocks(device: Device) -> None:
    assert values_read_before_a_load(device, EVENT) == ({1}, {7})


def test_without_the_event_a_load_overwrites_too_early(device: Device) -> None:
    """The test above can fail: the load ends while the long kernel still runs."""
    assert values_read_before_a_load(device, None) == ({7}, {7})


def test_kernels_launched_after_a_ticket_see_the_loaded_bytes(device: Device) -> None:
    for value in range(1, 30):
        device.slot(1)[:] = value
        wait(device.engine.submit_load(device.job([1], [[3, 4]]), device.engine.record_event()))
        index = [3, 4]
        page = device.tensor[index] if device.contiguous else device.tensor[:, index]
        assert (int(page.min()), int(page.max())) == (value, value)


def test_both_lanes_at_once_and_in_order(device: Device) -> None:
    rows = np.arange(2 * SLOTS).reshape(SLOTS, 2).tolist()
    for slot in range(SLOTS // 2, SLOTS):
        device.slot(slot)[:] = slot
    stores = [
        device.engine.submit_store(device.job([slot], [rows[slot]]), device.engine.record_event())
        for slot in range(SLOTS // 2)
    ]
    loads = [
        device.engine.submit_load(device.job([slot], [rows[slot]]), device.engine.record_event())
        for slot in range(SLOTS // 2, SLOTS)
    ]
    wait(stores[-1], loads[-1])
    assert all(ticket.done() for ticket in [*stores, *loads])
    for slot in range(SLOTS // 2):
        np.testing.assert_array_equal(device.slot(slot), device.blocks(rows[slot]))
    for slot in range(SLOTS // 2, SLOTS):
        assert (device.blocks(rows[slot]) == slot).all()


def test_a_batch_out_of_range_is_refused_and_the_lane_continues(device: Device) -> None:
    with pytest.raises(TransferError, match="block 64 requested"):
        wait(device.engine.submit_load(device.job([0], [[0, BLOCKS]])))
    wait(device.engine.submit_store(device.job([0], [[0, 1]])))
    np.testing.assert_array_equal(device.slot(0), device.blocks([0, 1]))


def test_a_graph_can_be_captured_while_copies_run(device: Device) -> None:
    """Our threads' driver calls must not invalidate a capture in the model's thread."""
    graph = torch.cuda.CUDAGraph()
    value = torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        for _ in range(50):
            value += 1
            device.engine.submit_store(device.job([0], [[0, 1]]))
    graph.replay()
    torch.cuda.synchronize()
    assert float(value) == 50.0
    wait(device.engine.submit_store(device.job([1], [[2, 3]])))


def test_a_slab_can_be_pinned_while_a_graph_is_captured() -> None:
    graph = torch.cuda.CUDAGraph()
    value = torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        slab = HostSlab(1 << 20, 64, pin=True, piece_bytes=1 << 20, background=False)
        value += 1
    graph.replay()
    torch.cuda.synchronize()
    assert float(value) == 1.0
    assert slab.pinned
    slab.close()


def test_the_slab_is_really_pinned_and_unpinned() -> None:
    slab = HostSlab(1 << 20, 8, pin=True, numa_node=gpu_node(), background=False)
    assert torch.from_numpy(slab.slot(5)).is_pinned()
    address = slab.address
    slab.close()
    again = HostSlab(1 << 20, 8, pin=True, background=False)  # probably the same addresses
    assert torch.from_numpy(again.slot(5)).is_pinned(), f"first at {address}"
    again.close()


class Gated(CudaRegistrar):
    """Pins the first piece at once, the others on command."""

    gate = threading.Event()

    def register(self, address: int, nbytes: int) -> None:
        if nbytes and getattr(self, "began", False):
            self.gate.wait()
        self.began = True
        super().register(address, nbytes)


def test_copies_before_all_is_pinned_are_right_and_slots_become_fast() -> None:
    """The driver itself copies pageable memory, even while that memory is being registered."""
    Gated.gate.clear()
    tensor = torch.randint(0, 255, (BLOCKS, 1 << 20), dtype=torch.uint8, device="cuda")
    group = GroupRegions(0, 1, (PageRegion("layer", tensor.data_ptr(), 1 << 20, 1 << 20),))
    slab = HostSlab(1 << 20, SLOTS, pin=True, registrar=Gated(), piece_bytes=1 << 20)
    engine = CudaCopyEngine([group], slab, num_blocks=BLOCKS)
    rows, slots = np.arange(SLOTS)[:, None], np.arange(SLOTS)
    try:
        slab.wait_ready(1)
        for _ in range(20):
            tensor.random_(0, 255)
            job = [CopyBatch(0, rows, slots)]
            ticket = engine.submit_store(job, engine.record_event())
            Gated.gate.set()  # from the first iteration on, pinning runs during the copies
            wait(ticket)
            expected = tensor[:SLOTS].cpu().numpy()
            for slot in range(SLOTS):
                np.testing.assert_array_equal(slab.slot(slot), expected[slot])
            tensor.zero_()
            wait(engine.submit_load(job, engine.record_event()))
            assert torch.equal(tensor[:SLOTS].cpu(), torch.from_numpy(expected))
        slab.wait_ready()
        assert slab.pinned_slots == SLOTS
        assert engine.failures() == {}
    finally:
        Gated.gate.set()
        engine.close()
        slab.close()


def test_a_memlock_limit_is_reported_or_has_no_effect_here() -> None:
    """Some drivers pin memory outside the limit; then there is nothing to report."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
    refusal = ""
    try:
        slab = HostSlab(1 << 20, 8, pin=True, background=False)
        slab.close()
    except SlabError as error:
        refusal = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    if not refusal:
        pytest.skip("this driver pins memory outside the memlock limit")
    assert "65,536 bytes" in refusal
    assert "ulimit -l" in refusal
