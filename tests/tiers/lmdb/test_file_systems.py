"""The LMDB tier on small, separate file systems: full, read-only, gone. Needs root to mount."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiers.base import TierError, TierIoError, WriteOutcome
from tiers.lmdb.tier import LmdbTier
from tiers.testing import assert_holds, key_of, put

SIZE = 20_000
KEYS = [key_of(n) for n in range(12)]


def mounted(point: Path, *arguments: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    point.mkdir()
    if subprocess.run(["mount", *arguments, str(point)], check=False).returncode:
        pytest.skip("needs permission to mount")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    point = tmp_path / "small"
    mounted(point, "-t", "tmpfs", "-o", "size=8m,mode=700", "none")
    yield point
    subprocess.run(["umount", str(point)], check=True)


async def test_a_full_disk_is_an_outcome_and_temporary(small_disk: Path) -> None:
    """Other files fill the disk: writes are FULL, reads continue, and freed space is used again."""
    tier = LmdbTier(small_disk / "tier", 32 << 20, reserve_bytes=0, grow_bytes=1 << 20)
    await tier.open()
    assert await put(tier, KEYS, SIZE) == [WriteOutcome.OK] * 12
    free = shutil.disk_usage(small_disk).free
    (small_disk / "others").write_bytes(bytes(free))  # a test
    outcomes = await put(tier, [key_of(100 + n) for n in range(60)], SIZE)
    assert WriteOutcome.FULL in outcomes
    assert outcomes[: outcomes.index(WriteOutcome.FULL)].count(WriteOutcome.OK) > 0
    await assert_holds(tier, KEYS, SIZE)
    await tier.delete(KEYS[:6])
    await tier.touch(KEYS[6:])
    assert await put(tier, KEYS[:6], SIZE) == [WriteOutcome.OK] * 6
    (small_disk / "others").unlink()  # a test
    assert await put(tier, [key_of(500 + n) for n in range(60)], SIZE) == [WriteOutcome.OK] * 60
    tier.check()
    await tier.aclose()


async def test_a_disk_too_small_for_the_tier(small_disk: Path) -> None:
    with pytest.raises(TierIoError):
        await LmdbTier(small_disk / "tier", 4 << 30, reserve_bytes=0).open()
    tier = LmdbTier(small_disk / "tier", 16 << 20, reserve_bytes=0, grow_bytes=1 << 20)
    await tier.open()
    assert await put(tier, KEYS, SIZE) == [WriteOutcome.OK] * 12
    await tier.aclose()


@pytest.fixture
def own_disk(tmp_path: Path) -> Iterator[Path]:
    """A small, separate ext4 on a loop device."""
    if not shutil.which("mkfs.ext4"):
        pytest.skip("needs mkfs.ext4: apt-get install e2fsprogs")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    point = tmp_path / "own"
    mounted(point, "-o", "loop", str(image))
    yield point
    subprocess.run(["umount", str(point)], check=True)


def remount(point: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(point)], check=True)


async def test_a_read_only_disk_cannot_be_opened(own_disk: Path) -> None:
    tier = LmdbTier(own_disk / "tier", 16 << 20, reserve_bytes=0)
    await tier.open()
    await put(tier, KEYS, SIZE)
    await tier.aclose()
    remount(own_disk, "ro")
    with pytest.raises(TierIoError):
        await tier.open()
    remount(own_disk, "rw")
    await tier.open()
    await assert_holds(tier, KEYS, SIZE)
    await tier.aclose()


async def test_a_disk_that_becomes_read_only_while_open(own_disk: Path) -> None:
    """By default ext4 becomes read-only after an internal error: reads continue, writes fail."""
    remount(own_disk, "errors=remount-ro")
    tier = LmdbTier(own_disk / "tier", 16 << 20, reserve_bytes=0)
    await tier.open()
    await put(tier, KEYS, SIZE)
    try:
        turn_read_only(own_disk)
        try:
            new = [key_of(100 + n) for n in range(4)]
            assert WriteOutcome.OK not in await put(tier, new, SIZE)
            await assert_holds(tier, KEYS, SIZE)
        except TierIoError as error:
            assert "open it again" in str(error)  # noqa: PT017  # it may also go on reading
    finally:
        await tier.aclose()


def turn_read_only(point: Path) -> None:
    """Make ext4 report an internal error; from then on it rejects writes."""
    number = point.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve().name
    try:
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("1")
    except OSError:
        pytest.skip("needs an ext4 that can be made to report an error")
    with pytest.raises(OSError, match="Read-only"):
        (point / "probe").touch()


EXT4_IOC_SHUTDOWN = 0x8004587D


async def test_a_file_system_that_shuts_down_under_the_tier(own_disk: Path) -> None:
    """ext4 may shut down after an error: then every write fails."""
    tier = LmdbTier(own_disk / "tier", 16 << 20, reserve_bytes=0)
    await tier.open()
    await put(tier, KEYS, SIZE)
    fd = os.open(own_disk, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, (2).to_bytes(4, "little"))
    except OSError:
        pytest.skip("needs a file system that can be shut down")
    finally:
        os.close(fd)
    messages: list[str] = []
    for _ in range(3):
        try:
            outcomes = await put(tier, [key_of(100 + n) for n in range(4)], SIZE)
            assert WriteOutcome.OK not in outcomes
            await tier.delete(KEYS[:1])
        except TierError as error:
            messages.append(str(error))
    assert all("open it again" in message for message in messages)
    await tier.aclose()
