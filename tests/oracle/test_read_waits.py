"""Requests that wait for their reads, under vLLM's real scheduler: they do not delay the requests
behind them, they hold no GPU blocks, and every wait ends."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from offload.connector.scheduler.request_spans import attributes_of
from offload.planner.load_or_recompute import SAMPLES_MIN, LoadOrRecompute, ShortenReason
from offload.planner.look_ahead.read_waits import TOTAL_S
from offload.requests.miss_reasons import Reason
from tests.oracle.clock import TIMED
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.test_look_ahead import CHUNKS, PROMPTS, TOKENS, Backlog, prompts_of, side
from tests.oracle.test_scheduler import conditions_of, live

STEP_S = 0.1
COMPUTED, CHUNK = 32, 4
"""Tokens that vLLM computes in a step, and tokens of a chunk."""
NEW_TOKENS = 40
"""Tokens of a prompt that no tier holds."""


class StepClock:
    """Replaces the module ``time``: each step of the world takes ``STEP_S``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


class WaitingWorld(Backlog):
    """A backlog on a simulated clock. ``first`` has the step of each request's first token,
    ``begun`` the step in which it got blocks."""

    def __init__(self, clock: StepClock, *conditions: Any) -> None:
        self.clock = clock
        self.first: dict[str, int] = {}
        self.begun: dict[str, int] = {}
        super().__init__(*conditions)

    def step(self) -> None:
        requests = dict(self.scheduler.requests)
        self.clock.now += STEP_S
        super().step()
        for name, request in requests.items():
            if request.num_output_tokens:
                self.first.setdefault(name, self.steps)
            if request.status is not RequestStatus.WAITING:
                self.begun.setdefault(name, self.steps)

    def begin(self, *arguments: Any, **more: Any) -> None:
        super().begin(*arguments, **more)
        self.first.clear()
        self.begun.clear()

    def measured(self, chunks_per_step: float) -> None:
        """Set the planner's measured speeds of disk and GPU."""
        for _ in range(SAMPLES_MIN):
            health = self.planner.health[0]
            health.loaded(1000, 1000 * STEP_S / (chunks_per_step * CHUNK), self.clock.now)
            self.planner.health.computed(1000, 1000 * STEP_S / COMPUTED)

    def ask_new(self, count: int, tokens: int = NEW_TOKENS) -> None:
        """Add requests whose prompts no tier holds."""
        for number, prompt in enumerate(prompts_of(count, tokens, seed=99)):
            self.ask(f"new{number}", prompt)

    def run(self) -> int:
        """Serve everything; returns the number of steps until the last answer."""
        while self.scheduler.requests:
            self.step()
        steps = self.steps
        self.drain()
        self.check_idle()
        waits = self.planner.read_waits
        assert not any((waits._waits, waits._ended))
        return steps

    def mean_first(self) -> float:
        """The mean number of steps to the first token of the requests that ``begin`` has added."""
        return statistics.fmean(n for name, n in self.first.items() if name.startswith("again"))


World = Callable[..., WaitingWorld]


@pytest.fixture(name="world")
def _world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    clock = StepClock()
    for module in TIMED:
        monkeypatch.setattr(module, "time", clock)
    # The duration of short loads is measured in this machine's time, not in steps.
    monkeypatch.setattr(LoadOrRecompute, "tokens_min", 0.0)
    numbers = itertools.count()

    def make(choice: str, **options: Any) -> WaitingWorld:
        extra = {"look_ahead": 0.5, "wait_for_reads": choice, "max_load_gpu_share": 1.0}
        extra |= {"break_even": False} | options
        conditions = Conditions(slots=120, batched_tokens=COMPUTED, late=20, options=extra)
        model = dataclasses.replace(MODELS["full"], blocks=75)
        return WaitingWorld(clock, model, conditions, tmp_path / str(next(numbers)), 0)

    return make


