"""A process that has claimed a folder forks: its child holds neither the claim nor a lock."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from offload.namespaces import claims
from offload.namespaces.claims import live_owners, locked
from offload.namespaces.folders import ClaimedFolder, claim_rank_folder, share_rank_folder
from tests.forks import FORKS, child_of_killed, forked
from tests.offload.namespaces.test_folders import ONE

SCRIPT = """
from pathlib import Path
from offload.namespaces.claims import locked
from tests.offload.namespaces.test_forks import take

root, kind = Path(sys.argv[1]), sys.argv[2]
if kind == "locked":
    with locked(root):
        fork_and_die()
take(root, is_shared=kind == "shared")
fork_and_die()
"""


def take(root: Path, *, is_shared: bool = False) -> ClaimedFolder:
    if is_shared:
        return share_rank_folder(root, ONE, rank=0, engine="test")
    return claim_rank_folder(root, ONE, replica=0, rank=0, engine="test")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "LOCK_WAIT_S", 0.5)


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize("kind", ["exclusive", "shared", "locked"])
def test_a_folder_is_free_after_its_owner_was_killed_although_a_child_lives(
    tmp_path: Path, kind: str
) -> None:
    with child_of_killed(SCRIPT, tmp_path, kind):
        assert live_owners(tmp_path) == []
        take(tmp_path).close()


@pytest.mark.parametrize("fork", FORKS)
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_folder_is_free_after_closing_although_a_child_lives(
    tmp_path: Path, fork: str, is_shared: bool
) -> None:
    claimed = take(tmp_path, is_shared=is_shared)
    child = forked(fork)
    try:
        claimed.close()
        assert live_owners(tmp_path) == []
        take(tmp_path).close()
    finally:
        end(child)


@pytest.mark.parametrize("fork", FORKS)
def test_a_lock_ends_although_a_child_lives(tmp_path: Path, fork: str) -> None:
    with locked(tmp_path):
        child = forked(fork)
    try:
        with locked(tmp_path):
            pass
    finally:
        end(child)


@pytest.mark.parametrize("fork", FORKS)
def test_a_look_at_a_claim_ends_although_a_child_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork: str
) -> None:
    """To find the owner of a claim takes a lock for a moment, in which another thread may fork."""
    take(tmp_path).close()
    children = []

    def lock(*arguments: Any) -> bool:
        is_free = try_flock(*arguments)
        children.append(forked(fork))
        return is_free

    try_flock = claims.try_flock
    with monkeypatch.context() as patch:
        patch.setattr(claims, "try_flock", lock)
        assert live_owners(tmp_path) == []
    try:
        assert children
        take(tmp_path).close()
    finally:
        for child in children:
            end(child)
