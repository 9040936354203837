"""How an LMDB tier treats the files that it finds: intact, old, damaged, or of another server."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tiers.base import ReadOutcome, TierIoError, WriteOutcome
from tiers.io import codec
from tiers.io.direct_io import DiskIo
from tiers.lmdb.folder import PAYLOAD_NAME
from tiers.lmdb.options import Recovery
from tiers.lmdb.tier import LmdbTier
from tiers.testing import assert_holds, assert_misses, fetch, key_of, put

SIZE = 12_000
CAPACITY = 24 << 20
DAMAGED = int(os.environ.get("KVTIERS_DAMAGED", "1000"))  # number of records of each kind
KEYS = [key_of(n) for n in range(30)]
SEED = 20261121


def tier_at(folder: Path, capacity: int = CAPACITY, **options: object) -> LmdbTier:
    return LmdbTier(folder / "tier", capacity, **{"reserve_bytes": 0, **options})


async def filled(folder: Path, **options: object) -> Path:
    """Fill a tier with ``KEYS`` and close it. Returns its folder."""
    tier = tier_at(folder, **options)
    await tier.open()
    assert await put(tier, KEYS, SIZE) == [WriteOutcome.OK] * len(KEYS)
    await tier.aclose()
    return folder / "tier"


async def assert_starts_empty(folder: Path, **options: object) -> None:
    """The tier opens empty, reports that it moved files aside, and works."""
    tier = tier_at(folder, **options)
    info = await tier.open()
    assert info.record_count == 0
    assert tier.stats()["quarantined"] == 1
    assert len(list((folder / "tier").glob("quarantine-*"))) == 1
    await assert_misses(tier, KEYS, SIZE)
    assert await put(tier, KEYS, SIZE) == [WriteOutcome.OK] * len(KEYS)
    await assert_holds(tier, KEYS, SIZE)
    await tier.aclose()
    tier = tier_at(folder, **options)
    assert (await tier.open()).record_count == len(KEYS)
    await assert_holds(tier, KEYS, SIZE)
    await tier.aclose()


def cut(path: Path, length: int) -> None:
    os.truncate(path, length)


def scribble(path: Path, offset: int, length: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(random.Random(SEED).randbytes(length))


# -- the index ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 100, 4096, 5000, 8191, 8192, 12288, 20000, 40960])
async def test_a_truncated_index_is_moved_aside(tmp_path: Path, length: int) -> None:
    folder = await filled(tmp_path)
    cut(folder / "data.mdb", length)
    await assert_starts_empty(tmp_path)


@pytest.mark.parametrize("page", range(2, 8))
@pytest.mark.parametrize("offset", [0, 16, 2000])
async def test_random_bytes_inside_the_index(tmp_path: Path, page: int, offset: int) -> None:
    """Whatever is overwritten, the tier never crashes and never returns a wrong byte."""
    folder = await filled(tmp_path)
    scribble(folder / "data.mdb", page * 4096 + offset, 2000)
    tier = tier_at(tmp_path)
    await tier.open()
    for key in KEYS:
        outcome, _ = await fetch(tier, key, SIZE)
        assert outcome in (ReadOutcome.OK, ReadOutcome.MISS, ReadOutcome.CORRUPT)
        if outcome is ReadOutcome.OK:
            await assert_holds(tier, [key], SIZE)
    await tier.aclose()


async def test_random_bytes_as_index(tmp_path: Path) -> None:
    folder = await filled(tmp_path)
    scribble(folder / "data.mdb", 0, 1 << 20)
    await assert_starts_empty(tmp_path)


async def test_only_the_walk_protects_an_index_of_the_right_length(tmp_path: Path) -> None:
    """Both meta pages are intact and a later page is not: only the walk can detect that."""
    folder = await filled(tmp_path)
    for page in range(2, 12):
        scribble(folder / "data.mdb", page * 4096, 4096)
    await assert_starts_empty(tmp_path)


@pytest.mark.parametrize("is_empty", [False, True])
async def test_a_missing_index_is_damage(tmp_path: Path, is_empty: bool) -> None:
    """The payload file contains data, so this cannot be a new tier."""
    folder = await filled(tmp_path)
    (folder / "data.mdb").unlink()
    if is_empty:
        (folder / "data.mdb").touch()
    before = (folder / PAYLOAD_NAME).read_bytes()
    with pytest.raises(TierIoError, match="is empty" if is_empty else "is missing"):
        await tier_at(tmp_path, recovery=Recovery.STRICT).open()
    assert (folder / PAYLOAD_NAME).read_bytes() == before
    await assert_starts_empty(tmp_path)


# -- the payload file --------------------------------------------------------------------------


async def test_records_beyond_the_end_are_forgotten_and_the_others_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = await filled(tmp_path)
    cut(folder / PAYLOAD_NAME, 4096 * (1 + 3 * 10 + 2))
    tier = tier_at(tmp_path)
    assert (await tier.open()).record_count == 10
    assert tier.stats()["dropped_at_open"] == 20
    assert "20 records in " in caplog.text
    assert "encrypt" not in caplog.text
    await tier.aclose()
    tier = tier_at(tmp_path)
    assert (await tier.open()).record_count == 10
    assert tier.stats()["dropped_at_open"] == 0, "the records have left the index"
    await assert_holds(tier, KEYS[:10], SIZE)
    await assert_misses(tier, KEYS[10:], SIZE)
    assert await put(tier, KEYS, SIZE) == [WriteOutcome.OK] * len(KEYS)
    await assert_holds(tier, KEYS, SIZE)
    await tier.aclose()


async def test_a_payload_file_cut_off_while_open(tmp_path: Path) -> None:
    tier = tier_at(tmp_path)
    await tier.open()
    await put(tier, KEYS, SIZE)
    cut(tmp_path / "tier" / PAYLOAD_NAME, 4096 * (1 + 3 * 10 + 2))
    for key in KEYS[10:]:
        outcome, _ = await fetch(tier, key, SIZE)
        assert outcome is ReadOutcome.CORRUPT
    await assert_holds(tier, KEYS[:10], SIZE)
    await tier.aclose()


@pytest.mark.parametrize("length", [0, 1, 5000, 1 << 20])
async def test_a_payload_file_of_random_bytes_is_moved_aside(tmp_path: Path, length: int) -> None:
    folder = await filled(tmp_path)
    raw = random.Random(SEED).randbytes(length)
    (folder / PAYLOAD_NAME).write_bytes(raw)
    await assert_starts_empty(tmp_path)
    if length:
        [kept] = (folder).glob(f"quarantine-*/{PAYLOAD_NAME}")
        assert kept.read_bytes() == raw


async def test_the_payload_file_of_another_tier(tmp_path: Path) -> None:
    folder = await filled(tmp_path / "one")
    other = await filled(tmp_path / "two")
    (other / PAYLOAD_NAME).replace(folder / PAYLOAD_NAME)
    await assert_starts_empty(tmp_path / "one")


async def test_a_symbolic_link_as_payload_file_is_not_followed(tmp_path: Path) -> None:
    folder = await filled(tmp_path)
    (folder / PAYLOAD_NAME).rename(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    (folder / PAYLOAD_NAME).symlink_to(tmp_path / "elsewhere")
    await assert_starts_empty(tmp_path)
    assert (tmp_path / "elsewhere").read_bytes() == before


# -- damage to single records ------------------------------------------------------------------

PAGES_PER_RECORD = 3


def flip_bits(payload: Path, count: int) -> None:
    rng = random.Random(SEED)
    with payload.open("r+b") as file:
        for record in range(count):
            at = 4096 * (1 + PAGES_PER_RECORD * record) + rng.randrange(SIZE)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def swap_records(payload: Path, count: int) -> None:
    data = bytearray(payload.read_bytes())
    length = 4096 * PAGES_PER_RECORD
    for record in range(0, count, 2):
        one = 4096 + length * record
        two = one + length
        data[one:two], data[two : two + length] = data[two : two + length], data[one:two]
    payload.write_bytes(data)


def zero_tails(payload: Path, count: int) -> None:
    rng = random.Random(SEED)
    with payload.open("r+b") as file:
        for record in range(count):
            kept = rng.randrange(SIZE - 8)
            file.seek(4096 * (1 + PAGES_PER_RECORD * record) + kept)
            file.write(bytes(SIZE - kept))


DAMAGE = [flip_bits, swap_records, zero_tails]


async def put_all(tier: LmdbTier, keys: list[bytes]) -> None:
    for part in (keys[at : at + 1000] for at in range(0, len(keys), 1000)):
        assert await put(tier, part, SIZE) == [WriteOutcome.OK] * len(part)


async def damaged_outcomes(
    folder: Path, damage: Callable[[Path, int], None], count: int
) -> list[ReadOutcome]:
    keys = [key_of(n) for n in range(count)]
    capacity = max(CAPACITY, 6 * SIZE * count)  # the index has space for that many records too
    tier = tier_at(folder, capacity)
    await tier.open()
    await put_all(tier, keys)
    await tier.aclose()
    damage(folder / "tier" / PAYLOAD_NAME, count)
    tier = tier_at(folder, capacity)
    assert (await tier.open()).record_count == count
    into = [np.zeros(SIZE, np.uint8) for _ in keys]
    outcomes = await tier.read(keys, into)
    again = await tier.read(keys, into)
    assert all(
        second is (ReadOutcome.MISS if first is ReadOutcome.CORRUPT else ReadOutcome.OK)
        for first, second in zip(outcomes, again, strict=True)
    ), "a damaged record must be removed from the index"
    await put_all(tier, keys)
    await tier.aclose()
    return outcomes


@pytest.mark.parametrize("damage", DAMAGE)
async def test_every_damaged_record_is_detected(
    tmp_path: Path, damage: Callable[[Path, int], None]
) -> None:
    outcomes = await damaged_outcomes(tmp_path, damage, DAMAGED)
    assert outcomes == [ReadOutcome.CORRUPT] * DAMAGED


@pytest.mark.parametrize("damage", DAMAGE)
async def test_without_the_check_damage_would_be_served(
    tmp_path: Path, damage: Callable[[Path, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without verification no damage is detected, so the test above can fail."""
    monkeypatch.setattr(codec, "verify", lambda *_: True)
    outcomes = await damaged_outcomes(tmp_path, damage, 20)
    assert outcomes == [ReadOutcome.OK] * 20


