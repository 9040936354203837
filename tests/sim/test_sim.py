"""Runs many simulated worlds, each from its seed, and proves that the worlds detect faults.

    python -m pytest tests/sim                          120 worlds
    KVTIERS_SIM_SEEDS=5000 python -m pytest tests/sim   as many as you like
    KVTIERS_SIM_SEED=123 python -m pytest tests/sim -k replay     one again, as a failure says

A seed determines the whole run, to the last byte.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.sim.life import ServerLife, live
from tests.sim.real_disk import ServerLifeOnDisk
from tests.sim.server import Setup
from tests.sim.weather import Sky

SEEDS = int(os.environ.get("KVTIERS_SIM_SEEDS", "120"))
FIRST = int(os.environ.get("KVTIERS_SIM_FIRST", "0"))
SEED = os.environ.get("KVTIERS_SIM_SEED")
STEPS = int(os.environ.get("KVTIERS_SIM_STEPS", "100"))
PARTS = 20
DISK_SEEDS = max(5, SEEDS // 40)


class Totals:
    """The events of all worlds of a run."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.hits: Counter[int] = Counter()
        self.met: Counter[Sky] = Counter()
        self.worlds = self.steps = self.turns = self.checked = 0
        self.cpu_s = 0.0

    def add(self, world: ServerLife) -> None:
        """Count the events of one world."""
        self.events += world.events
        self.hits += world.hits
        self.met += world.met
        self.worlds += 1
        self.steps += world.steps
        self.turns += world.turns
        self.checked += world.checked

    def __str__(self) -> str:
        steps, turns = self.steps / self.cpu_s, self.turns / self.cpu_s
        return (
            f"{self.worlds} worlds; per CPU second {steps:.0f} scheduler steps and {turns:.0f} "
            f"turns of the loop; {self.checked} chunks compared; {dict(self.events)}, "
            f"hits {dict(self.hits)}"
        )


@pytest.fixture(scope="module")
def totals() -> Totals:
    return Totals()


def live_through(seed: int) -> ServerLife:
    """Run one world; a failure message says how to repeat it."""
    world = ServerLife(seed)
    try:
        return live(world, STEPS)
    except BaseException as error:  # adds the seed to whatever it was
        error.add_note(
            f"KVTIERS_SIM_SEED={seed} KVTIERS_SIM_STEPS={STEPS} "
            "python -m pytest tests/sim -k replay"
        )
        raise


@pytest.mark.parametrize("part", range(PARTS))
def test_no_world_goes_wrong(part: int, totals: Totals) -> None:
    began = time.process_time()
    for seed in range(FIRST + part, FIRST + SEEDS, PARTS):
        totals.add(live_through(seed))
    totals.cpu_s += time.process_time() - began


def test_the_worlds_cover_all_events(totals: Totals) -> None:
    """A quiet world proves nothing: every possible event must have occurred in some of them."""
    if totals.worlds < 120:
        pytest.fail("says something only after 120 worlds: run the whole file in one process")
    print(totals)
    events = (
        "loaded",
        "load failed",
        "finished",
        "preempted",
        "aborted",
        "reset",
        "restart",
        "recovered",
        "refused",
        "parts",
        "probes",
        "read hung",
        "write hung",
        "read ahead",
        "waited: begin",
    )
    missing = [event for event in events if not totals.events[event]]
    assert not missing
    assert all(totals.hits[tier] > 1000 for tier in (-1, 0)), totals.hits
    assert totals.hits[1] > 100, "there are worlds with two lower tiers"
    assert set(totals.met) == set(Sky) - {Sky.CALM}, (
        "each kind of simulated fault must affect some call"
    )
    assert totals.checked > 100 * totals.worlds


@pytest.mark.parametrize("seed", range(DISK_SEEDS))
def test_worlds_on_real_disk_tiers(seed: int, tmp_path: Path) -> None:
    """There are fewer of them, because the disks are real; their threads decide some orders, so a
    seed may give different runs."""
    world = live(ServerLifeOnDisk(seed, tmp_path), STEPS // 2)
    assert world.events["finished"]


def test_replay() -> None:
    """Runs one world again; without KVTIERS_SIM_SEED, runs a world twice and requires equal
    steps."""
    if SEED is not None:
        world = live_through(int(SEED))
        print(world.setup, dict(world.events), dict(world.hits))
        return
    first, second = (live(ServerLife(7), STEPS) for _ in range(2))
    assert first.events == second.events
    assert (first.steps, first.checked, first.hits) == (second.steps, second.checked, second.hits)


@pytest.mark.parametrize("choice", ["auto", "always"])
@pytest.mark.parametrize("part", range(4))
def test_no_world_goes_wrong_while_requests_wait_for_reads(part: int, choice: str) -> None:
    """No request waits for longer than allowed, and nothing is left of a wait."""
    waited: Counter[str] = Counter()
    for seed in range(part, 40, 4):
        setup = Setup.drawn(random.Random(seed))
        setup = dataclasses.replace(setup, look_ahead=0.5, wait_for_reads=choice)
        life = ServerLife(seed, setup)
        try:
            events = live(life, STEPS).events
        except BaseException as error:
            error.add_note(f"seed {seed} with {setup}")
            raise
        waited += Counter({name: n for name, n in events.items() if name.startswith("waited")})
    assert waited["waited: begin"] > 0 or choice == "auto"
