"""A process forks while a tier is open: its child holds none of the folder's locks."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiers.folders.test_open_failures import MAKERS
from tiers.lmdb.shared.tier import SharedLmdbTier
from tiers.testing import key_of, put

ROOT = Path(__file__).parents[3]
KILLED = """
import asyncio, os, signal, sys, time
from pathlib import Path
from tests.tiers.lmdb.shared.inside import index_of
from tiers.lmdb.shared.tier import SharedLmdbTier

async def main():
    tier = SharedLmdbTier(Path(sys.argv[1]), 8 << 20)
    await tier.open()
    child = os.fork()
    if not child:
        os.close(1)
        time.sleep(60)
        Path(sys.argv[2]).touch()
        os._exit(0)
    print(child, flush=True)
    with index_of(tier).writing():
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


LIBC = ctypes.PyDLL(None)
FORKS: dict[str, Callable[[], int]] = {"python": os.fork, "library": LIBC.fork}
"""A fork of a library does not run Python's handlers."""


def forked(fork: str) -> int:
    """Fork a child that lives until it is killed."""
    child = FORKS[fork]()
    if not child:
        LIBC.pause()
        os._exit(0)
    return child


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("fork", FORKS)
async def test_a_folder_is_free_after_closing_although_a_child_lives(
    tmp_path: Path, kind: str, fork: str
) -> None:
    tier = MAKERS[kind](tmp_path)
    await tier.open()
    child = forked(fork)
    try:
        await tier.aclose()
        again = MAKERS["lmdb" if kind == "shared lmdb" else kind](tmp_path)
        await again.open()
        await again.aclose()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)  # noqa: ASYNC222  # the child ends at once


async def test_sharers_go_on_after_one_that_had_forked_is_killed(tmp_path: Path) -> None:
    tier = SharedLmdbTier(tmp_path / "tier", 8 << 20)
    await tier.open()
    command = [sys.executable, "-c", KILLED, str(tmp_path / "tier"), str(tmp_path / "ended")]
    killed = subprocess.run(  # noqa: ASYNC221  # it kills itself at once
        command, cwd=ROOT, stdout=subprocess.PIPE, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    child = int(killed.stdout)
    try:
        await put(tier, [key_of(1)], 4096)
        assert not (tmp_path / "ended").exists(), "it waited for the end of the child"
    finally:
        os.kill(child, signal.SIGKILL)
    await tier.aclose()