# -- modes, identity, epochs -------------------------------------------------------------------


async def test_strict_refuses_damage_and_changes_nothing(tmp_path: Path) -> None:
    folder = await filled(tmp_path)
    cut(folder / "data.mdb", 20000)
    before = (folder / "data.mdb").read_bytes()
    with pytest.raises(TierIoError, match="damaged"):
        await tier_at(tmp_path, recovery=Recovery.STRICT).open()
    assert (folder / "data.mdb").read_bytes() == before
    assert not list(folder.glob("quarantine-*"))


async def test_strict_refuses_lost_records(tmp_path: Path) -> None:
    folder = await filled(tmp_path)
    cut(folder / PAYLOAD_NAME, 4096 * 20)
    with pytest.raises(TierIoError, match="records"):
        await tier_at(tmp_path, recovery=Recovery.STRICT).open()
    tier = tier_at(tmp_path)
    assert (await tier.open()).record_count > 0
    await tier.aclose()


async def test_recovery_off_starts_empty(tmp_path: Path) -> None:
    await filled(tmp_path)
    tier = tier_at(tmp_path, recovery=Recovery.OFF)
    assert (await tier.open()).record_count == 0
    await tier.aclose()


async def test_another_namespace_or_rank_never_sees_the_records(tmp_path: Path) -> None:
    await filled(tmp_path, namespace=bytes(range(16)))
    with pytest.raises(TierIoError, match="000102"):
        await tier_at(tmp_path, recovery=Recovery.STRICT).open()
    await assert_starts_empty(tmp_path, namespace=bytes(range(16)), rank=1)


