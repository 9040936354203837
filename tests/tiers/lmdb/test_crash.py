"""Killed processes and power cuts: no stored record is lost, none is invented, none is wrong.

The suite runs a few of each. ``KVTIERS_KILLS=50 KVTIERS_POWER_CUTS=40`` runs the full numbers.
"""

from __future__ import annotations

import asyncio
import os
import random
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests.patience import PATIENCE_S
from tiers.base import ReadOutcome, WriteOutcome
from tiers.lmdb.folder import PAYLOAD_NAME, open_or_quarantine
from tiers.lmdb.index import check_file
from tiers.lmdb.options import Recovery
from tiers.lmdb.tier import LmdbTier
from tiers.testing import all_keys, fetch, key_of, payload_of, put

KILLS = int(os.environ.get("KVTIERS_KILLS", "4"))
POWER_CUTS = int(os.environ.get("KVTIERS_POWER_CUTS", "3"))
SEED = int(os.environ.get("KVTIERS_SEED", "9"))
SIZE = 150_000
CAPACITY = 24 << 20
KNOWN_FILES = {"data.mdb", "lock.mdb", "owner.lock", "payload.data"}
STORED_MAX = 120
"""Maximum number of records that a child has stored when it is killed."""
BATCH = 6
"""Number of records that the child has in flight at once."""
CHILD = Path(__file__).with_name("crash_child.py")


@dataclass
class Expected:
    """The records that the child's log promises."""

    stored: set[int] = field(default_factory=set)
    allowed: set[int] = field(default_factory=set)
    next_number: int = 0

    def read(self, log: str) -> None:
        for line in log.splitlines(keepends=True):
            if not line.endswith("\n"):
                break  # cut off by the kill
            sign, number = line[0], int(line[1:])
            if sign == "+":
                self.stored.add(number)
                self.allowed.add(number)
                self.next_number = number + 1
            elif sign == "-":
                self.stored.discard(number)
            elif sign == "!":
                self.stored.clear()
            elif sign == "=":
                self.allowed.clear()

    def restart(self, first: int, present: set[int]) -> None:
        """Begin the next run with the records found."""
        self.stored, self.allowed, self.next_number = set(present), set(present), first

    @property
    def in_flight(self) -> set[int]:
        """Records that may be stored although the child has not reported them."""
        return set(range(self.next_number, self.next_number + BATCH))


