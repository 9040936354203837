"""A process forks while a tier is open: its child holds none of the folder's locks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.forks import FORKS, child_of_killed, forked
from tests.tiers.folders.test_open_failures import MAKERS
from tiers.lmdb.shared.tier import SharedLmdbTier
from tiers.testing import key_of, put

AGAIN = {"lmdb": "lmdb", "file": "file", "shared lmdb": "lmdb", "shared file": "shared file"}
"""The kind that needs all of a folder's locks after the other one."""
OPENED = """
import asyncio
from pathlib import Path
from tests.tiers.folders.test_open_failures import MAKERS

async def main():
    await MAKERS[sys.argv[2]](Path(sys.argv[1])).open()
    fork_and_die()

asyncio.run(main())
"""
CHANGING = """
import asyncio
from pathlib import Path
from tests.tiers.lmdb.shared.inside import index_of
from tiers.lmdb.shared.tier import SharedLmdbTier

async def main():
    tier = SharedLmdbTier(Path(sys.argv[1]), 8 << 20)
    await tier.open()
    with index_of(tier).writing():
        fork_and_die()

asyncio.run(main())
"""


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
        again = MAKERS[AGAIN[kind]](tmp_path)
        await again.open()
        await again.aclose()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)  # noqa: ASYNC222  # the child ends at once


@pytest.mark.parametrize("kind", MAKERS)
async def test_a_folder_is_free_after_its_owner_was_killed_although_a_child_lives(
    tmp_path: Path, kind: str
) -> None:
    with child_of_killed(OPENED, tmp_path, kind):
        again = MAKERS[AGAIN[kind]](tmp_path)
        await again.open()
        await again.aclose()


async def test_sharers_go_on_after_one_that_had_forked_is_killed(tmp_path: Path) -> None:
    tier = SharedLmdbTier(tmp_path / "tier", 8 << 20)
    await tier.open()
    with child_of_killed(CHANGING, tmp_path / "tier"):
        await put(tier, [key_of(1)], 4096)  # does not wait for the end of the child
    await tier.aclose()
