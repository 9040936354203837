"""The systems that ``bench tiers`` compares: our tiers, raw disk, memory, vLLM's fs tier.

Every system moves the same numbered blocks of one arena. ``write`` returns when the system's own
guarantee holds: the LMDB tier, the file tier and the raw file have flushed; vLLM's fs tier never
flushes, which is an advantage for it. All of them bypass the page cache where they can, as in
production.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import queue
import shutil
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import default_rng  # a later import can swallow a Ctrl-C

from offload.planner.write_through import QueueSettings
from offload.worker.executor_limits import ExecutorLimits
from offload.worker.read_turns import ReadTurns
from offload.worker.tier_monitor import CALLS_MAX
from tiers.base import Buffer, ReadOutcome, Tier, WriteOutcome
from tiers.files.tier import FileTier
from tiers.io.direct_io import drop_cache
from tiers.lmdb.tier import LmdbTier

Numbers = Sequence[int]
FIXED_BYTES = 16 << 20
HUGE_BYTES = 2 << 20


def _memory(size_bytes: int) -> Buffer:
    """Return memory for the arena, aligned to huge pages and using them where available, like the
    slab. In all systems, pinning pages takes most of the CPU time of O_DIRECT."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size_bytes + HUGE_BYTES, flags=flags)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -int(whole.ctypes.data) % HUGE_BYTES
    return whole[start : start + size_bytes]


class Arena:
    """Pre-faulted memory for ``count`` blocks. Block ``n`` is at position ``n % count``."""

    def __init__(self, count: int, block_bytes: int) -> None:
        self.count, self.block_bytes = count, block_bytes
        self.data = _memory(count * block_bytes)
        noise = default_rng(1).integers(0, 256, 1 << 20, np.uint8)
        for start in range(0, self.data.nbytes, noise.nbytes):
            part = self.data[start : start + noise.nbytes]
            part[:] = noise[: part.nbytes]

    def block(self, number: int) -> Buffer:
        start = number % self.count * self.block_bytes
        return self.data[start : start + self.block_bytes]


