"""Requests with very many chunks on the scheduler side: work that takes several steps is completed,
and nothing is lost on the way."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from bench import hooks
from bench.hooks import BLOCK, Bed, _output
from offload.messages.plan import StepPlan
from offload.messages.report import JobResult, StepReport
from offload.planner import step_budget
from offload.planner.step_budget import (
    LOOK_AT_END_MAX,
    STEP_CHUNKS,
    STORE_PIECE_MIN,
    Allowance,
)
from offload.requests.lookup import Lookups

ALLOWANCE = 64
CHUNKS = 8 * ALLOWANCE


def random_hashes(count: int) -> list[bytes]:
    """The same ones in each run."""
    source = random.Random(count)
    return [source.randbytes(32) for _ in range(count)]


class Server(Bed):
    """A scheduler side that a test steps one by one. It reads nothing ahead, so that all that a
    step does is for the request of the test."""

    def __init__(self, chunks: int) -> None:
        super().__init__(chunks, 2 * chunks, "lru", look_ahead=0.0)
        self.keys = self.planner.lower[0].some(chunks)

    def came(self, keys: Any) -> Any:
        request = self.request(keys, list(range(len(keys) * BLOCK + 1)))
        self.side.admit(request)
        return request

    def step(self, request: Any = None, scheduled: int = 1) -> StepPlan:
        """Run a step; all its stores are complete at its end."""
        tables = ((),) if request is None else tables_of(request)
        plan = self.side.build_plan(_output(request, tables, scheduled))
        done = {store.job for store in plan.stores} | {
            write_through.job for write_through in plan.write_throughs
        }
        self.side.update(StepReport({job: JobResult() for job in done}), (), ())
        return plan

    def load(self, request: Any) -> None:
        """Look up a request's chunks and load all of them."""
        while (found := self.side.lookup(request, 0)) is None:
            self.step()
        assert found == len(request.block_hashes) * BLOCK
        self.side.allocated(request, tables_of(request), found)
        while not (plan := self.step()).loads:
            pass
        job = plan.loads[0].job
        while not plan.loads[-1].is_last:
            plan = self.step()
        self.side.update(StepReport({job: JobResult()}), [request.request_id], ())
        request.num_computed_tokens = found


def tables_of(request: Any) -> tuple[list[int]]:
    return (list(range(1, 2 + len(request.block_hashes))),)


@pytest.fixture(autouse=True)
def _not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_resident_bytes", lambda: 0)


@pytest.fixture
def _little_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of ``CHUNKS`` chunks takes eight steps."""
    monkeypatch.setattr(step_budget, "LOOKUP_CHUNKS", ALLOWANCE)
    monkeypatch.setattr(step_budget, "LOOKUP_CHUNKS_MIN", ALLOWANCE // 4)


@pytest.mark.usefixtures("_little_allowance")
def test_a_lookup_continues_in_steps_in_which_vllm_does_not_repeat_it() -> None:
    """Other requests fill the steps. Without the continuation, a waiting request would need many
    steps that are not full."""
    server = Server(CHUNKS)
    request = server.came(server.keys)
    assert server.side.lookup(request, 0) is None
    for _ in range(CHUNKS // ALLOWANCE + 1):
        server.step()
    assert server.side.lookup(request, 0) == CHUNKS * BLOCK


@pytest.mark.usefixtures("_little_allowance")
def test_a_continued_lookup_keeps_to_the_allowance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(CHUNKS)
    left: list[int] = []
    renew = Allowance.renew

    def renewed(allowance: Allowance, times: int) -> None:
        if allowance is server.planner.budget.lookups:
            left.append(allowance.left)
        renew(allowance, times)

    monkeypatch.setattr(Allowance, "renew", renewed)
    requests = [server.came(server.keys) for _ in range(4)]
    for request in requests:
        assert server.side.lookup(request, 0) is None
    while any(server.side.lookup(request, 0) is None for request in requests[2:]):
        server.step()
    assert min(left[1:]) >= -ALLOWANCE // 4, left


@pytest.mark.usefixtures("_little_allowance")
@pytest.mark.parametrize(("step_s", "steps"), [(0.01, 7), (0.11, 1), (0.5, 0)])
def test_long_steps_query_more(step_s: float, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(1)
    server = Server(CHUNKS)
    plan = server.planner.step

    def step(**kwargs: Any) -> StepPlan:
        server.planner.tick(next(clock) * step_s)
        return plan(**kwargs)

    monkeypatch.setattr(server.planner, "step", step)
    for _ in range(8):
        server.step()
    request = server.came(server.keys)
    took = 0
    while server.side.lookup(request, 0) is None:
        server.step()
        took += 1
    assert took == steps


@pytest.mark.usefixtures("_little_allowance")
def test_a_lookup_of_an_ended_request_does_not_continue() -> None:
    server = Server(CHUNKS)
    request = server.came(server.keys)
    assert server.side.lookup(request, 0) is None
    server.side.finished(request, ([],))
    assert server.side.lookups is not None
    assert not server.side.lookups._unfinished


@pytest.mark.usefixtures("_little_allowance")
def test_a_failing_continued_lookup_does_not_lose_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    server = Server(CHUNKS)
    request = server.came(server.keys)
    assert server.side.lookup(request, 0) is None
    server.step()  # steps in which vLLM has repeated the lookup
    monkeypatch.setattr(Lookups, "_go_on", fail)
    server.planner.loads.plan_failed("other")
    assert [load.request for load in server.step().loads] == ["other"]


@pytest.mark.parametrize("chunks", [20, STEP_CHUNKS // 4])
def test_loaded_chunks_that_were_evicted_are_stored_again(chunks: int) -> None:
    server = Server(chunks)
    request = server.came(server.keys)
    server.load(request)
    server.step(request)
    for index in (server.planner.cpu, *server.planner.lower):
        index.drop(server.keys[3:])
    server.side.finished(request, tables_of(request))
    stored = sum(len(store.slots) for store in server.step().stores)
    assert stored == chunks - 3


@pytest.mark.parametrize("cached", [3 * STEP_CHUNKS, 3 * STEP_CHUNKS + LOOK_AT_END_MAX])
def test_computed_chunks_of_a_short_answer_behind_a_long_cached_prompt_are_stored(
    cached: int,
) -> None:
    """vLLM's own cache holds most of the prompt, of which one step checks only a part."""
    fresh = 40
    server = Server(cached + fresh)
    server.planner.lower[0].drop(server.keys[cached:])
    request = server.came(server.keys)
    assert server.side.lookup(request, cached * BLOCK) == 0
    server.side.allocated(request, tables_of(request), 0)
    request.num_computed_tokens = cached * BLOCK
    stored = len(server.step(request, fresh * BLOCK + 1).stores)
    request.num_computed_tokens = request.num_tokens
    server.side.finished(request, tables_of(request))
    stored += sum(len(store.slots) for store in server.step().stores)
    assert stored == fresh


