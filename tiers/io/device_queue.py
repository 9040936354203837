"""The limits of a device: how many reads and writes of a tier are in progress at once."""

from __future__ import annotations

import threading

WRITES_BESIDE_READS_MAX = 1
"""Maximum number of writes in progress while reads are in progress: requests wait for reads, but
not for writes. So reads that never pause slow writes down, but do not stop them."""


class DeviceQueue:
    """Limits the reads and the writes at a device: ``depth`` of each kind, but only
    ``WRITES_BESIDE_READS_MAX`` writes while reads are in progress or waiting.

    Every job passes through it twice, with cold caches. So both limits share one lock.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._writes_beside_reads = min(depth, WRITES_BESIDE_READS_MAX)
        self._reads = self._reading = self._writing = 0  # ``_reads`` includes those that wait
        self._lock = threading.Lock()
        self._read_may_begin = threading.Condition(self._lock)
        self._write_may_begin = threading.Condition(self._lock)

    def begin_read(self) -> None:
        """Wait until a read may begin, and count it as in progress."""
        with self._lock:
            self._reads += 1
            while self._reading >= self._depth:
                self._read_may_begin.wait()
            self._reading += 1

    def end_read(self) -> None:
        """Count a read as ended."""
        with self._lock:
            self._reads -= 1
            self._reading -= 1
            self._read_may_begin.notify()
            if not self._reads:
                self._write_may_begin.notify_all()

    def begin_write(self) -> None:
        """Wait until a write may begin, and count it as in progress."""
        with self._lock:
            while not self._is_write_allowed():
                self._write_may_begin.wait()
            self._writing += 1

    def end_write(self) -> None:
        """Count a write as ended."""
        with self._lock:
            self._writing -= 1
            self._write_may_begin.notify()

    def _is_write_allowed(self) -> bool:
        return self._writing < (self._writes_beside_reads if self._reads else self._depth)
