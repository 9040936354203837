"""Simulates a disk that hangs, fails, fills up or is slow, under the LMDB tier of a running engine.

The system calls on the payload file are replaced without the tier's knowledge; everything above
them is real: threads, index, executor, planner. Each function runs in every worker process.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from offload.planner import load_or_recompute
from tests.patience import PATIENCE_S
from tests.vllm.faults import executor
from tests.vllm.probes import connector
from tiers.base import Buffer
from tiers.io.direct_io import DiskIo

SLOW_S = 0.3
RETRY_S = (0.2, 1.0)
"""The first and the longest wait of a breaker after ``retry_soon``."""
SHORT, LONG = (2.0, 0.3), (PATIENCE_S, PATIENCE_S)
"""Time in seconds that a load and an operation of the disk may take: while the disk fails, and
while a busy machine must not cause the tier to be left out."""
SLOWLY, QUICKLY = (1.0,), (2500.0,)
"""Assumed tokens per second of computing: any disk is faster than the first value, and a disk that
takes 0.3 s per call is slower than the second."""
REFUSALS = {"is full": errno.ENOSPC, "is read-only": errno.EROFS}
"""The errors of writes in these states; reads work."""


class SickIo(DiskIo):
    """Counts every call, then does what ``state`` requires."""

    def __init__(self) -> None:
        self.state = "well"
        self.calls = 0
        self.gate = threading.Event()

    def _suffer(self) -> None:
        self.calls += 1
        if self.state == "hangs":
            self.gate.wait()
        elif self.state == "fails":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        elif self.state == "crawls":
            time.sleep(SLOW_S)

    def preadv(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        self._suffer()
        return super().preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        self._suffer()
        if self.state in REFUSALS:
            raise OSError(REFUSALS[self.state], os.strerror(REFUSALS[self.state]))
        return super().pwritev(fd, views, offset)


def _tiers(worker: Any) -> Any:
    return [tier._tier for tier in executor(worker)._tiers]


def infect(worker: Any, state: str) -> None:
    """Put the disk of this rank into this state."""
    for tier in _tiers(worker):
        io = tier._files.file._io
        if not isinstance(io, SickIo):
            io = tier._files.file._io = SickIo()
        io.state = state
        if state == "well":
            io.gate.set()
            tier._files.file._io = SickIo()  # later calls wait at a separate gate


def set_limits(worker: Any, load_timeout_s: float, tier_timeout_s: float) -> None:
    """Set how long this rank's loads, and operations of its tiers, may take from now on."""
    found = executor(worker)
    found.limits = replace(
        found.limits, load_timeout_s=load_timeout_s, tier_timeout_s=tier_timeout_s
    )
    for tier in found._loads.tiers:
        tier.monitor._timeout_s = tier_timeout_s


def compute_at(llm: Any, tokens_per_second: float) -> None:
    """Set the speed of computing for break-even, whatever this machine's speed is."""
    prefill = connector(llm).serving.side.planner.health._prefill
    prefill.value = lambda: tokens_per_second
    prefill.observe = lambda tokens, seconds: None


def tier_state(llm: Any) -> tuple[bool, bool, float]:
    """Returns whether the disk is read, whether it is written, and how often its breaker opened."""
    health = connector(llm).serving.side.planner.health[0]
    return health.readable, health.writes.closed, health.reads.openings + health.writes.openings


def retry_soon(llm: Any) -> None:
    """From now on, an unavailable tier is tried again after a fraction of a second, and never
    later."""
    load_or_recompute.RETRY_S, load_or_recompute.RETRY_MAX_S = RETRY_S
    for health in connector(llm).serving.side.planner.health:
        health.break_even._wait_s = RETRY_S[0]
        for breaker in (health.reads, health.writes):
            breaker._first_wait_s, breaker._wait_max_s = RETRY_S


def disk_calls(worker: Any) -> int:
    """The number of calls to the disk since it entered its state."""
    return sum(tier._files.file._io.calls for tier in _tiers(worker))