class System(ABC):
    """One system over one folder. Its calls block."""

    name = ""

    def __init__(self, folder: Path, arena: Arena, depth: int) -> None:
        self.folder, self.arena, self.depth = folder, arena, depth
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)

    @abstractmethod
    def mixed(self, write: Numbers, read: Numbers) -> None:
        """Write some blocks and read others at the same time."""

    @abstractmethod
    def forget(self, numbers: Numbers) -> None:
        """Delete blocks that will not be read again."""

    @abstractmethod
    def latencies_s(self, write: Numbers, read: Numbers) -> tuple[list[float], list[float]]:
        """Time in seconds of each block when ``depth`` callers handle them one by one."""

    def write(self, numbers: Numbers) -> None:
        self.mixed(numbers, ())

    def read(self, numbers: Numbers) -> None:
        self.mixed((), numbers)

    def drop_caches(self) -> None:
        """Forget pages that the system may have cached."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                drop_cache(fd)
                os.close(fd)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Threads:
    """``count`` threads that run jobs; ``run`` waits for all of them."""

    def __init__(self, count: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # run() raises the error
                self._ended.put(error)
            else:
                self._ended.put(None)

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        for job in jobs:
            self._jobs.put(job)
        errors = [error for _ in jobs if (error := self._ended.get()) is not None]
        if errors:
            raise errors[0]

    def stop(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()


class ThreadedSystem(System):
    """A system with blocking calls for single blocks."""

    def __init__(self, folder: Path, arena: Arena, depth: int) -> None:
        super().__init__(folder, arena, depth)
        self.threads = Threads(depth)

    @abstractmethod
    def write_one(self, number: int) -> None: ...

    @abstractmethod
    def read_one(self, number: int) -> None: ...

    def flush(self) -> None:
        """Make the written data durable, if the system supports that."""

    def mixed(self, write: Numbers, read: Numbers) -> None:
        jobs: list[Callable[[], None]] = []
        for position in range(max(len(write), len(read))):
            for numbers, call in ((write, self.write_one), (read, self.read_one)):
                if position < len(numbers):
                    jobs.append(lambda call=call, n=numbers[position]: call(n))  # type: ignore[misc]  # mypy cannot see defaults
        self.threads.run(jobs)
        if write:
            self.flush()

    def latencies_s(self, write: Numbers, read: Numbers) -> tuple[list[float], list[float]]:
        def timed(call: Callable[[int], None], number: int, into: list[float]) -> None:
            began = time.perf_counter()
            call(number)
            if call == self.write_one:
                self.flush()
            into.append(time.perf_counter() - began)

        writes: list[float] = []
        reads: list[float] = []
        self.threads.run([lambda n=n: timed(self.write_one, n, writes) for n in write])  # type: ignore[misc]  # as above
        self.threads.run([lambda n=n: timed(self.read_one, n, reads) for n in read])  # type: ignore[misc]  # as above
        return writes, reads

    def close(self) -> None:
        self.threads.stop()
        super().close()


class RawDisk(ThreadedSystem):
    """The limit: one preallocated file with ``O_DIRECT``, written block by block as a ring."""

    name = "raw O_DIRECT"

    def __init__(self, folder: Path, arena: Arena, depth: int) -> None:
        super().__init__(folder, arena, depth)
        self.fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self.ring_blocks = 2 * arena.count
        os.posix_fallocate(self.fd, 0, self.ring_blocks * arena.block_bytes)

    def _offset(self, number: int) -> int:
        return number % self.ring_blocks * self.arena.block_bytes

    def write_one(self, number: int) -> None:
        done = os.pwrite(self.fd, self.arena.block(number), self._offset(number))  # type: ignore[arg-type]  # arrays are buffers
        assert done == self.arena.block_bytes, "short write"

    def read_one(self, number: int) -> None:
        done = os.preadv(self.fd, [self.arena.block(number)], self._offset(number))  # type: ignore[list-item]  # arrays are buffers
        assert done == self.arena.block_bytes, "short read"

    def flush(self) -> None:
        os.fdatasync(self.fd)

    def forget(self, numbers: Numbers) -> None:
        """Nothing to delete: the ring overwrites old blocks."""

    def close(self) -> None:
        os.close(self.fd)
        super().close()


class Memory(ThreadedSystem):
    """Another limit: one thread that copies within memory."""

    name = "memcpy"

    def __init__(self, folder: Path, arena: Arena, depth: int) -> None:
        super().__init__(folder, arena, 1)
        self.copy = Arena(arena.count, arena.block_bytes)

    def write_one(self, number: int) -> None:
        np.copyto(self.copy.block(number), self.arena.block(number))

    def read_one(self, number: int) -> None:
        np.copyto(self.arena.block(number), self.copy.block(number))

    def forget(self, numbers: Numbers) -> None:
        """Nothing to delete."""


class VllmFs(ThreadedSystem):
    """vLLM's fs tier: its functions and its numbers of threads (16 + 16), with one job per
    block.

    On Python 3.11 each call of vLLM 0.32's extension releases a reference to None that it does not
    own. After some hundred thousand calls CPython ends the process ("deallocating None"), so
    ``forget`` replaces the lost references.
    """

    name = "vLLM fs"

    def __init__(self, folder: Path, arena: Arena, depth: int) -> None:
        super().__init__(folder, arena, 32)
        from vllm.v1.kv_offload.tiering.fs import io

        self._io = io
        self._none_references = sys.getrefcount(None)
        self._view = memoryview(arena.data)  # type: ignore[arg-type]  # arrays are buffers

    def _path(self, number: int) -> str:
        # vLLM's layout: two levels of hash prefix above the block's own name.
        return str(self.folder / f"{number % 256:02x}" / f"{number:032x}.bin")

    def _offset(self, number: int) -> int:
        return number % self.arena.count * self.arena.block_bytes

    def write_one(self, number: int) -> None:
        self._io.batch_store_block(
            [self._path(number)], self._view, [self._offset(number)], self.arena.block_bytes
        )

    def read_one(self, number: int) -> None:
        self._io.batch_load_block(
            [self._path(number)], self._view, [self._offset(number)], self.arena.block_bytes
        )

    def forget(self, numbers: Numbers) -> None:
        for number in numbers:
            os.unlink(self._path(number))
        for _ in range(self._none_references - sys.getrefcount(None)):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(None))

    def close(self) -> None:
        self._view.release()
        super().close()


class TierSystem(System):
    """One of kvtiers' tiers, driven from a separate event loop."""

    def __init__(self, folder: Path, arena: Arena, depth: int) -> None:
        super().__init__(folder, arena, depth)
        self._runner = asyncio.Runner()
        self.tier = self.make_tier()
        self._run(self.tier.open())

    @abstractmethod
    def make_tier(self) -> Tier: ...

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(coroutine)

    @staticmethod
    def key(number: int) -> bytes:
        return number.to_bytes(32, "big") + bytes(4)

    async def _write(self, numbers: Numbers) -> None:
        keys = [self.key(number) for number in numbers]
        outcomes = await self.tier.write(keys, [self.arena.block(number) for number in numbers])
        assert set(outcomes) <= {WriteOutcome.OK}, set(outcomes)

    async def _read(self, numbers: Numbers) -> None:
        keys = [self.key(number) for number in numbers]
        outcomes = await self.tier.read(keys, [self.arena.block(number) for number in numbers])
        assert set(outcomes) <= {ReadOutcome.OK}, set(outcomes)

    def mixed(self, write: Numbers, read: Numbers) -> None:
        async def both() -> None:
            parts = []
            if write:
                parts.append(self._write(write))
            if read:
                parts.append(self._read(read))
            await asyncio.gather(*parts)

        self._run(both())

    def forget(self, numbers: Numbers) -> None:
        self._run(self.tier.delete([self.key(number) for number in numbers]))

    def latencies_s(self, write: Numbers, read: Numbers) -> tuple[list[float], list[float]]:
        async def caller(left: list[int], call: Any, into: list[float]) -> None:
            while left:
                began = time.perf_counter()
                await call([left.pop()])
                into.append(time.perf_counter() - began)

        async def everything(numbers: Numbers, call: Any) -> list[float]:
            left, found = list(numbers), list[float]()
            await asyncio.gather(*(caller(left, call, found) for _ in range(self.depth)))
            return found

        return self._run(everything(write, self._write)), self._run(everything(read, self._read))

    def close(self) -> None:
        self._run(self.tier.aclose())
        self._runner.close()
        super().close()


