"""Records that no request asks for are verified in turn; damaged ones are deleted."""

from __future__ import annotations

import asyncio
import errno
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.offload.cli.rank_folders import flip
from tests.patience import PATIENCE_S
from tiers.base import ALIGNMENT, Buffer, ReadOutcome, Scrubbed, TierClosedError, WriteOutcome
from tiers.io.codec import Codec
from tiers.io.direct_io import DiskIo
from tiers.lmdb.folder import PAYLOAD_NAME
from tiers.lmdb.scrub import KEYS_AT_ONCE, MARK_NAME, LmdbScrub
from tiers.lmdb.tier import LmdbTier
from tiers.testing import all_keys, assert_holds, assert_misses, fetch, key_of, payload_of, put

ROOT = Path(__file__).resolve().parents[3]
SIZE = 8192
COUNT = 3 * KEYS_AT_ONCE + 7
KEYS = [key_of(number) for number in range(COUNT)]
WEEK = 604_800.0


class SickIo(DiskIo):
    """Reads of these pages fail; with ``everywhere`` all reads fail."""

    def __init__(self) -> None:
        self.pages: set[int] = set()
        self.everywhere = False
        self.reads = 0

    def preadv(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        self.reads += 1
        wanted = range(offset, offset + sum(view.nbytes for view in views), ALIGNMENT)
        if self.everywhere or self.pages & {at // ALIGNMENT for at in wanted}:
            raise OSError(errno.EIO, "planted")
        return super().preadv(fd, views, offset)


def tier_at(folder: Path, io: DiskIo | None = None, **options: Any) -> LmdbTier:
    sizes = {"reserve_bytes": 0, "grow_bytes": 1 << 20, "record_bytes": SIZE}
    return LmdbTier(folder / "tier", 32 << 20, io=io, **sizes, **options)


async def filled(folder: Path, io: DiskIo | None = None, **options: Any) -> LmdbTier:
    tier = tier_at(folder, io, **options)
    await tier.open()
    assert set(await put(tier, KEYS, SIZE)) == {WriteOutcome.OK}
    return tier


def place_of(folder: Path, number: int) -> int:
    """The offset of a record in the payload file."""
    at = (
        (folder / "tier" / PAYLOAD_NAME)
        .read_bytes()
        .find(payload_of(key_of(number), SIZE).tobytes())
    )
    assert at >= 0
    assert at % ALIGNMENT == 0
    return at


def damage(folder: Path, number: int) -> None:
    """Flip a bit of a record under the open tier."""
    flip(folder / "tier" / PAYLOAD_NAME, place_of(folder, number) + 77)


async def scrubbed(tier: LmdbTier, bytes_max: int = 5 * SIZE) -> list[Scrubbed]:
    """Run a pass to its end."""
    found = []
    while (one := await tier.scrub(bytes_max, WEEK)) is not None:
        assert one.trouble == ""
        assert one.payload_bytes <= max(bytes_max, SIZE)
        found.append(one)
    return found


def damaged_in(found: list[Scrubbed]) -> set[bytes]:
    return {key for one in found for key in one.damaged}


@pytest.mark.parametrize("options", [{}, {"compress": True}, {"direct_io": False}])
async def test_a_pass_reads_every_record_once_and_drops_damaged_ones(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    tier = await filled(tmp_path, **options)
    before = [found.key for found in await all_keys(tier)]
    bad = [0, 1, 70, COUNT - 1]
    for number in bad:
        damage(tmp_path, number)
    found = await scrubbed(tier)
    assert sum(one.records for one in found) == COUNT
    assert sum(one.payload_bytes for one in found) == COUNT * SIZE
    assert damaged_in(found) == {key_of(number) for number in bad}
    assert (tier.stats()["scrubbed"], tier.stats()["scrub_damaged"]) == (COUNT, len(bad))
    await assert_misses(tier, [key_of(number) for number in bad], SIZE)
    left = [key for key in before if key not in damaged_in(found)]
    assert [one.key for one in await all_keys(tier)] == left, (
        "a scrub must not count as a use of the other records"
    )
    await assert_holds(tier, left, SIZE)
    tier.check()
    again = [key_of(number) for number in bad]
    assert set(await put(tier, again, SIZE)) == {WriteOutcome.OK}
    await assert_holds(tier, KEYS, SIZE)
    await tier.aclose()


async def test_damage_stays_removed_after_a_restart(tmp_path: Path) -> None:
    tier = await filled(tmp_path)
    damage(tmp_path, 5)
    assert damaged_in(await scrubbed(tier)) == {key_of(5)}
    await tier.aclose()
    tier = tier_at(tmp_path)
    assert (await tier.open()).record_count == COUNT - 1
    await tier.aclose()


async def test_a_pass_continues_where_the_last_server_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next pass begins when it is due."""
    now = [1e9]
    scrub = partial(LmdbScrub, clock=lambda: now[0])
    monkeypatch.setattr("tiers.lmdb.tier.LmdbScrub", scrub)
    read = 0
    tier = await filled(tmp_path)
    for _ in range(1000):
        if read >= COUNT:
            break
        now[0] += 61.0  # the file is written about once a minute
        one = await tier.scrub(5 * SIZE, WEEK)
        assert one is not None
        read += one.records
        await tier.aclose()
        tier = tier_at(tmp_path)
        assert (await tier.open()).record_count == COUNT
    assert read == COUNT, "each record once"
    assert await tier.scrub(5 * SIZE, WEEK) is None
    assert await tier.scrub(5 * SIZE, 60.0) is not None, "a shorter period is over"
    now[0] += WEEK / 2
    assert sum(one.records for one in await scrubbed(tier)) == COUNT - 5
    now[0] += WEEK
    assert sum(one.records for one in await scrubbed(tier)) == COUNT
    await tier.aclose()


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"[]", b"{}", b'{"begun": 1, "last": 7}', b'{"begun": "x", "last": ""}',
     b'{"begun": NaN, "last": "' + b"ff" * 600 + b'"}', b'{"begun": 1e99, "last": ""}'],
)  # fmt: skip
async def test_a_damaged_position_file_only_repeats_a_pass(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tier").mkdir(mode=0o700)
    (tmp_path / "tier" / MARK_NAME).write_bytes(content)
    tier = await filled(tmp_path)
    damage(tmp_path, 5)
    found = await scrubbed(tier)
    if b"ff" * 600 not in content:
        assert damaged_in(found) == {key_of(5)}
    mark = json.loads((tmp_path / "tier" / MARK_NAME).read_bytes())
    assert mark["last"] == ""
    assert mark["begun"] > 1e9
    await tier.aclose()


async def test_an_empty_tier_has_nothing_due(tmp_path: Path) -> None:
    tier = tier_at(tmp_path)
    await tier.open()
    assert await tier.scrub(SIZE, WEEK) == Scrubbed()
    assert await tier.scrub(SIZE, WEEK) is None
    await tier.aclose()
    with pytest.raises(TierClosedError):
        await tier.scrub(SIZE, WEEK)


async def test_a_sector_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    io = SickIo()
    tier = await filled(tmp_path, io)
    io.pages.add(place_of(tmp_path, 9) // ALIGNMENT)
    assert damaged_in(await scrubbed(tier)) == {key_of(9)}
    await tier.aclose()


async def test_a_failing_medium_loses_no_record(tmp_path: Path) -> None:
    io = SickIo()
    tier = await filled(tmp_path, io)
    damage(tmp_path, 1)
    io.everywhere = True
    for _ in range(5):
        one = await tier.scrub(5 * SIZE, WEEK)
        assert one is not None
        assert (one.trouble, one.damaged) == ("its payload file cannot be read", ())
    assert len(await all_keys(tier)) == COUNT
    io.everywhere = False
    assert damaged_in(await scrubbed(tier)) == {key_of(1)}, (
        "the scrub continues at the same position"
    )
    await tier.aclose()


CUT = """
import asyncio, os, sys
from pathlib import Path
from tests.tiers.lmdb.test_scrub import SIZE, WEEK, filled

async def main(folder):
    tier = await filled(folder)
    os.truncate(folder / "tier" / "data.mdb", 2 * 4096)
    print((await tier.scrub(SIZE, WEEK)).trouble, flush=True)
    os._exit(0)

asyncio.run(main(Path(sys.argv[1])))
"""


def test_a_scrub_of_a_truncated_index_does_not_end_the_server(tmp_path: Path) -> None:
    """LMDB would read a page that is missing, which ends the process."""
    command = [sys.executable, "-c", CUT, str(tmp_path)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, f"{child.returncode} {child.stderr}"
    assert "was truncated while in use" in child.stdout


async def test_a_single_wrong_read_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that reads correctly the second time is kept."""
    tier = await filled(tmp_path)
    real, lies = Codec.decode, [True]

    def once(*about: Any) -> bool:
        return False if lies and lies.pop() else real(*about)

    monkeypatch.setattr(Codec, "decode", once)
    assert damaged_in(await scrubbed(tier)) == set()
    assert not lies
    await tier.aclose()


class SlowIo(DiskIo):
    """Lets the loop run while the first read of a scrub is in progress."""

    def __init__(self) -> None:
        self.meanwhile: Any = None

    def preadv(self, fd: int, views: Sequence[Buffer], offset: int) -> int:
        act, self.meanwhile = self.meanwhile, None
        if act is not None:
            act()
        return super().preadv(fd, views, offset)


@pytest.mark.parametrize("happens", ["deleted", "reset", "deleted and written", "cancelled"])
async def test_records_that_change_while_they_are_read_are_not_damage(
    tmp_path: Path, happens: str
) -> None:
    """Extents that are being read are not written to, and removed records are not reported."""
    io = SlowIo()
    tier = await filled(tmp_path, io)
    damage(tmp_path, 0)
    loop = asyncio.get_running_loop()

    async def change() -> None:
        if happens == "cancelled":
            scrubbing.cancel()
        elif happens == "reset":
            await tier.reset(1)
        else:
            await tier.delete(KEYS[:3])
            if "written" in happens:
                await put(tier, [key_of(900 + n) for n in range(600)], SIZE)

    io.meanwhile = lambda: asyncio.run_coroutine_threadsafe(change(), loop).result(PATIENCE_S)
    scrubbing = asyncio.ensure_future(tier.scrub(3 * SIZE, WEEK))
    if happens == "cancelled":
        with pytest.raises(asyncio.CancelledError):
            await scrubbing
        one = await tier.scrub(3 * SIZE, WEEK)
        assert one is not None
        assert one.damaged == (key_of(0),)
    else:
        found = await scrubbing
        assert found is not None
        assert found.damaged == ()
    tier.check()
    new = [key_of(5000 + n) for n in range(3)]
    await put(tier, new, SIZE)
    await assert_holds(tier, new, SIZE)
    await tier.aclose()


async def test_requests_read_while_a_scrub_runs(tmp_path: Path) -> None:
    tier = await filled(tmp_path)
    for number in range(0, COUNT, 9):
        damage(tmp_path, number)
    into = np.empty(SIZE, np.uint8)

    async def ask() -> None:
        for number in range(COUNT):
            outcome, _ = await fetch(tier, key_of(number), into.nbytes)
            lost = (ReadOutcome.CORRUPT, ReadOutcome.MISS)
            assert outcome in (lost if number % 9 == 0 else (ReadOutcome.OK,))

    await asyncio.gather(ask(), scrubbed(tier))
    assert len(await all_keys(tier)) == COUNT - len(range(0, COUNT, 9))
    tier.check()
    await tier.aclose()