async def test_a_later_epoch_at_open_forgets_earlier_records(tmp_path: Path) -> None:
    await filled(tmp_path)
    tier = tier_at(tmp_path, epoch=7)
    assert (await tier.open()).record_count == 0
    assert tier.epoch == 7
    await put(tier, KEYS[:3], SIZE)
    await tier.aclose()
    tier = tier_at(tmp_path, epoch=2)
    assert (await tier.open()).record_count == 3
    assert tier.epoch == 7
    await tier.aclose()


async def test_files_are_private(tmp_path: Path) -> None:
    folder = await filled(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name


CHILD = """
import asyncio, sys
from tiers.lmdb.tier import LmdbTier
async def main():
    tier = LmdbTier(sys.argv[1], 16 << 20, reserve_bytes=0)
    await tier.open()
    print("open", flush=True)
    sys.stdin.read()
asyncio.run(main())
"""


async def test_two_processes_on_one_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path / "tier")]
    # This test blocks on the other process on purpose: nothing else runs in this loop.
    with subprocess.Popen(  # noqa: ASYNC220  # nothing else runs on this loop
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"open\n"
        with pytest.raises(TierIoError, match=f"process {owner.pid}"):
            await tier_at(tmp_path).open()
        owner.kill()
    tier = tier_at(tmp_path)
    await tier.open()
    with pytest.raises(TierIoError, match=f"process {os.getpid()}"):
        await tier_at(tmp_path).open()
    await tier.aclose()


async def test_a_tier_is_not_used_across_a_fork(tmp_path: Path) -> None:
    tier = tier_at(tmp_path)
    await tier.open()
    reading = tier.read(KEYS, [np.zeros(SIZE, np.uint8) for _ in KEYS])
    pid = os.fork()
    if not pid:
        try:
            reading.send(None)
        except TierIoError:
            os._exit(42)
        os._exit(1)
    _, status = os.waitpid(pid, 0)  # noqa: ASYNC222  # the child ends at once
    assert os.waitstatus_to_exitcode(status) == 42
    assert await reading == [ReadOutcome.MISS] * len(KEYS)
    await tier.aclose()


class NoDirectIo(DiskIo):
    """A file system without ``O_DIRECT``."""

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return super().open(path, flags)


async def test_without_direct_io_it_is_buffered(tmp_path: Path) -> None:
    tier = LmdbTier(tmp_path / "tier", CAPACITY, reserve_bytes=0, io=NoDirectIo())
    await tier.open()
    assert tier.stats()["direct_io"] == 0
    await put(tier, KEYS, SIZE)
    await assert_holds(tier, KEYS, SIZE)
    await tier.aclose()
