"""Look-ahead under vLLM's real scheduler: prompts that wait are read into the CPU tier in the order
in which they will run, and nothing that was read is evicted before its use."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from offload.connector.scheduler.prefill_rate import PrefillRate
from offload.planner.load_or_recompute import SAMPLES_MIN, LoadOrRecompute
from offload.planner.look_ahead.look_ahead import AHEAD_FLYING_MAX
from offload.requests.request_identity import RequestIdentity
from policies.registry import make_policy
from policies.simulation import trace
from policies.simulation.simulator import FlopModel, Infos, SimTier
from policies.simulation.timing import Speeds, simulate_timed
from tests.oracle.forward import VOCABULARY
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.test_scheduler import conditions_of, live
from tiers.base import ReadOutcome, Tier
from tiers.testing.memory_tier import MemoryTier


class PacedTier(MemoryTier):
    """Reads as many records as it has been granted; ``order`` has the keys in the order in which
    they were read."""

    def __init__(self, **options: Any) -> None:
        super().__init__(1 << 22, **options)
        self.granted = 0.0
        self.order: list[bytes] = []

    async def read(self, keys: Any, into: Any) -> list[ReadOutcome]:
        outcomes = []
        for key, buffer in zip(keys, into, strict=True):
            while self.granted < 1:  # noqa: ASYNC110  # the loop only turns when the world says so
                await asyncio.sleep(0)
            self.granted -= 1
            self.order.append(key)
            outcomes += await super().read([key], [buffer])
        return outcomes


class Backlog(OracleEngine):
    """A world whose lower tier reads ``reads_per_step`` records in a step, from ``begin`` on, where
    answers have ``answer_tokens_again`` tokens."""

    reads_per_step = 1e9
    answer_tokens = 2
    answer_tokens_again = 24
    steps = 0

    def _make_tier(self, spec: Any) -> Tier:
        self.disk = PacedTier(namespace=spec.namespace, rank=spec.rank, epoch=spec.epoch)
        return self.disk

    def step(self) -> None:
        self.disk.granted = min(self.disk.granted, 1.0) + self.reads_per_step
        self.steps += 1
        super().step()
        self.check()
        only_waiting_requests(self)

    def ask(self, name: str, prompt: list[int], priority: int = 0) -> None:
        self._salts[name] = None
        sampling = SamplingParams(max_tokens=self.answer_tokens, ignore_eos=True, temperature=0.0)
        request = Request(
            name, prompt, sampling, None, block_hasher=self._hasher, priority=priority
        )
        self.scheduler.add_request(request)

    def store(self, prompts: list[list[int]]) -> None:
        """Compute all prompts, one after the other, and leave them only on disk."""
        for number, prompt in enumerate(prompts):
            self.ask(f"first{number}", prompt)
            self.drain()
        self.scheduler.reset_prefix_cache()
        self.planner.cpu.evict(1 << 20)
        assert not len(self.planner.cpu)
        self.disk.order.clear()

    def begin(
        self, prompts: list[list[int]], reads_per_step: float, *, last_first: bool = False
    ) -> None:
        """``store`` the prompts, and request them again. With ``last_first`` the last one is the
        most urgent."""
        self.store(prompts)
        self.reads_per_step = reads_per_step
        self.steps = 0
        self.answer_tokens = self.answer_tokens_again
        for number, prompt in enumerate(prompts):
            self.ask(f"again{number}", prompt, -number if last_first else 0)

    def keys_of(self, prompt: list[int]) -> set[bytes]:
        request = Request("keys", prompt, SamplingParams(), None, block_hasher=self._hasher)
        identity = RequestIdentity("keys", self.connector.serving.side.layout)
        identity.extend(request.block_hashes)
        return set(identity.keys[0][: len(prompt) // 4])

    def counts(self) -> dict[str, int]:
        return dict(self.planner.look_ahead.counts.chunks)


def only_waiting_requests(served: OracleEngine) -> None:
    """Check that look-ahead concerns no request that runs, loads or has ended."""
    names = served.planner.look_ahead._requests.keys()
    names |= served.connector.serving.side._waiting_requests._waiting.keys()
    waits = {RequestStatus.WAITING, RequestStatus.PREEMPTED}
    found = {name: served.scheduler.requests[name].status for name in names}
    assert set(found.values()) <= waits, found


def prompts_of(count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def world(
    folder: Path,
    look_ahead: float,
    slots: int = 120,
    scheduling: str = "fcfs",
    *,
    break_even: bool = False,
) -> Backlog:
    options = {"look_ahead": look_ahead, "break_even": break_even, "max_load_gpu_share": 1.0}
    conditions = Conditions(
        slots=slots, batched_tokens=32, late=20, scheduling=scheduling, options=options
    )
    model = dataclasses.replace(MODELS["full"], blocks=75)
    return Backlog(model, conditions, folder, 0)


PROMPTS, TOKENS = 6, 121
CHUNKS = TOKENS // 4


def test_a_backlog_is_read_while_it_waits(tmp_path: Path) -> None:
    """Every chunk is read once, in the order of the requests, and the whole takes fewer steps."""
    steps = {}
    for share in (0.0, 0.5):
        with world(tmp_path / str(share), share) as served:
            served.begin(prompts_of(PROMPTS, TOKENS), reads_per_step=4)
            served.drain()
            steps[share] = served.steps
            assert len(served.disk.order) == PROMPTS * CHUNKS, "each chunk is read once"
            assert served.loaded()["file"] + served.loaded()["cpu"] == PROMPTS * CHUNKS * 4
            served.check_idle()
            if share:
                counts = served.counts()
                assert counts["read"] == counts["used"] > 3 * CHUNKS
                assert counts["wasted"] == 0
                aheads = [logged.ahead for logged in side(served).log.last]
                assert sum(ahead.tokens for ahead in aheads) == 4 * counts["used"]
                saved_s = sum(ahead.saved_s for ahead in aheads)
                assert saved_s == pytest.approx(served.planner.look_ahead.counts.saved_s)
                assert saved_s > 0
    assert steps[0.5] < steps[0.0], steps


@pytest.mark.parametrize("reads_per_step", [2, 4, 8])
def test_the_simulation_agrees_with_vllms_scheduler(reads_per_step: int, tmp_path: Path) -> None:
    """One second of `policies.simulation.timing` is a step here. Its total is shorter by at most a
    seventh, because a load begins and ends between steps in the scheduler, and look-ahead saves the
    same share.
    """
    speeds = Speeds(32, 1, 4 * reads_per_step, in_flight=2)  # tokens per step; 4 in a chunk
    requests = [
        trace.Request(0.0, TOKENS, ((CHUNKS * number, CHUNKS),), 24) for number in range(PROMPTS)
    ]
    steps, simulated = {}, {}
    for share in (0.0, 0.5):
        with world(tmp_path / str(share), share) as served:
            served.begin(prompts_of(PROMPTS, TOKENS), reads_per_step)
            served.drain()
            steps[share] = served.steps
        upper, lower = (SimTier(make_policy("lru"), blocks) for blocks in (120, 1000))
        infos = Infos(4, FlopModel())
        for request in requests:
            lower.insert(request.blocks(), [infos.plain(depth) for depth in range(CHUNKS)])
        result = simulate_timed(
            trace.Trace("six prompts", 4, requests), upper, lower, speeds, look_ahead=share
        )
        simulated[share] = result.extra["total_s"]
        assert 0.8 < simulated[share] / steps[share] < 1, (simulated, steps)
    saved = 1 - steps[0.5] / steps[0.0]
    assert 1 - simulated[0.5] / simulated[0.0] == pytest.approx(saved, abs=0.05)


@pytest.mark.parametrize("reads_per_step", [9, 12])
def test_what_waits_is_read_ahead_while_others_load_from_a_tier_that_pays(
    reads_per_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break-even is on, and both speeds are known: a request that could run would compute instead
    of waiting for the loads before it, but these requests cannot run."""
    monkeypatch.setattr(LoadOrRecompute, "tokens_min", 0.0)  # short loads: not measured in steps
    monkeypatch.setattr(PrefillRate, "left_tokens", lambda rate: 0)  # nothing else to compute
    steps = {}
    for share in (0.0, 0.5):
        with world(tmp_path / str(share), share, break_even=True) as served:
            served.begin(prompts_of(PROMPTS, TOKENS), reads_per_step)
            for _ in range(SAMPLES_MIN):
                served.planner.health[0].loaded(1000, 1000 / (4 * reads_per_step), 0.0)
                served.planner.health.computed(1000, 1000 / 32)
            served.drain()
            steps[share] = served.steps
            counts = served.counts()
            assert (counts["used"] > 3 * CHUNKS) == (share > 0)
            assert counts["wasted"] == 0
    assert steps[0.5] < steps[0.0], steps


