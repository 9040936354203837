"""Four processes share one folder of files, and two of them are killed.

The capacity is kept within the bound that ``shared_folder`` states, no record is lost or wrong, and
unfinished files of the killed processes are removed. ``KVTIERS_SHARED_SEEDS=50`` runs more seeds
than the suite.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from tests.tiers.shared import processes as shared_world
from tests.tiers.shared.child import BATCH
from tests.tiers.shared.processes import Child, bytes_of, check_records, children, watch
from tiers.files.shared_folder import GRANTS_MIN

SEEDS = range(int(os.environ.get("KVTIERS_SHARED_SEEDS", "1")))
SIZE = 40_000
ENGINES = 4
ROOMY = 64 << 20
TIGHT = 8 << 20
SMALL_FILES_BYTES = 64 << 10


@pytest.fixture(autouse=True)
def _faults_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the test, undo what ``plant`` changes in this process."""
    for name in ("no-cap", "no-sweep"):
        owner, attribute, _instead = shared_world.FAULTS[name]
        monkeypatch.setattr(owner, attribute, getattr(owner, attribute))


def most_bytes(capacity: int) -> int:
    """Return the stated bound: two grants for each engine that joins while the others write."""
    return capacity + 2 * (ENGINES - 1) * capacity // GRANTS_MIN + SMALL_FILES_BYTES


def unfinished(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("epoch-*/*.tmp")]


def run_world(folder: Path, capacity: int, count: int, seed: int, fault: str = "none") -> None:
    """Two processes are killed: one at a random moment, one in the middle of writing a file."""
    shared_world.plant(fault)
    rng = random.Random(seed)
    arguments = (capacity, SIZE)

    def sample() -> None:
        held = bytes_of(folder)
        assert held <= most_bytes(capacity), f"{held} bytes, seed {seed}"

    kill_after = rng.randrange(1, count // 2)
    with children(
        Child("half-file", folder, 0, *arguments, rng.randrange(2, 9) * BATCH, fault),
        Child("file", folder, 1, *arguments, count, fault),
        Child("file", folder, 2, *arguments, count, fault),
        Child("file", folder, 3, *arguments, count, fault),
    ) as group:
        half, victim, *others = group
        watch(group, lambda: victim.has_stored(kill_after), sample)
        victim.kill()
        watch(group, lambda: bool(half.said(".")), sample)
        half.kill()
        for child in others:
            child.go_on()
        watch(group, lambda: all(child.said(".") for child in others), sample)
        wrong = [number for child in group for number in child.said("W")]
        assert not wrong, f"wrong bytes of {wrong}, seed {seed}"
        by_child = [child.said("+") for child in group]
        for child in others:
            child.leave()
    asyncio.run(check(folder, capacity, by_child))
    sample()


async def check(folder: Path, capacity: int, by_child: list[list[int]]) -> None:
    tier = shared_world.make_tier("file", folder, capacity)
    info = await tier.open()
    try:
        assert unfinished(folder) == [], "unfinished files of killed processes are left"
        assert len(os.listdir(folder / "engines")) == 1, "killed processes still count as alive"
        fit = info.capacity_bytes // tier.footprint_bytes(SIZE)
        await check_records(tier, by_child, SIZE, fit if capacity != ROOMY else None)
    finally:
        await tier.aclose()


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_while_there_is_space(tmp_path: Path, seed: int) -> None:
    run_world(tmp_path / "tier", ROOMY, 60, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_capacity_is_kept_when_space_runs_out(tmp_path: Path, seed: int) -> None:
    run_world(tmp_path / "tier", TIGHT, 120, 1000 + seed)


@pytest.mark.parametrize(
    ("fault", "seen", "capacity", "count"),
    [("no-cap", "bytes, seed", TIGHT, 90), ("no-sweep", "files of killed processes", ROOMY, 24)],
)
def test_a_planted_fault_is_detected(
    tmp_path: Path, fault: str, seen: str, capacity: int, count: int
) -> None:
    with pytest.raises(AssertionError, match=seen):
        run_world(tmp_path / "tier", capacity, count, 1, fault)
