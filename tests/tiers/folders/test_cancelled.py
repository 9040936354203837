"""Opening and closing a tier, cancelled at every moment, several times, and by a loop that ends:
nothing is left open, and a cancelled close can be repeated. Closing waits for active operations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S, turns
from tests.tiers.folders.test_open_failures import MAKERS, Source, held
from tiers.adapters.read_only import ReadOnlyTier, SharedReadOnlyTier
from tiers.adapters.remote_read_only import RemoteReadOnlyTier
from tiers.adapters.reopening import ReopeningTier
from tiers.base import Tier
from tiers.folders.folder_tier import FolderTier
from tiers.mooncake import tier as mooncake_tier
from tiers.mooncake.client import MooncakeSettings
from tiers.mooncake.tier import MooncakeTier
from tiers.testing import key_of, put


class Listed(Source):
    """An empty source of other engines' records."""

    def keys(self) -> list[Any]:
        return []

    def have(self, keys: list[bytes]) -> list[bool]:
        return [False] * len(keys)

    def read(self, *_arguments: object) -> list[Any]:
        return []


def sources() -> list[Any]:
    return [Listed()]


def opened_again(path: Path) -> Tier:
    make = MAKERS["shared file"]
    return ReopeningTier(make(path), lambda _epoch: make(path))


ALL: dict[str, Callable[[Path], Tier]] = MAKERS | {
    "opened again": opened_again,
    "read-only": lambda _path: ReadOnlyTier(sources),
    "asked": lambda _path: SharedReadOnlyTier(sources),
    "remote": lambda _path: RemoteReadOnlyTier(Listed),
    "mooncake": lambda _path: MooncakeTier(MooncakeSettings("localhost:1", "P2PHANDSHAKE")),
}
MOMENTS = [0, 1, 2, 3, 5, 8]


@pytest.fixture(autouse=True)
def _without_a_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_tier, "MooncakeClient", Source)


async def rest(before: object) -> None:
    """Wait until the tier holds as much as before; a cancelled call may have left that to a
    thread."""
    deadline = time.monotonic() + PATIENCE_S
    while (held(), Source.opened) != before:
        assert time.monotonic() < deadline, (held(), Source.opened)
        await asyncio.sleep(0.01)


async def free(kind: str, path: Path) -> None:
    """Assert that another tier can be opened at the same place."""
    tier = ALL[kind](path)
    await tier.open()
    await tier.aclose()


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_opening_leaves_nothing_open(
    tmp_path: Path, kind: str, times: int
) -> None:
    before = held(), Source.opened
    for moment in MOMENTS:
        tier = ALL[kind](tmp_path)
        opening = asyncio.create_task(tier.open())
        await turns(moment)
        for _ in range(times):
            opening.cancel()
            await turns(1)
        await asyncio.wait([opening])
        if not opening.cancelled():
            opening.result()
            await tier.aclose()
        await rest(before)
    await free(kind, tmp_path)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(("by", "times"), [("caller", 1), ("caller", 3), ("loop", 3)])
async def test_a_cancelled_close_raises_and_can_be_repeated(
    tmp_path: Path, kind: str, by: str, times: int
) -> None:
    """A loop that ends cancels all tasks, including those that a tier has created for itself."""
    before = held(), Source.opened
    for moment in MOMENTS[1:]:
        tier = ALL[kind](tmp_path)
        await tier.open()
        if kind in MAKERS:
            await put(tier, [key_of(0)], 5000)
        closing = asyncio.create_task(tier.aclose())
        await turns(moment)
        for _ in range(times):
            if by == "caller":
                closing.cancel()
            else:
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
            await turns(1)
        is_late = closing.done()
        await asyncio.wait([closing])
        assert closing.cancelled() or is_late, "the cancelled caller must get CancelledError"
        await tier.aclose()
        await rest(before)
    await free(kind, tmp_path)


@pytest.mark.parametrize("kind", MAKERS)
async def test_closing_waits_for_an_operation_that_uses_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """An operation between two of its jobs: waiting for the threads alone would not be enough."""
    tier = MAKERS[kind](tmp_path)
    assert isinstance(tier, FolderTier)
    await tier.open()
    go_on, steps = asyncio.Event(), list[str]()
    end_work = tier._end_work

    async def operate() -> None:
        with tier._working():
            await go_on.wait()
            steps.append("operation")

    async def noted() -> None:
        steps.append("end of work")
        await end_work()

    monkeypatch.setattr(tier, "_end_work", noted)
    running = asyncio.ensure_future(operate())
    await turns()
    closing = asyncio.ensure_future(tier.aclose())
    await turns()
    assert steps == []
    go_on.set()
    await asyncio.gather(running, closing)
    assert steps == ["operation", "end of work"]
