"""The file tier fulfils the contract; temporary, damaged and unknown files are never served."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tiers.base import ReadOutcome, Tier, TierIoError, WriteOutcome
from tiers.files import record_files
from tiers.files.record_files import record_name
from tiers.files.tier import FileTier
from tiers.testing import TierContract, assert_holds, assert_misses, fetch, key_of, put

SIZE = 10_000
KEYS = [key_of(n) for n in range(6)]


class TestFileTier(TierContract):
    capacity_bytes = 4 << 20

    def make_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return FileTier(folder, capacity_bytes)


async def reopened(folder: Path, **options: int) -> FileTier:
    tier = FileTier(folder, 1 << 20, **options)
    await tier.open()
    return tier


async def filled(folder: Path) -> Path:
    """The folder of a closed tier's records, which contains ``KEYS``."""
    tier = await reopened(folder)
    assert await put(tier, KEYS, SIZE) == [WriteOutcome.OK] * 6
    await tier.aclose()
    return folder / "epoch-0"


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[7777] ^= 4
    path.write_bytes(raw)


def swap(path: Path) -> None:
    other = path.with_name(record_name(KEYS[1]))
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two[:4096] + one[4096:])
    other.write_bytes(one[:4096] + two[4096:])


@pytest.mark.parametrize("damage", [flip, swap])
async def test_damage_while_open_is_corrupt(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    records = await filled(tmp_path / "tier")
    tier = await reopened(tmp_path / "tier")
    damage(records / record_name(KEYS[0]))
    assert (await fetch(tier, KEYS[0], SIZE))[0] is ReadOutcome.CORRUPT
    await assert_misses(tier, KEYS[:1], SIZE)
    assert await put(tier, KEYS[:1], SIZE) == [WriteOutcome.OK]
    await assert_holds(tier, KEYS[:1], SIZE)
    await tier.aclose()


async def test_without_the_check_damage_would_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = await filled(tmp_path / "tier")
    flip(records / record_name(KEYS[0]))
    monkeypatch.setattr(record_files, "verify", lambda *_: True)
    tier = await reopened(tmp_path / "tier")
    assert (await fetch(tier, KEYS[0], SIZE))[0] is ReadOutcome.OK
    await tier.aclose()


async def test_incomplete_records_are_removed_at_open(tmp_path: Path) -> None:
    records = await filled(tmp_path / "tier")
    os.truncate(records / record_name(KEYS[0]), 5000)
    os.rename(records / record_name(KEYS[1]), records / record_name(KEYS[0] + b"x"))
    (records / (record_name(KEYS[2]) + ".1.tmp")).write_bytes(b"half")
    (records / record_name(b"random")).write_bytes(os.urandom(9000))
    (records / record_name(b"link")).symlink_to(records / record_name(KEYS[3]))
    tier = await reopened(tmp_path / "tier")
    assert tier.stats()["dropped_at_open"] == 5
    await assert_misses(tier, KEYS[:2], SIZE)
    await assert_holds(tier, KEYS[2:], SIZE)
    names = {path.name for path in records.iterdir()}  # a test
    assert names == {record_name(key) for key in KEYS[2:]}
    await tier.aclose()


async def test_a_lost_epoch_file_forgets_everything(tmp_path: Path) -> None:
    """The epoch is unknown then, so nothing may be served."""
    await filled(tmp_path / "tier")
    for damage in (lambda path: path.write_text("x"), lambda path: path.unlink()):
        damage(tmp_path / "tier" / "epoch")
        tier = await reopened(tmp_path / "tier")
        await assert_misses(tier, KEYS, SIZE)
        await put(tier, KEYS, SIZE)
        await tier.aclose()


async def test_another_rank_sees_nothing(tmp_path: Path) -> None:
    await filled(tmp_path / "tier")
    tier = await reopened(tmp_path / "tier", rank=1)
    await assert_misses(tier, KEYS, SIZE)
    await tier.aclose()


async def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    tier = await reopened(tmp_path / "tier")
    with pytest.raises(TierIoError, match=f"process {os.getpid()}"):
        await FileTier(tmp_path / "tier", 1 << 20).open()
    await tier.aclose()
