"""A worker on real tiers, without vLLM: what it finds at the start, counts, and releases."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from offload.connector.worker import worker_side
from offload.connector.worker.worker_side import WorkerSide
from offload.layout.keys import group_suffix
from offload.messages.plan import StepPlan, StoreJob
from offload.worker.tier_factory import make_tier
from tests.offload.connector.worker.test_worker_setup import file_tier, registration, worker
from tiers.base import WriteOutcome
from tiers.slab.slab import SlabError


@pytest.fixture
def one(tmp_path: Path) -> Iterator[WorkerSide]:
    made = worker()
    made.register(registration(), [file_tier(tmp_path / "kv")])
    yield made
    made.shutdown()


def record_bytes() -> int:
    (group,) = registration().groups
    return group.record_bytes


async def write(folder: Path, records: dict[bytes, int]) -> None:
    """Records of these sizes, as an engine of another version may have left them."""
    tier = make_tier(file_tier(folder), 4096, range(0))
    await tier.open()
    for key, size in records.items():
        assert await tier.write([key], [np.full(size, 7, np.uint8)]) == [WriteOutcome.OK]
    await tier.aclose()


def test_records_that_fit_no_group_are_ignored(tmp_path: Path) -> None:
    """If they were listed, they would be loaded into slots of another size, or into no group at
    all."""
    size = record_bytes()
    ours, other = b"a" * 32 + group_suffix(0), b"b" * 32 + group_suffix(0)
    records = {
        ours: size,
        other: size + 4096,
        b"c" * 32 + group_suffix(0): size - 4096,
        b"d" * 32 + group_suffix(3): size,
        b"e" * 4: size,
    }
    asyncio.run(write(tmp_path / "kv", records))
    found = worker()
    found.register(registration(), [file_tier(tmp_path / "kv")])
    try:
        handshake = found.state()
        assert handshake is not None
        assert [column.tolist() for column in handshake.tiers[0].keys] == [[ours]]
    finally:
        found.shutdown()


def test_counters_are_sent_once(one: WorkerSide, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters of hooks are sent about once a second, because they grow at every step."""
    now = [1000.0]
    monkeypatch.setattr(worker_side, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one._hooks_at = now[0]
    stats: Any = one._executor.stats  # type: ignore[union-attr]  # it is registered
    stats.store_bytes = 10
    assert one.counters({"hook_calls:a": 3.0}) == {"store_bytes": 10}
    now[0] += 2.0
    stats.store_bytes = 15
    assert one.counters({"hook_calls:a": 4.0}) == {"store_bytes": 5, "hook_calls:a": 4.0}
    assert one.counters({"hook_calls:a": 5.0}) == {}
    now[0] += 2.0
    assert one.counters({"hook_calls:a": 9.0}) == {"hook_calls:a": 5.0}


@pytest.mark.parametrize("is_late", [False, True])
def test_a_late_fence_fails_stores_that_have_not_ended_before(is_late: bool) -> None:
    """Model Runner V2 has overwritten the blocks by then, and a store may have read the new
    content."""
    one = worker()
    one._fence_is_late = is_late
    one.register(registration(), [])
    try:
        one.post(StepPlan(stores=(StoreJob(1, 0, [1], [3]), StoreJob(2, 0, [2], [4]))))
        one.before_step(StepPlan(fence=(1,)))
        results = {}
        while len(results) < 2:
            results |= one.drain(idle=True).report.results
        assert {job: result.failed for job, result in results.items()} == {1: is_late, 2: False}
    finally:
        one.shutdown()


@pytest.mark.parametrize("what", ["the tiers do not close", "the loop does not stop"])
def test_memory_that_may_still_be_used_is_not_freed(
    what: str, one: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung read or copy would write into the memory's next content."""

    slab, executor, loop = one._slab, one._executor, one._loop
    assert slab is not None
    assert executor is not None
    assert loop is not None
    close, stop = executor.aclose, loop.stop

    async def too_late(timeout_s: float) -> None:
        await close(timeout_s)
        raise TimeoutError

    if what == "the tiers do not close":
        monkeypatch.setattr(executor, "aclose", too_late)
    else:
        monkeypatch.setattr(loop, "stop", lambda timeout_s: stop(timeout_s) and False)
    one.shutdown()
    slab.slot(0)[:] = 1  # the memory is still there
    slab.close()


def test_memory_that_is_no_longer_used_is_freed(one: WorkerSide) -> None:
    slab = one._slab
    assert slab is not None
    one.shutdown()
    with pytest.raises(SlabError, match="closed"):
        slab.slot(0)
