"""The lists that the gather/scatter kernel reads: whose they are while launches are under way.

Here the real ``CopyKernel`` keeps the lists, and a fake GPU runs its launches late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch: Any = pytest.importorskip("torch")

from tests.tiers.copy.engine_on_fake_cuda import BLOCKS, World  # noqa: E402  # after the skips
from tests.tiers.copy.fake_cuda import FakeCuda  # noqa: E402  # after the skips
from tests.tiers.copy.known_caches import batch, separate_layers  # noqa: E402  # after the skips
from tiers.copy.base import TransferError  # noqa: E402  # after the skips
from tiers.copy.cuda_engine import CopyPath  # noqa: E402  # after the skips
from tiers.copy.cuda_kernel import PREPARED_LISTS, CopyKernel  # noqa: E402  # after the skips

LIST = 4


class LateKernel(CopyKernel):
    """Launches on the fake GPU; ``changed`` collects launches whose list was another one by the
    time they ran. ``fail_at`` is the number of the launch that fails, counted from 1."""

    list_copies = LIST

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.launches = 0
        self.fail_at = 0
        self.changed: list[int] = []
        super().__init__(0)

    def _allocate(self) -> tuple[Any, Any]:
        return torch.zeros(3 * LIST, dtype=torch.int64), None

    def _warm_up(self) -> None:
        pass

    def _submit(self, host: Any, device: Any, count: int, stream: int) -> None:
        self.launches += 1
        if self.launches == self.fail_at:
            raise RuntimeError("no such kernel")
        given = host.numpy()[: 3 * count].copy()
        self._cuda.launch(partial(self._execute, self.launches, host, given), stream)

    def _execute(self, number: int, host: Any, given: np.ndarray[Any, Any]) -> None:
        read = host.numpy()[: len(given)]
        if not np.array_equal(read, given):
            self.changed.append(number)
        self._cuda.move_all(*read.reshape(3, -1))


class KernelWorld(World):
    """Every copy goes through the kernel."""

    kernel: LateKernel

    def load_kernel(self, device: int) -> LateKernel:
        self.kernel = LateKernel(self.cuda)
        return self.kernel

    @property
    def free_lists(self) -> int:
        return len(self.kernel._pool)


@pytest.fixture
def world() -> Iterator[KernelWorld]:
    cache = separate_layers([4096, 8192], BLOCKS, chunk_blocks=2)
    one = KernelWorld(cache, path=CopyPath.KERNEL)
    assert one.engine.paths() == {0: CopyPath.KERNEL}
    yield one
    one.close()


async def launched(world: KernelWorld, times: int) -> None:
    """Wait until that many launches are on their streams."""
    await asyncio.to_thread(world.cuda.await_call, "launch", times)


async def forgotten(world: KernelWorld) -> None:
    """Wait until each lane has released its last job: it has when the next one has ended."""
    for submit in (world.engine.submit_store, world.engine.submit_load):
        await submit([]).completed()


async def test_launches_of_a_job_that_fails_later_keep_their_lists(
    world: KernelWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest keeps log records, they the traceback, it the lists that are to be seen going.
    monkeypatch.setattr(logging.getLogger("tiers.copy.failures"), "disabled", True)
    world.cuda.hold()
    world.kernel.fail_at = 2
    failing = world.engine.submit_store([batch([0, 1], [[0, 1], [2, 3]])])  # 8 copies, 2 launches
    await asyncio.to_thread(world.cuda.await_call, "cuEventSynchronize")
    assert world.free_lists == PREPARED_LISTS - 2
    # As many launches as there are lists: with the held ones in the pool they would be among them.
    others = [world.engine.submit_load([batch([2], [[4, 5]])]) for _ in range(PREPARED_LISTS)]
    await launched(world, 1 + PREPARED_LISTS)
    assert not failing.done()
    world.cuda.release()
    with pytest.raises(TransferError, match="RuntimeError: no such kernel"):
        await failing.completed()
    await asyncio.gather(*(ticket.completed() for ticket in others))
    assert world.kernel.changed == []
    np.testing.assert_array_equal(world.slot(0), world.cache.chunk([0, 1]))
    assert world.engine.failures() == {"RuntimeError": 1}


async def test_lists_are_used_again_when_their_launches_have_run(world: KernelWorld) -> None:
    for turn in range(3 * PREPARED_LISTS):
        rows = np.random.default_rng(turn).permutation(BLOCKS)[:6].reshape(3, 2).tolist()
        await world.engine.submit_store([batch([0, 1, 2], rows)]).completed()  # 3 launches
        for slot, row in enumerate(rows):
            np.testing.assert_array_equal(world.slot(slot), world.cache.chunk(row))
    await forgotten(world)
    assert world.free_lists == PREPARED_LISTS
    assert world.kernel.launches == 9 * PREPARED_LISTS
    assert world.kernel.changed == []


async def test_more_launches_than_lists_get_lists_of_their_own(world: KernelWorld) -> None:
    world.cuda.hold()
    world.slot(1)[:] = 9
    tickets = [world.engine.submit_load([batch([1], [[2, 3]])]) for _ in range(PREPARED_LISTS + 3)]
    await launched(world, PREPARED_LISTS + 3)
    assert world.free_lists == 0
    world.cuda.release()
    await asyncio.gather(*(ticket.completed() for ticket in tickets))
    await forgotten(world)
    assert world.free_lists == PREPARED_LISTS + 3
    assert world.kernel.changed == []
    assert (world.cache.chunk([2, 3]) == 9).all()
