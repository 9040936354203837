"""Loads that end late, fail, or end twice, under vLLM's real scheduler: what happens to their
blocks and requests."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

import offload.worker.executor
from offload.connector.scheduler.unfinished_loads import UNFINISHED_WAIT_S, UnfinishedLoads
from tests.clock import Clock
from tests.oracle.models import MODELS
from tests.oracle.reports import failed_loads
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.test_miss_reasons import PROMPT, stored
from tests.oracle.test_requests_reported import _request
from tiers.base import ReadOutcome

OTHERS = [[90 + n, *range(n, n + 100)] for n in range(4)]
"""Prompts without a common prefix, which together need all blocks of the GPU."""


A_STORE_READS_ON = re.compile(r"store job \d+ and load job \d+ share blocks")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock.replace(offload.worker.executor, monkeypatch)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[OracleEngine]:
    with OracleEngine(MODELS["full"], Conditions(slots=100), tmp_path, 2) as made:
        yield made
        made.check_idle()


@pytest.fixture
def failed(world: OracleEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return failed_loads(world.connector, monkeypatch)


def ask(world: OracleEngine, name: str, prompt: list[int], tokens: int = 4) -> None:
    request = _request(world, name, prompt, None)
    request.max_tokens = tokens
    world.scheduler.add_request(request)


@contextmanager
def still(world: OracleEngine) -> Iterator[None]:
    """Prevent the worker's loop from running."""
    usual = world._conditions
    world._conditions = dataclasses.replace(usual, late=0)
    yield
    world._conditions = usual


@contextmanager
def steady(world: OracleEngine) -> Iterator[None]:
    """Give loop and copies enough time in each step, so that a load that begins in one step has
    ended in the next."""
    turn = world._turn

    def thorough() -> None:
        for _ in range(20):
            world._loop.turn(1)
            world.engine.run_all()

    world._turn = thorough
    yield
    world._turn = turn


@contextmanager
def copies_hang(world: OracleEngine) -> Iterator[None]:
    """Let submitted copies into GPU blocks run only after this context."""
    lane = world.engine._load
    hanging, lane.queue = lane.queue, deque()
    yield
    lane.queue.extendleft(reversed(hanging))


def begin_load(world: OracleEngine, name: str, prompt: list[int] = PROMPT) -> None:
    """Send a prompt, and run the loop until a copy for it was submitted."""
    ask(world, name, prompt)
    with still(world):
        for _ in range(1000):
            if world.engine._load.queue:
                return
            world.step()
            world._loop.turn(1)
    raise AssertionError("no copy was submitted")


def pass_deadlines(world: OracleEngine, clock: Clock) -> None:
    clock.ahead_s += world.executor.limits.load_timeout_s + offload.worker.executor.LOOP_STALL_S + 1


def blocks_of(world: OracleEngine, name: str) -> set[int]:
    return set(world.scheduler.kv_cache_manager.get_block_ids(name)[0])


def test_blocks_are_not_reused_while_a_load_copies_into_them(
    world: OracleEngine, clock: Clock, failed: list[str]
) -> None:
    """The process is stopped for longer than a load may take, with copies submitted."""
    stored(world)
    begin_load(world, "late")
    held = blocks_of(world, "late")
    with still(world), copies_hang(world):
        pass_deadlines(world, clock)
        for name, prompt in enumerate(OTHERS):
            ask(world, f"other {name}", prompt)
        for _ in range(30):
            world.step()
            world.check()
            assert all(
                held.isdisjoint(blocks_of(world, name))
                for name in world.scheduler.requests
                if name != "late"
            )
        assert world.finished > 1, "other requests must be served meanwhile"
    world.drain()
    world.check()
    assert failed == ["late"]


def test_a_load_without_copies_is_reported_as_failed_at_the_deadline(
    world: OracleEngine, clock: Clock
) -> None:
    stored(world)
    ask(world, "late", PROMPT)
    with still(world):
        world.step()
        assert world.scheduler.requests["late"].num_computed_tokens
        pass_deadlines(world, clock)
        for _ in range(60):
            world.step()
        assert "late" not in world.scheduler.requests, "the prompt was computed"
    world.drain()
    world.check()


def test_a_rank_stores_again_when_its_loop_runs_again(world: OracleEngine, clock: Clock) -> None:
    stored(world)
    ask(world, "late", PROMPT)
    with still(world):
        world.step()
        pass_deadlines(world, clock)
        world.step()
        assert world.executor.degraded
    world.drain()
    assert world.executor.degraded == ""
    ask(world, "new", OTHERS[0])
    world.drain()
    world.forget_locally()
    before = world.loaded()["cpu"]
    ask(world, "again", OTHERS[0])
    world.drain()
    assert world.loaded()["cpu"] - before == 100


def test_a_late_end_does_not_end_a_later_load_under_the_same_name(
    world: OracleEngine, clock: Clock, failed: list[str]
) -> None:
    """A client uses a request name twice. The first load was given up and still reads from the
    disk."""
    keys = stored(world)
    ask(world, "before", OTHERS[0])
    world.drain()
    world.forget_locally()
    world.planner.cpu.drop(keys)
    tier = world.executor._tiers[0]
    read, held = tier.read, world._loop.loop.create_future()

    async def hanging(*arguments: Any) -> Any:
        await held
        return await read(*arguments)

    tier.read = hanging
    ask(world, "same", PROMPT)
    with still(world):
        world.step()
        pass_deadlines(world, clock)
        world.step()
    while "same" in world.scheduler.requests:
        world.step()
    assert failed == ["same"]
    begin_load(world, "same", OTHERS[0])
    with still(world), copies_hang(world):
        held.set_result(None)
        for _ in range(200):
            world._loop.turn(1)
            world.step()
        assert failed == ["same"]
        assert "same" in world.scheduler.requests, "the second load copies"
    world.drain()
    world.check()
    assert failed == ["same"]
    assert world.planner.totals()["late_answers"] == 0


