"""The number of keys that are made for a long prompt in each step: none when it arrives, and later
only as many as the step needs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bench import hooks
from bench.hooks import BLOCK, _output
from offload.layout import request_keys as lazy_keys
from offload.layout.keys import chunk_keys
from offload.layout.request_keys import PAGE
from offload.messages.plan import StepPlan
from offload.planner.step_budget import (
    ENDED_KEYS_MAX,
    LOOK_AT_END_MAX,
    LOOKUP_CHUNKS,
    STEP_CHUNKS,
    STORE_PIECE_MAX,
)
from offload.requests.lookup_cache import FIRST_BATCH
from tests.oracle.test_long_requests import Server, tables_of

CHUNKS = 4096


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of keys of requests that each call has made."""
    counts: list[int] = []

    def counting(*arguments: Any) -> list[bytes]:
        found = chunk_keys(*arguments)
        counts.append(len(found))
        return found

    monkeypatch.setattr(hooks, "_resident_bytes", lambda: 0)
    monkeypatch.setattr(lazy_keys, "chunk_keys", counting)
    return counts


class Counted(Server):
    """A server that records how many keys each of its steps has made (``steps``)."""

    def __init__(self, made: list[int], chunks: int = CHUNKS) -> None:
        super().__init__(chunks)
        self.made = made
        self.steps: list[int] = []

    def step(self, request: Any = None, scheduled: int = 1) -> StepPlan:
        plan = super().step(request, scheduled)
        self.steps.append(sum(self.made))
        self.made.clear()
        return plan

    def rest(self) -> None:
        """Step until no work is left."""
        while self.side.pending:
            self.step()


SOURCE = random.Random(0)
"""A source of different hashes; a fixture restarts it for each test."""


@pytest.fixture(autouse=True)
def _the_same_hashes_in_each_run() -> None:
    SOURCE.seed(0)


def new_keys(chunks: int = CHUNKS) -> list[bytes]:
    return [SOURCE.randbytes(36) for _ in range(chunks)]


def test_arrival_makes_no_key(made: list[int]) -> None:
    server = Counted(made)
    server.came(server.keys)
    server.came(new_keys())
    server.step()
    assert server.steps == [0]


def test_only_the_first_keys_of_a_new_prompt_are_made(made: list[int]) -> None:
    server = Counted(made)
    request = server.came(new_keys())
    assert server.side.lookup(request, 0) == 0
    server.side.allocated(request, tables_of(request), 0)
    server.step()
    assert 0 < server.steps[0] <= FIRST_BATCH


def test_a_lookup_makes_the_keys_it_queries_and_a_load_makes_no_more(made: list[int]) -> None:
    server = Counted(made)
    request = server.came(server.keys)
    server.load(request)
    request.num_computed_tokens = request.num_tokens - 1
    server.side.finished(request, tables_of(request))
    server.rest()
    assert max(server.steps) <= LOOKUP_CHUNKS
    assert sum(server.steps) == CHUNKS


def test_no_key_is_made_of_what_vllm_has_cached(made: list[int]) -> None:
    server = Counted(made)
    request = server.came(server.keys)
    cached, rest = CHUNKS - 100, 100
    assert server.side.lookup(request, cached * BLOCK) == rest * BLOCK
    server.step()
    assert rest <= server.steps[0] < rest + PAGE


def test_a_store_makes_what_a_step_looks_at(made: list[int]) -> None:
    server = Counted(made)
    request = server.came(new_keys())
    assert server.side.lookup(request, 0) == 0
    server.side.allocated(request, tables_of(request), 0)
    plan = server.step(request, CHUNKS * BLOCK)
    request.num_computed_tokens = CHUNKS * BLOCK
    while plan.stores:
        plan = server.step(request)
    assert len(server.planner.cpu) == CHUNKS
    assert max(server.steps) <= 3 * STEP_CHUNKS // 2
    assert sum(server.steps) == CHUNKS
    server.side.finished(request, tables_of(request))
    server.rest()
    assert sum(server.steps) == CHUNKS, "all keys were made when it ended"


class Heard:
    """Replaces the planner's call of the policies, to record it."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.uses: list[list[bytes]] = []
        monkeypatch.setattr(
            server.planner.uses, "ended", lambda keys, _hints: self.uses.append(keys)
        )


def ended(server: Counted, name: str, chunks: int = CHUNKS) -> list[bytes]:
    """Simulate a request that stores and finds nothing, up to its end; return its keys."""
    hashes = new_keys(chunks)
    request = server.request(hashes, list(range(chunks * BLOCK + 1)))
    request.kv_transfer_params = {"kvtiers": {"no_store": True}}
    assert server.side.lookup(request, 0) == 0, name
    server.step(request, chunks * BLOCK)
    request.num_computed_tokens = chunks * BLOCK
    server.side.finished(request, tables_of(request))
    return [key[:32] + bytes(4) for key in hashes]


def test_missing_keys_of_an_ended_request_are_made_in_later_steps(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy receives all keys of a request in one call, and requests in the order in which they
    ended, however many keys had been made earlier."""
    server = Counted(made)
    heard = Heard(server, monkeypatch)
    keys = [ended(server, "a"), ended(server, "b"), ended(server, "c", 40)]
    assert server.side.pending
    server.rest()
    assert max(server.steps) <= ENDED_KEYS_MAX + FIRST_BATCH
    assert heard.uses == keys


def test_an_ended_request_checks_only_a_part_of_what_vllm_has_cached(made: list[int]) -> None:
    """A short answer to a prompt that is in vLLM's own cache and in a tier."""
    chunks = 2 * LOOK_AT_END_MAX
    server = Counted(made, chunks)
    request = server.came(server.keys)
    request.num_computed_tokens = chunks * BLOCK
    assert server.side.lookup(request, chunks * BLOCK) == 0
    server.step(request)
    assert 0 < server.steps[0] <= STEP_CHUNKS
    server.side.finished(request, tables_of(request))
    server.rest()
    assert max(server.steps) <= LOOK_AT_END_MAX + STORE_PIECE_MAX + ENDED_KEYS_MAX
    assert sum(server.steps) == chunks


def test_a_use_of_few_keys_is_reported_at_once(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Counted(made)
    heard = Heard(server, monkeypatch)
    assert heard.uses == [ended(server, "a", ENDED_KEYS_MAX // 2)]
    assert not server.side.pending


def test_uses_that_wait_at_a_reset_are_dropped(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Counted(made)
    heard = Heard(server, monkeypatch)
    ended(server, "a")
    server.side.forget()
    server.planner.begin_epochs({})
    assert len(server.steps) < 3
    for _ in range(CHUNKS // ENDED_KEYS_MAX + 1):
        server.side.build_plan(_output())
    assert heard.uses == []
