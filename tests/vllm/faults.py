"""Faults that tests plant in a running engine, without the connector's knowledge.

Each runs in every worker process (``Engine.call(on_workers, fault, ...)``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np


def on_workers(llm: Any, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``function(worker, *args)`` on every rank."""
    return llm.collective_rpc(function, args=args)


def executor(worker: Any) -> Any:
    """The executor of this rank."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker._executor


def hold_reads(worker: Any) -> None:
    """Make reads of lower tiers wait until ``release_reads``."""
    _hold(worker, "read")


def hold_reads_and_writes(worker: Any) -> None:
    """Make reads and writes of lower tiers wait, permanently."""
    _hold(worker, "read", "write")


def _hold(worker: Any, *names: str) -> None:
    found = executor(worker)
    gate = found.kvtest_gate = asyncio.Event()
    for tier in found._tiers:
        for name in names:
            setattr(tier, name, _after(gate, getattr(tier, name)))


def _after(gate: asyncio.Event, call: Callable[..., Any]) -> Callable[..., Any]:
    async def held(*args: Any) -> Any:
        await gate.wait()
        return await call(*args)

    return held


def release_reads(worker: Any) -> None:
    """Let held reads continue, permanently."""
    found = executor(worker)
    found._loop.call_soon_threadsafe(found.kvtest_gate.set)


def fill_slots(worker: Any, value: int) -> int:
    """Overwrite the whole CPU tier; return the number of bytes."""
    slab = executor(worker)._loads.memory.slab
    for slot in range(slab.slot_count):
        np.copyto(slab.slot(slot), np.uint8(value))
    return int(slab.size_bytes)


def epoch(worker: Any, tier: int, new: int | None = None) -> int:
    """The epoch under which a tier reads and writes; if ``new`` is given, it replaces the epoch."""
    found = executor(worker)._tiers[tier]
    if new is not None:
        found._epoch = new
    return int(found._epoch)


def open_files(worker: Any) -> tuple[int, int]:
    """Open file descriptors and threads of this worker's process."""
    import os
    import threading

    return len(os.listdir("/proc/self/fd")), threading.active_count()