def test_an_aborted_load_is_not_measured_as_if_complete() -> None:
    """If it were, a tier that delivered only a part would seem fast."""
    server = Server(8 * STEP_CHUNKS)
    request = server.came(server.keys)
    while (found := server.side.lookup(request, 0)) is None:
        server.step()
    server.side.allocated(request, tables_of(request), found)
    parts = server.step().loads + server.step().loads
    server.side.finished(request, tables_of(request))
    assert server.step().loads[-1].is_last
    server.side.update(StepReport({parts[0].job: JobResult()}), [request.request_id], ())
    loaded = server.planner.stats.tier(0).loaded_tokens
    read = sum(len(part.items) for part in parts) * BLOCK
    assert read < len(server.keys) * BLOCK
    assert loaded == read


@pytest.mark.parametrize("full", [False, True])
def test_a_store_checks_each_chunk_about_once(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store must not check more chunks than the step may store, because they would be checked
    again in the next one."""
    chunks = 8 * STEP_CHUNKS
    server = Server(2 * chunks)
    if full:
        server.fill()
    seen: list[int] = []
    plan_store = server.planner.stores.plan

    def counted(run: Any, *args: Any, **kwargs: Any) -> int:
        seen.append(len(run))
        return plan_store(run, *args, **kwargs)

    monkeypatch.setattr(server.planner.stores, "plan", counted)
    request = server.came(random_hashes(chunks))
    server.side.lookup(request, 0)
    plan = server.step(request, chunks * BLOCK)
    request.num_computed_tokens = chunks * BLOCK
    stored = 0
    while plan.stores:
        stored += sum(len(store.slots) for store in plan.stores)
        plan = server.step(request)
    assert stored == chunks
    assert chunks <= sum(seen) < 1.4 * chunks


def test_an_ended_request_stores_no_more_than_a_step_allows() -> None:
    chunks = 8 * STEP_CHUNKS
    server = Server(chunks)
    request = server.came(random_hashes(chunks))
    server.side.lookup(request, 0)
    request.num_computed_tokens = chunks * BLOCK
    server.side.finished(request, tables_of(request))
    assert 0 < server.planner.stores.storing < 3 * STEP_CHUNKS
    assert server.planner.budget.left >= 0


def test_present_chunks_are_skipped_in_few_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pieces must be few even if other requests have used up nearly all of the step."""
    server = Server(STEP_CHUNKS)
    request = server.came(server.keys)
    pieces: list[int] = []
    plan_store = server.planner.stores.plan

    def counted(run: Any, *args: Any, **kwargs: Any) -> int:
        pieces.append(len(run))
        return plan_store(run, *args, **kwargs)

    monkeypatch.setattr(server.planner.stores, "plan", counted)
    monkeypatch.setattr(server.planner.stores, "available", lambda **_: 1)
    server.step(request, STEP_CHUNKS * BLOCK)
    assert sum(pieces) == STEP_CHUNKS
    assert len(pieces) <= STEP_CHUNKS // STORE_PIECE_MIN
