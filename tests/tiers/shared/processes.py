"""Several processes over one tier's folder, observed from outside, and faults to plant in them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.patience import PATIENCE_S
from tiers.base import ALIGNMENT, ReadOutcome, SharedTier, Tier
from tiers.files import shared_folder
from tiers.files.shared_tier import SharedFileTier
from tiers.io.direct_io import DiskIo
from tiers.lmdb.shared import files as shared_files
from tiers.lmdb.shared import members as members
from tiers.lmdb.shared import transaction as shared_changes
from tiers.lmdb.shared.tier import SharedLmdbTier
from tiers.testing import fetch, key_of, payload_of

CHILD = Path(__file__).with_name("child.py")


def make_tier(kind: str, folder: str | Path, capacity_bytes: int, io: DiskIo | None = None) -> Tier:
    if kind.endswith("file"):
        return SharedFileTier(folder, capacity_bytes, depth=4)
    return SharedLmdbTier(folder, capacity_bytes, reserve_bytes=0, grow_bytes=2 << 20, io=io)


def _grow_without_limit(files: shared_files.SharedLmdbFiles, file_pages: int, pages: int) -> int:
    files.file.grow((file_pages + pages) * ALIGNMENT)
    return pages


_evict = shared_changes.WriteTransaction.evict


def _evict_all(changes: shared_changes.WriteTransaction, _free_pages: int, _records: int) -> int:
    return _evict(changes, 1 << 40, 0)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "no-rollback": (shared_changes.WriteTransaction, "roll_back", lambda *_: 0),
    "all-live": (members.Member, "is_alive", lambda *_: True),
    "no-reader-check": (shared_changes, "READER_CHECK_EVERY", 1 << 40),
    "no-cap-lmdb": (shared_files.SharedLmdbFiles, "grow", _grow_without_limit),
    "evicts-all": (shared_changes.WriteTransaction, "evict", _evict_all),
    "no-cap": (shared_folder.SharedFolder, "_make_space", lambda *_: True),
    "no-sweep": (shared_folder.SharedFolder, "_is_stray", lambda *_: False),
}
"""The attribute of the product code that each fault replaces, and its replacement."""


def plant(fault: str) -> None:
    """Plant a fault in the product code of this process, for as long as it lives."""
    if fault != "none":
        owner, name, instead = FAULTS[fault]
        setattr(owner, name, instead)


class Child:
    """A running ``child``; ``log`` is its output so far."""

    def __init__(self, kind: str, folder: Path, number: int, *arguments: object) -> None:
        command = [sys.executable, str(CHILD), kind, str(folder)]
        capacity_bytes, size, count, fault = arguments
        command += [str(a) for a in (capacity_bytes, size, number, count, fault)]
        environment = {**os.environ, "PYTHONPATH": str(CHILD.parents[3])}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.log = ""

    def listen(self) -> None:
        """Read the output of the process so far."""
        assert self.process.stdout is not None
        self.log += (self.process.stdout.read() or b"").decode()

    def said(self, sign: str) -> list[int]:
        lines = self.log.splitlines(keepends=True)
        return [int(line[1:]) for line in lines if line[0] == sign and line.endswith("\n")]

    def go_on(self) -> None:
        """Let the process begin; the second call lets it begin the second half."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"b")
        self.process.stdin.flush()

    def has_stored(self, count: int) -> bool:
        """Return True if it has stored this many records, or has reached its middle before that."""
        return len(self.said("+")) >= count or len(self.said("@")) > 1

    def kill(self) -> None:
        """Kill it at once, wherever it is."""
        self.process.kill()
        self.process.wait()
        self.listen()

    def leave(self) -> None:
        """Let it close its tier and end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(PATIENCE_S) == 0
        self.listen()


@contextmanager
def children(*wanted: Child) -> Iterator[list[Child]]:
    """Start these children together; they are killed at the end at the latest."""
    try:
        watch(list(wanted), lambda: all(child.said("@") for child in wanted), lambda: None)
        for child in wanted:
            child.go_on()
        yield list(wanted)
    finally:
        for child in wanted:
            child.kill()
            for pipe in (child.process.stdin, child.process.stdout):
                assert pipe is not None
                pipe.close()


def watch(group: list[Child], until: Callable[[], bool], sample: Callable[[], None]) -> None:
    """Call ``sample`` repeatedly until a condition holds. Raises ``TimeoutError``, and
    ``ChildProcessError`` as soon as a child has ended with an error."""
    deadline = time.monotonic() + PATIENCE_S
    while not until():
        for child in group:
            child.listen()
            if (child.process.poll() or 0) > 0:
                raise ChildProcessError(f"{child.process.args} ended: {child.process.returncode}")
        sample()
        if time.monotonic() > deadline:
            raise TimeoutError("the children do not get there")
        time.sleep(0.002)


def bytes_of(folder: Path) -> int:
    """Return the larger of length and blocks of all files, summed up."""
    total = 0
    for parent, _folders, files in os.walk(folder):
        for name in files:
            try:
                found = os.lstat(os.path.join(parent, name))
            except FileNotFoundError:
                continue  # removed meanwhile
            total += max(found.st_size, found.st_blocks * 512)
    return total


async def check_records(
    tier: SharedTier, by_child: list[list[int]], size: int, fit: int | None
) -> None:
    """Check the records that each child has stored, oldest first. Only the oldest may be evicted,
    and only if there is a limit: with ``fit``, the number of records for which there is space, most
    of that space must be in use."""
    found = 0
    for stored in by_child:
        there = await tier.present([key_of(number) for number in stored])
        first = there.index(True) if True in there else len(stored)
        assert fit is not None or not first, f"{stored[:first]} are lost"
        assert all(there[first:]), "evicted, but not the oldest"
        for number in stored[first:]:
            outcome, data = await fetch(tier, key_of(number), size)
            assert outcome is ReadOutcome.OK, f"{number} is lost"
            assert np.array_equal(data, payload_of(key_of(number), size)), f"wrong: {number}"
        found += len(stored) - first
    assert fit is None or found > 0.7 * fit, f"only {found} of {fit} are there"