@contextmanager
def stalled(world: OracleEngine, clock: Clock) -> Iterator[None]:
    """Block the loop for longer than any load may take. Copies continue in one variant and not in
    the other."""
    world._loop.turn(world.random.randrange(6))
    usual, limits, fence = world._conditions, world.executor.limits, world.executor.fence
    world.executor.limits = dataclasses.replace(limits, fence_timeout_s=0.0)
    world.executor.fence = world._fence  # which does not run the loop
    world._turn = lambda: world.engine.advance(world.random.choice([0, 0, 3]))
    if world.random.random() < 0.8:
        pass_deadlines(world, clock)
    with copies_hang(world) if world.random.random() < 0.6 else nullcontext():
        yield
    del world._turn
    world.executor.fence, world.executor.limits = fence, limits
    world._conditions = usual


@pytest.mark.parametrize("seed", range(int(os.environ.get("KVTIERS_ORACLE_SEEDS", "2"))))
@pytest.mark.parametrize("name", ["full", "mamba_full_ngram"])
def test_every_byte_is_right_while_loops_are_blocked_from_time_to_time(
    name: str, seed: int, tmp_path: Path, clock: Clock
) -> None:
    conditions = Conditions(slots=60, fault_rate=0.05, late=3, asynchronous=seed % 2 == 1)
    with OracleEngine(MODELS[name], conditions, tmp_path, seed) as world:
        gave_up = 0
        for _ in range(25):
            for _ in range(world.random.randrange(1, 7)):
                live_a_step(world)
            with stalled(world, clock):
                for _ in range(world.random.randrange(1, 12)):
                    live_a_step(world)
                    gave_up += bool(world.executor.degraded)
        world.drain()
        world.check_idle()
        assert gave_up
        assert world.finished > 5
        assert sum(world.loaded().values()) > 0


def live_a_step(world: OracleEngine) -> None:
    chance = world.random.random()
    if chance < 0.4 and len(world.scheduler.requests) < 8:
        world.add()
    elif chance < 0.43:
        world.abort()
    elif chance < 0.55:
        world.forget_locally()
    elif chance < 0.56:
        world.change_weights()
    world.step()
    # A store for which a step could not wait reads blocks that are no longer its own, so it fails.
    reads_on = [hazard for hazard in world.engine.hazards if A_STORE_READS_ON.match(hazard)]
    world.engine.hazards = [hazard for hazard in world.engine.hazards if hazard not in reads_on]
    world.check()


def test_a_request_whose_load_failed_computes_although_others_keep_loading(
    tmp_path: Path,
) -> None:
    """Each step brings one request, which loads its prompt and is served: some load is always
    open."""
    cold, hot = OTHERS[0], [[n, *range(1, 13)] for n in range(40)]
    with OracleEngine(MODELS["full"], Conditions(slots=300), tmp_path, 2) as world:
        for number, prompt in enumerate([cold, *hot]):
            ask(world, f"first {number}", prompt)
        world.drain()
        world.forget_locally()
        unfinished = world.connector.serving.side._unfinished_loads
        ask(world, "cold", cold)
        lose(world, "cold")
        steps = 0
        with steady(world):
            while "cold" in world.scheduler.requests and hot:
                ask(world, f"hot {steps}", hot.pop(), tokens=1)
                world.step()
                steps += 1
                assert unfinished._open, "some load must always be open in this test"
        assert "cold" not in world.scheduler.requests, (
            f"other requests were served for {steps} steps"
        )
        world.drain()
        world.check_idle()
        assert world.events()["load_failures"] == 1
        assert world.loaded()["cpu"] >= 12 * (steps - 1)


def lose(world: OracleEngine, name: str) -> None:
    """The chunks that this request will load turn out to be missing on the disk."""
    identity = world.connector.serving.side.requests.by_name[name].state.identity
    identity.extend(world.scheduler.requests[name].block_hashes)
    world.planner.cpu.drop(list(identity.keys[0]))

    async def lost(keys: Any, into: Any) -> list[ReadOutcome]:
        return [ReadOutcome.MISS] * len(keys)

    world.executor._tiers[0].read = lost


def test_which_requests_a_failed_load_waits_for() -> None:
    loads = UnfinishedLoads()
    for name in "abc":
        loads.begin(name)
    loads.ended("b")
    assert loads.must_wait("b", 0.0)
    loads.begin("d")
    loads.ended("a")
    loads.begin("a")  # once more: the wait does not include this request
    assert loads.must_wait("b", 1.0), "request c was waiting before"
    loads.ended("c")
    assert not loads.must_wait("b", 2.0)
    assert loads.must_wait("e", 3.0)
    assert loads.must_wait("e", 3.0 + 0.9 * UNFINISHED_WAIT_S)
    assert not loads.must_wait("e", 3.0 + UNFINISHED_WAIT_S), "some loads never end"
    loads.forget("e")
    assert loads.must_wait("e", 100.0), "its next load, or another request of that name"