class Lmdb(TierSystem):
    """The LMDB tier, configured for this depth."""

    name = "lmdb tier"

    def make_tier(self) -> Tier:
        total = 2 * self.arena.count * self.arena.block_bytes
        return LmdbTier(
            self.folder / "tier",
            total + total // 16 + FIXED_BYTES,
            reserve_bytes=0,
            io_threads=self.depth,
            queue_records=1 << 20,
        )


class ServedLmdb(Lmdb):
    """The LMDB tier, called as a server calls it: a few records per call, and as many calls at a
    time as a rank of the connector makes."""

    name = "lmdb tier, calls of a server"

    def __init__(self, folder: Path, arena: Arena, depth: int) -> None:
        super().__init__(folder, arena, depth)
        limits = ExecutorLimits()
        self._reads, self._writes = ReadTurns(limits.reads_in_flight), ReadTurns(CALLS_MAX)
        self._read_batch, self._write_batch = limits.read_batch, QueueSettings().batch

    async def _write(self, numbers: Numbers) -> None:
        await _in_parts(super()._write, numbers, self._write_batch, self._writes)

    async def _read(self, numbers: Numbers) -> None:
        await _in_parts(super()._read, numbers, self._read_batch, self._reads)


async def _in_parts(
    call: Callable[[Numbers], Awaitable[None]], numbers: Numbers, batch: int, turns: ReadTurns
) -> None:
    async def part(start: int) -> None:
        async with turns.turn((), is_ahead=False):
            await call(numbers[start : start + batch])

    await asyncio.gather(*map(part, range(0, len(numbers), batch)))


class Files(TierSystem):
    """The file tier."""

    name = "file tier"

    def make_tier(self) -> Tier:
        total = 2 * self.arena.count * (self.arena.block_bytes + 4096)
        return FileTier(self.folder / "tier", total, depth=self.depth)


SYSTEMS: dict[str, type[System]] = {
    "raw": RawDisk,
    "lmdb": Lmdb,
    "served": ServedLmdb,
    "files": Files,
    "vllm": VllmFs,
    "memcpy": Memory,
}