def test_no_request_waits_behind_requests_that_wait_for_reads(world: World) -> None:
    """Two prompts on disk would hold all blocks; new prompts behind them are answered in the
    meantime."""
    last = {}
    for choice in ("never", "auto", "always"):
        with world(choice) as served:
            served.begin(prompts_of(2, TOKENS), reads_per_step=1)
            served.measured(1)
            served.ask_new(3)
            served.run()
            last[choice] = max(n for name, n in served.first.items() if name.startswith("new"))
            assert len(served.disk.order) == 2 * CHUNKS, "each chunk is read once"
            assert served.counts()["wasted"] == 0
    assert last["auto"] == last["always"] < 10 < CHUNKS < last["never"], last


def test_a_request_that_waits_holds_no_blocks_and_begins_with_all_that_was_read(
    world: World,
) -> None:
    with world("always") as served:
        served.begin(prompts_of(1, TOKENS), reads_per_step=1)
        free = served._free_blocks()
        while "again0" not in served.begun:
            assert served._free_blocks() == free
            served.step()
        assert len(served.disk.order) >= CHUNKS * 7 // 8
        served.run()
        assert sum(served.loaded().values()) == CHUNKS * CHUNK
        assert len(served.disk.order) == CHUNKS
        logged = side(served).log.last[-1]
        assert logged.miss.reason is Reason.COMPLETE
        assert 0.8 * CHUNKS * STEP_S < logged.as_json()["waited_s"] < 1.5 * CHUNKS * STEP_S
        totals = served.planner.totals()
        assert totals["read_waits"] == 1
        assert totals["read_wait_seconds"] == pytest.approx(logged.waited_s)
        span = attributes_of(logged, logged.time_s, CHUNK)
        assert span["kv_cache.read_wait_seconds"] == logged.as_json()["waited_s"]
        assert span["kv_cache.lookup_seconds"] > span["kv_cache.read_wait_seconds"]
        assert span["kv_cache.ahead_tokens"] == CHUNKS * CHUNK


@pytest.mark.parametrize(
    ("prompts", "new", "reads_per_step"), [(1, 1, 1), (2, 3, 16), (PROMPTS, 0, 1)]
)
def test_no_request_waits_without_need(
    prompts: int, new: int, reads_per_step: int, world: World
) -> None:
    """There are blocks for all requests in the queue, or the reads are short, or all requests wait
    for the disk."""
    steps = {}
    for choice in ("never", "auto"):
        with world(choice) as served:
            served.begin(prompts_of(prompts, TOKENS), reads_per_step)
            served.measured(reads_per_step)
            served.ask_new(new)
            steps[choice] = served.run()
            assert served.planner.totals()["read_waits"] == 0
    assert steps["auto"] == steps["never"]


def test_a_disk_that_was_not_measured_is_loaded_from(world: World) -> None:
    with world("auto") as served:
        served.begin(prompts_of(2, TOKENS), reads_per_step=1)
        served.ask_new(3)
        served.step()
        assert len(served.planner.loads._waited_for) == 2
        served.run()


def test_a_disk_that_hangs_delays_no_request_beyond_the_deadline(world: World) -> None:
    """The disk's requests begin with the chunks that have arrived; the rest is computed."""
    with world("always", load_timeout_s=2.0) as served:
        served.begin(prompts_of(1, TOKENS), reads_per_step=1)
        for _ in range(10):
            served.step()
        served.reads_per_step = 0
        while "again0" not in served.first:
            served.step()
            assert served.steps < 2.0 / STEP_S + 20
        read = len(served.disk.order)
        assert sum(served.loaded().values()) == 0, "the first batch never ended"
        assert served.counts()["read"] > read
        logged = side(served).log.last[-1]
        assert logged.miss.note == ShortenReason.LATE.value
        served.reads_per_step = 1000
        served.run()