@pytest.mark.parametrize("reads_per_step", [4, 6])
def test_a_disk_slower_than_computing_is_read_for_requests_that_wait(
    reads_per_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running requests are computed, at 8 chunks per step, while the disk reads for those
    behind them. No request waits for the disk."""
    monkeypatch.setattr(LoadOrRecompute, "tokens_min", 0.0)  # short loads: not measured in steps
    monkeypatch.setattr(LoadOrRecompute, "probe_due", lambda pace, now: False)
    steps, firsts = {}, {}
    for share in (0.0, 0.5):
        with world(tmp_path / str(share), share, break_even=True) as served:
            served.begin(prompts_of(PROMPTS, TOKENS), reads_per_step)
            for _ in range(SAMPLES_MIN):
                served.planner.health.computed(1000, 1000 / 32)
                served.planner.health[0].loaded(1000, 1000 / (4 * reads_per_step), 0.0)
            assert not served.planner.health[0].readable
            requests = dict(served.scheduler.requests)
            first: dict[str, int] = {}
            while served.scheduler.requests:
                served.step()
                statuses = {request.status for request in requests.values()}
                assert RequestStatus.WAITING_FOR_REMOTE_KVS not in statuses or share
                for name, request in requests.items():
                    if request.num_output_tokens:
                        first.setdefault(name, served.steps)
            steps[share], firsts[share] = served.steps, sum(first.values())
            served.drain()
            counts = served.counts()
            assert len(served.disk.order) == counts["read"]
            assert (counts["used"] > CHUNKS) == (share > 0)
            assert counts["wasted"] <= PROMPTS * AHEAD_FLYING_MAX, "reads in flight"
            served.check_idle()
    assert steps[0.5] < steps[0.0], steps
    assert firsts[0.5] < firsts[0.0], firsts


def test_more_waits_than_the_cpu_tier_holds(tmp_path: Path) -> None:
    """Nothing that was read is evicted before its use, and every request is served (vllm#49902)."""
    with world(tmp_path, 0.5, slots=50) as served:
        served.begin(prompts_of(7, TOKENS), reads_per_step=4)
        for _ in range(2000):
            held = served.planner.look_ahead._held
            assert len(held) <= served.planner.cpu.space.capacity // 2
            assert all(not served.planner.cpu.is_absent(key) for key in held)
            served.step()
            if not served.scheduler.requests:
                break
        served.drain()
        counts = served.counts()
        assert counts["wasted"] == 0
        assert counts["used"] > 0
        assert len(served.disk.order) <= 1.05 * 7 * CHUNKS
        served.check_idle()


def test_requests_that_go_away_give_up_what_was_read_for_them(tmp_path: Path) -> None:
    with world(tmp_path, 0.5) as served:
        served.begin(prompts_of(PROMPTS, TOKENS), reads_per_step=4)
        for _ in range(12):
            served.step()
        for name in list(served.scheduler.requests):
            served.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        served.drain()
        assert not served.planner.look_ahead._held
        assert not served.planner.look_ahead._wanted.keys
        counts = served.counts()
        assert counts["read"] == counts["used"] + counts["wasted"]
        assert counts["wasted"] > 0
        served.check_idle()


def test_what_vllms_own_cache_holds_is_not_read(tmp_path: Path) -> None:
    """All prompts have a common head, which a request that has just ended has left in vLLM's own
    cache."""
    with world(tmp_path, 0.5) as served:
        head = prompts_of(1, 60)[0]
        prompts = [head + tail for tail in prompts_of(6, 61, seed=1)]
        served.begin(prompts, reads_per_step=1e9)
        served.drain()
        served.planner.cpu.evict(1 << 20)
        served.ask("head", [*head, 0])
        served.drain()
        common = served.keys_of(head)
        served.planner.cpu.evict(1 << 20)
        served.disk.order.clear()
        for number, prompt in enumerate(prompts):
            served.ask(f"third{number}", prompt)
        served.drain()
        assert served.counts()["read"] > 0
        assert len(common) == 15
        assert not common & set(served.disk.order)


def test_urgent_requests_are_read_for_first(tmp_path: Path) -> None:
    with world(tmp_path, 0.5, scheduling="priority") as served:
        prompts = prompts_of(PROMPTS, TOKENS)
        served.begin(prompts, reads_per_step=4, last_first=True)
        served.drain()
        number_of = {key: n for n, prompt in enumerate(prompts) for key in served.keys_of(prompt)}
        order = list(dict.fromkeys(map(number_of.__getitem__, served.disk.order)))
        assert order == list(reversed(range(PROMPTS)))
        assert served.counts()["used"] > 3 * CHUNKS
        served.check_idle()


@pytest.mark.parametrize("scheduling", ["fcfs", "priority"])
def test_requests_are_matched_in_the_order_in_which_they_will_run(
    scheduling: str, tmp_path: Path
) -> None:
    """A step looks up 8 of a prompt's 30 chunks. Other requests run, so vLLM does not ask for those
    that wait."""
    with world(tmp_path, 0.5, scheduling=scheduling) as served:
        prompts = prompts_of(PROMPTS, TOKENS)
        served.store(prompts)
        served.answer_tokens = 60
        for number, prompt in enumerate(prompts_of(4, 5, seed=1)):
            served.ask(f"running{number}", prompt)
        served.step()
        lookups = served.planner.budget.lookups
        lookups.chunks, lookups.chunks_min = 8, 1
        lookups.renew()
        urgent_last = scheduling == "priority"
        for number, prompt in enumerate(prompts):
            served.ask(f"again{number}", prompt, -number if urgent_last else 0)
        began, matched = served.steps, dict[str, int]()
        while len(served.scheduler.running) == 4 and len(matched) < PROMPTS:
            served.step()
            for want in served.planner.look_ahead.queue:
                matched.setdefault(want.request, served.steps - began)
        names = [f"again{number}" for number in range(PROMPTS)]
        assert list(matched) == (names[::-1] if urgent_last else names)
        assert all(step <= 4 * (place + 1) for place, step in enumerate(matched.values())), matched
        served.drain()
        served.check_idle()


def test_chunks_that_were_evicted_meanwhile_are_read_before_their_request_runs(
    tmp_path: Path,
) -> None:
    """The chunks were read when the request was far from the front of the queue."""
    with world(tmp_path, 0.5, slots=300) as served:
        prompts = prompts_of(PROMPTS, TOKENS)
        served.begin(prompts, reads_per_step=8)
        lost = served.keys_of(prompts[-1])
        while not lost <= served.planner.cpu.resident.keys():
            served.step()
            assert served.steps < 30
        assert len(served.planner.look_ahead.queue) > 2
        served.planner.cpu.drop(lost)
        served.disk.order.clear()
        served.drain()
        assert sorted(served.disk.order) == sorted(lost)
        logged = {one.request: one.as_json() for one in side(served).log.last}["again5"]
        assert logged["loaded_tokens"] == {"cpu": CHUNKS * 4}
        served.check_idle()


def side(served: Backlog) -> Any:
    return served.connector.serving.side


def test_a_preempted_request_is_read_for_first(tmp_path: Path) -> None:
    with world(tmp_path, 0.5) as served:
        served.begin(prompts_of(PROMPTS, TOKENS), reads_per_step=0)
        served.step()
        request = served.scheduler.requests["again5"]
        side(served)._waiting_requests.add(side(served).admit(request), request, preempted=True)
        served.step()
        ahead = served.planner.look_ahead
        names = [want.request for want in ahead.queue]
        assert len(names) > 2
        assert names == ["again5", *sorted(names[1:])]


def test_requests_that_are_restarted_wait_again_or_run(tmp_path: Path) -> None:
    """All running requests are preempted, again and again; every byte read afterwards is right."""
    with world(tmp_path, 0.5, slots=50) as served:
        served.begin(prompts_of(PROMPTS, TOKENS), reads_per_step=4)
        restarts = 0
        while served.scheduler.requests:
            if served.steps % 9 == 0 and served.scheduler.running:
                served.forget_locally()
                restarts += 1
            served.step()
        served.drain()
        assert restarts > 3
        counts = served.counts()
        assert counts["read"] == counts["used"] + counts["wasted"] > 0
        assert not served.planner.look_ahead._held
        served.check_idle()


def test_a_change_of_weights_ends_all_reads_ahead(tmp_path: Path) -> None:
    with world(tmp_path, 0.5) as served:
        served.begin(prompts_of(PROMPTS, TOKENS), reads_per_step=4)
        while not served.weights:
            served.step()
            if served.planner.look_ahead._held:
                served.change_weights()
        ahead = served.planner.look_ahead
        assert not any((ahead._requests, ahead._held, ahead._wanted.keys))
        served.drain()
        assert not ahead.is_reading
        assert served.counts()["wasted"] > 0
        served.check_idle()


def test_nothing_is_matched_while_the_weights_are_in_doubt(tmp_path: Path) -> None:
    with world(tmp_path, 0.5) as served:
        prompts = prompts_of(PROMPTS, TOKENS)
        served.store(prompts)
        served.reads_per_step = 4
        side(served).hold()
        for number, prompt in enumerate(prompts):
            served.ask(f"again{number}", prompt)
        for _ in range(3):
            served.step()
        assert served.counts()["read"] == 0
        side(served).release()
        served.drain()
        assert served.counts()["used"] > 0
        served.check_idle()


def test_doubt_about_the_weights_ends_reads_ahead(tmp_path: Path) -> None:
    """Until this is resolved, requests are computed; epochs of the tiers may have changed."""
    with world(tmp_path, 0.5) as served:
        served.begin(prompts_of(PROMPTS, TOKENS), reads_per_step=4)
        while not served.counts()["read"]:
            served.step()
        ahead = served.planner.look_ahead
        assert ahead.queue
        side(served).hold()
        assert not any((ahead.queue, ahead._held, ahead._wanted.keys))
        read = served.counts()["read"]
        for _ in range(9):
            served.step()
        assert served.counts()["read"] == read
        side(served).release()
        served.step()
        assert ahead.queue, "the weights are the same: the requests that wait are matched again"
        served.drain()
        assert served.counts()["used"] > 0
        served.check_idle()


def test_a_match_leaves_the_requests_own_lookup_alone(tmp_path: Path) -> None:
    """vLLM may have counted the lookup's hit, and then starts the load, or ends the request, in a
    later step."""
    with world(tmp_path, 0.5) as served:
        served.begin(prompts_of(PROMPTS, TOKENS), reads_per_step=0)
        request = served.scheduler.requests["again5"]
        state = side(served).admit(request)
        promised = side(served).lookups.look_up(state, request, 0)
        (run,) = side(served).lookups.ahead(state, request, 16)
        assert len(run) == CHUNKS - 4
        assert (state.lookup.start, state.lookup.hit_end_tokens) == (0, promised)
        assert state.lookup.is_promised


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["full", "sliding_full_ngram", "mamba1_full"])
def test_every_byte_read_is_right_with_look_ahead(name: str, seed: int, tmp_path: Path) -> None:
    conditions = dataclasses.replace(
        conditions_of(name, seed), options={"look_ahead": 0.5}, tier=True, slots=12
    )
    with OracleEngine(MODELS[name], conditions, tmp_path, seed) as served:
        budget = served.planner.budget
        budget.units = max(budget.units, 24)  # stores would use up the shortest steps
        live(served)
        assert served.finished > 5
        assert not served.planner.look_ahead._held
        assert served.planner.look_ahead.counts.chunks["read"] > 0
