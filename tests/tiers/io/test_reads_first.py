"""Reads have priority on a disk: beside them one write at a time runs, but never none."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.patience import PATIENCE_S
from tiers.base import Buffer
from tiers.io.device_queue import DeviceQueue
from tiers.io.direct_io import DiskIo, PayloadFile
from tiers.testing import aligned

WRITES = 4
Events = queue.SimpleQueue[str]


class Waiting(threading.Condition):
    """Reports each thread that begins to wait."""

    def __init__(self, lock: threading.Lock, events: Events) -> None:
        super().__init__(lock)
        self._events = events

    def wait(self, timeout: float | None = None) -> bool:
        self._events.put("waits")
        return super().wait(timeout)


@contextmanager
def reading(order: DeviceQueue) -> Iterator[None]:
    order.begin_read()
    yield
    order.end_read()


class Writes:
    """Threads that write until the test ends them. ``events`` records which of them waited and
    which began."""

    def __init__(self, order: DeviceQueue, events: Events) -> None:
        self._order = order
        self._events = events
        self._go_on = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(WRITES)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        self._order.begin_write()
        self._events.put("writes")
        assert self._go_on.acquire(timeout=PATIENCE_S)
        self._order.end_write()

    def end(self, count: int) -> None:
        """Let this number of writes end."""
        self._go_on.release(count)

    def join(self) -> None:
        """Let all writes end, and wait for that."""
        self.end(WRITES)
        for thread in self._threads:
            thread.join(PATIENCE_S)


def order_with(depth: int = WRITES) -> tuple[DeviceQueue, Events]:
    order, events = DeviceQueue(depth), Events()
    order._write_may_begin = Waiting(order._lock, events)
    return order, events


def next_of(events: Events, count: int) -> list[str]:
    """The next events, in alphabetical order."""
    return sorted(events.get(timeout=PATIENCE_S) for _ in range(count))


def test_beside_a_read_one_write_at_a_time_continues() -> None:
    order, events = order_with()
    with reading(order):
        writes = Writes(order, events)
        assert next_of(events, WRITES) == ["waits"] * (WRITES - 1) + ["writes"]
        writes.end(1)
        assert next_of(events, 1) == ["writes"]
        assert events.empty()
    assert next_of(events, WRITES - 2) == ["writes"] * (WRITES - 2)
    writes.join()


def test_without_reads_no_write_waits() -> None:
    order, events = order_with()
    with reading(order):
        pass
    writes = Writes(order, events)
    assert next_of(events, WRITES) == ["writes"] * WRITES
    writes.join()


def test_more_writes_than_the_depth_wait() -> None:
    order, events = order_with(depth=WRITES - 1)
    writes = Writes(order, events)
    assert next_of(events, WRITES) == ["waits"] + ["writes"] * (WRITES - 1)
    writes.end(1)
    assert next_of(events, 1) == ["writes"]
    writes.join()


def test_reads_that_never_end_do_not_stop_writes() -> None:
    order, events = order_with()
    with reading(order):
        writes = Writes(order, events)
        writes.end(WRITES)
        assert next_of(events, WRITES).count("writes") >= 1
        writes.join()


class HeldIo(DiskIo):
    """Reads continue once ``goes_on`` is set; ``events`` records the writes."""

    def __init__(self, events: Events) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self._events = events

    def preadv(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        self.begun.set()
        assert self.goes_on.wait(PATIENCE_S)
        return super().preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        self._events.put("writes")
        return super().pwritev(fd, views, offset)


def test_a_write_of_a_payload_file_waits_for_its_reads(tmp_path: Path) -> None:
    order, events = order_with()
    io = HeldIo(events)
    file = PayloadFile(tmp_path / "payload", io, direct=False)
    file._queue = order
    page = aligned(4096)
    file.write([page], 0)
    assert next_of(events, 1) == ["writes"]
    reader = threading.Thread(target=file.read, args=([aligned(4096)], 0), daemon=True)
    writer = threading.Thread(target=file.write, args=([page], 4096), daemon=True)
    reader.start()
    assert io.begun.wait(PATIENCE_S)
    order.begin_write()
    writer.start()
    assert next_of(events, 1) == ["waits"]
    io.goes_on.set()
    assert next_of(events, 1) == ["writes"]
    order.end_write()
    for thread in (reader, writer):
        thread.join(PATIENCE_S)
    file.close()
