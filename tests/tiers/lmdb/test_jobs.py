"""How the LMDB tier divides its calls into jobs, and how the jobs of a read report."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from tests.patience import PATIENCE_S
from tiers.base import ALIGNMENT, Buffer, ReadOutcome, WriteOutcome
from tiers.io.direct_io import DiskIo
from tiers.io.threads import REPORTED_MIN, Call, JobGroup
from tiers.lmdb.tier import LmdbTier
from tiers.testing import aligned, assert_holds, key_of, put

RECORD = 256 << 10
PER_CALL = 16


class SizedIo(DiskIo):
    """Records how many bytes each system call moves."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.writes: list[int] = []

    def preadv(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        self.reads.append(sum(view.nbytes for view in views))
        return super().preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        self.writes.append(sum(view.nbytes for view in views))
        return super().pwritev(fd, views, offset)


async def test_what_is_in_progress_is_divided_among_the_threads(tmp_path: Path) -> None:
    """A call that comes alone is divided into jobs of a MiB. If four calls come at once, the first
    two are divided in the same way. The third gets jobs of an eighth of the 12 MiB in progress (six
    records), and the fourth gets jobs of an eighth of 16 MiB. Later calls are divided like the
    first ones."""
    io = SizedIo()
    tier = LmdbTier(tmp_path / "tier", 48 << 20, reserve_bytes=0, io=io)
    await tier.open()
    calls = [[key_of(PER_CALL * n + i) for i in range(PER_CALL)] for n in range(4)]
    data = [[aligned(RECORD) for _ in keys] for keys in calls]
    mib = 1 << 20
    shared = sorted([mib] * 8 + [6 * RECORD] * 2 + [4 * RECORD] + [2 * mib] * 2)
    for _ in range(2):
        io.reads.clear()
        io.writes.clear()
        for outcomes in await asyncio.gather(*map(tier.write, calls, data)):
            assert outcomes == [WriteOutcome.OK] * PER_CALL
        for read in await asyncio.gather(*map(tier.read, calls, data)):
            assert read == [ReadOutcome.OK] * PER_CALL
        assert sorted(io.writes) == shared
        assert sorted(io.reads) == shared
        io.reads.clear()
        assert await tier.read(calls[0], data[0]) == [ReadOutcome.OK] * PER_CALL
        assert io.reads == [mib] * 4
        await tier.delete([key for keys in calls for key in keys])
    tier.check()
    await tier.aclose()


async def test_the_records_of_one_long_read_in_any_order(tmp_path: Path) -> None:
    """The jobs of the read report several times. Afterwards nothing is in use: all space can be
    written."""
    capacity, count = 8 << 20, 1000
    tier = LmdbTier(tmp_path / "tier", capacity, record_bytes=ALIGNMENT, reserve_bytes=0)
    await tier.open()
    keys = [key_of(n) for n in range(count)]
    assert await put(tier, keys, ALIGNMENT) == [WriteOutcome.OK] * count
    random.Random(7).shuffle(keys)
    async with asyncio.timeout(PATIENCE_S):
        await assert_holds(tier, keys, ALIGNMENT)
        await tier.delete(keys)
        assert await put(tier, keys, ALIGNMENT) == [WriteOutcome.OK] * count
    tier.check()
    await tier.aclose()


class Job:
    """A job of ``records`` records."""

    def __init__(self, records: int) -> None:
        self.records = records


async def test_jobs_report_when_as_much_has_ended_as_is_left() -> None:
    """There are few messages: after half, three quarters and so on, but none for only a few
    records."""
    reported: list[list[int]] = []

    def post(whole: JobGroup[Job]) -> None:
        reported.append([job.records for job in whole.take()])

    whole = JobGroup(post, Call(None, 0), 8 * REPORTED_MIN)
    for _ in range(16):
        whole.end(Job(REPORTED_MIN // 2))
    half = REPORTED_MIN // 2
    assert reported == [[half] * 8, [half] * 4, [half] * 2, [half] * 2]
    reported.clear()
    few = JobGroup(post, Call(None, 0), 3)
    for _ in range(3):
        few.end(Job(1))
    assert reported == [[1, 1, 1]]
    assert not few.take()