def test_what_was_read_before_the_deadline_is_loaded(world: World) -> None:
    with world("always", load_timeout_s=2.0) as served:
        served.begin(prompts_of(1, TOKENS), reads_per_step=1)
        for _ in range(18):
            served.step()
        served.reads_per_step = 0
        while "again0" not in served.first:
            served.step()
        assert sum(served.loaded().values()) == 16 * CHUNK, "one of two batches"
        served.reads_per_step = 1000
        served.run()


def test_no_request_starves_behind_requests_that_come_later(world: World) -> None:
    """New requests arrive in every step while a request waits for a slow disk."""
    with world("always") as served:
        served.begin(prompts_of(2, TOKENS), reads_per_step=0.5)
        for number in range(1000):
            if number % 3 == 0:
                for prompt in prompts_of(1, NEW_TOKENS, seed=1000 + number):
                    served.ask(f"new{number}", prompt)
            served.step()
            if {"again0", "again1"} <= served.first.keys():
                break
        assert max(served.first["again0"], served.first["again1"]) < TOTAL_S / STEP_S
        served.run()


def test_aborted_requests_leave_nothing(world: World) -> None:
    with world("always") as served:
        served.begin(prompts_of(PROMPTS, TOKENS), reads_per_step=1)
        for _ in range(5):
            served.step()
        assert len(served.planner.read_waits) == PROMPTS
        for name in list(served.scheduler.requests):
            served.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        assert not len(served.planner.read_waits)
        served.run()
        assert served.planner.totals()["read_wait_seconds"] > 0


@pytest.mark.parametrize("what", ["reset", "doubt", "failure"])
def test_a_wait_ends_when_reads_end(what: str, world: World) -> None:
    with world("always") as served:
        served.begin(prompts_of(PROMPTS, TOKENS), reads_per_step=1)
        for _ in range(5):
            served.step()
        assert len(served.planner.read_waits) == PROMPTS
        if what == "reset":
            served.change_weights()
        elif what == "doubt":
            side(served).hold()
        else:
            tier = served.planner.health[0]
            while tier.reads.closed:
                tier.reads.observe(0, 1, served.clock.now)
        served.reads_per_step = 1000
        served.step()
        assert "again0" in served.begun
        if what == "doubt":
            side(served).release()
        served.run()


def test_a_preempted_request_does_not_wait_again(world: World) -> None:
    """A request that vLLM preempts because it lacks blocks is looked up again in the next step."""
    with world("always") as served:
        served.begin(prompts_of(2, TOKENS), reads_per_step=1)
        request = served.scheduler.requests["again0"]
        side(served)._waiting_requests.add(side(served).admit(request), request, preempted=True)
        served.step()
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert list(served.planner.read_waits._waits) == ["again1"]
        served.run()


def test_behind_other_reads_a_prompt_is_computed_if_that_is_sooner(world: World) -> None:
    with world("auto", break_even=True) as served:
        served.begin(prompts_of(PROMPTS, TOKENS), reads_per_step=2)
        served.measured(2)
        served.run()
        assert served.planner.totals()["read_waits"] > 0
        notes = [logged.miss.note for logged in side(served).log.last]
        assert ShortenReason.QUEUE.value in notes
        assert 0 < len(served.disk.order) < PROMPTS * CHUNKS


@pytest.mark.parametrize("name", ["full", "sliding_full_ngram", "mamba1_full"])
def test_every_byte_read_is_right_while_requests_wait(name: str, tmp_path: Path) -> None:
    count = 0
    for seed in range(2):
        conditions = dataclasses.replace(
            conditions_of(name, seed),
            options={"look_ahead": 0.5, "wait_for_reads": "always"},
            tier=True,
            slots=12,
        )
        with OracleEngine(MODELS[name], conditions, tmp_path / str(seed), seed) as served:
            budget = served.planner.budget
            budget.units = max(budget.units, 24)  # stores would use up the shortest steps
            live(served)
            assert served.finished > 5
            waits = served.planner.read_waits
            assert not any((waits._waits, waits._ended))
            count += waits.count
    assert count > 0