@contextmanager
def running_child(folder: Path, first: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a child that has opened its tier; it is killed when the context ends."""
    command = [sys.executable, str(CHILD), str(folder), str(CAPACITY), str(SIZE), str(first)]
    environment = {**os.environ, "PYTHONPATH": str(CHILD.parents[3])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline().startswith(b"@"), "the child could not open the tier"
            os.set_blocking(child.stdout.fileno(), False)
            yield child
        finally:
            child.kill()
            child.wait()


def collect(child: subprocess.Popen[bytes], stored: int) -> bytes:
    """Read the child's output until it has stored this many records, and perhaps a few more."""
    assert child.stdout is not None
    said = b""
    while said.count(b"+") < stored:
        assert select.select([child.stdout], [], [], PATIENCE_S)[0], "nothing is stored"
        part = child.stdout.read()
        assert part, "the child has ended without being killed"
        said += part
    return said


def check_after_crash(folder: Path, expected: Expected) -> set[int]:
    """Check the files, reopen, and compare the result with the promises. Returns the numbers
    present."""
    assert {path.name for path in folder.iterdir()} <= KNOWN_FILES, "stray files"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= CAPACITY + (64 << 10)
    return asyncio.run(compare(folder, expected))


async def compare(folder: Path, expected: Expected) -> set[int]:
    tier = LmdbTier(folder, CAPACITY, reserve_bytes=0, grow_bytes=4 << 20)
    info = await tier.open()
    assert tier.stats()["quarantined"] == 0
    assert tier.stats()["dropped_at_open"] == 0
    present = {int.from_bytes(stored.key[:32], "big") for stored in await all_keys(tier)}
    assert info.used_bytes == len(present) * tier.footprint_bytes(SIZE)
    lost = expected.stored - present
    assert not lost, f"lost {sorted(lost)}"
    invented = present - expected.allowed - expected.in_flight
    assert not invented, f"invented {sorted(invented)}"
    for number in present:
        outcome, data = await fetch(tier, key_of(number), SIZE)
        assert outcome is ReadOutcome.OK, number
        assert np.array_equal(data, payload_of(key_of(number), SIZE)), f"wrong bytes of {number}"
    tier.check()
    await tier.aclose()
    return present


def test_kill_9_during_writes(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    expected = Expected()
    folder = tmp_path / "tier"
    present: set[int] = set()
    for cycle in range(KILLS):
        first = (cycle + 1) * 10**6
        expected.restart(first, present)
        with running_child(folder, first) as child:
            log = collect(child, rng.randrange(STORED_MAX))
            child.send_signal(signal.SIGKILL)
            child.wait()
            assert child.stdout is not None
            log += child.stdout.read() or b""
        expected.read(log.decode())
        try:
            present = check_after_crash(folder, expected)
        except AssertionError as error:
            error.add_note(f"cycle {cycle}, KVTIERS_SEED={SEED}")
            raise


@pytest.fixture
def loop_mount(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A freshly formatted ext4 image: the image and its mount point."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        pytest.skip("needs root, and mkfs.ext4: apt-get install e2fsprogs")
    image, point = tmp_path / "image", tmp_path / "mnt"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(96 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=False).returncode:
        pytest.skip("needs permission to mount a loop device")
    try:
        yield image, point
    finally:
        subprocess.run(["umount", str(point)], check=True)


def test_power_cuts(loop_mount: tuple[Path, Path], tmp_path: Path) -> None:
    """A copy of the image under a stopped writer is in the state after a power cut."""
    image, point = loop_mount
    rng = random.Random(SEED)
    expected = Expected()
    copy, second = tmp_path / "copy", tmp_path / "mnt2"
    second.mkdir()
    checked = 0
    with running_child(point / "tier", 0) as child:
        for _ in range(POWER_CUTS):
            log = collect(child, rng.randrange(STORED_MAX))
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            assert child.stdout is not None
            expected.read((log + (child.stdout.read() or b"")).decode())
            subprocess.run(["cp", "--sparse=always", str(image), str(copy)], check=True)
            subprocess.run(["mount", "-o", "loop", str(copy), str(second)], check=True)
            try:
                present = check_after_crash(second / "tier", expected)
            finally:
                subprocess.run(["umount", str(second)], check=True)
            checked += len(present)
            child.send_signal(signal.SIGCONT)
    assert checked > POWER_CUTS


def test_a_reset_is_durable_at_once(tmp_path: Path) -> None:
    """If the process is killed right after ``reset`` returned, no earlier record comes back."""
    code = (
        "import asyncio, os, signal, sys\n"
        "from tiers.lmdb.tier import LmdbTier\n"
        "from tiers.testing import key_of, put\n"
        "async def main():\n"
        "    tier = LmdbTier(sys.argv[1], 16 << 20, reserve_bytes=0)\n"
        "    await tier.open()\n"
        "    await put(tier, [key_of(n) for n in range(50)], 5000)\n"
        "    await tier.reset(1)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    folder = tmp_path / "tier"
    ended = subprocess.run([sys.executable, "-c", code, str(folder)], check=False)
    assert ended.returncode == -signal.SIGKILL

    async def check() -> None:
        tier = LmdbTier(folder, 16 << 20, reserve_bytes=0)
        assert (await tier.open()).record_count == 0
        assert tier.epoch == 1
        assert await put(tier, [key_of(1)], 5000) == [WriteOutcome.OK]
        await tier.aclose()

    asyncio.run(check())


async def test_a_start_killed_before_the_index_existed_is_not_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Either the first start, or one that had moved a damaged index aside."""
    keys, folder = [key_of(number) for number in range(4)], tmp_path / "tier"
    strict = {"recovery": Recovery.STRICT, "reserve_bytes": 0}
    tier = LmdbTier(folder, CAPACITY, **strict)
    await tier.open()
    await put(tier, keys, SIZE)
    await tier.aclose()
    os.truncate(folder / PAYLOAD_NAME, 4096)
    (folder / "data.mdb").unlink()
    tier = LmdbTier(folder, CAPACITY, **strict)
    assert (await tier.open()).record_count == 0
    assert tier.stats()["quarantined"] == 0
    await put(tier, keys, SIZE)
    await tier.aclose()
    os.truncate(folder / "data.mdb", 100)

    def killed() -> None:
        raise KeyboardInterrupt

    calls = iter([lambda: check_file(folder), killed])
    with pytest.raises(KeyboardInterrupt):
        open_or_quarantine(folder, lambda: next(calls)(), strict=False)
    assert "100 bytes" in caplog.text
    caplog.clear()
    tier = LmdbTier(folder, CAPACITY, **strict)
    assert (await tier.open()).record_count == 0
    assert (tier.stats()["quarantined"], caplog.text) == (0, "")
    await tier.aclose()
