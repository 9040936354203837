"""Tests of look-ahead alone: which chunks it reads, keeps and gives up, and its counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from offload.index.capacity import ByteCapacity, SlotCapacity
from offload.index.chunk_batch import ChunkBatch, GroupInfo, RequestOrigin
from offload.index.request_options import RequestHints
from offload.index.tier_index import TierIndex
from offload.layout.keys import group_suffix
from offload.messages.plan import LoadJob
from offload.messages.report import JobResult, StepReport
from offload.planner.look_ahead import ahead_requests, look_ahead, wanted_soon
from offload.planner.look_ahead.ahead_use import NOT_READ_AHEAD, AheadCounts, AheadUse
from offload.planner.planner import Planner, PlannerSettings
from offload.planner.tier_health import TierHealths
from policies import hints
from policies.base import EntryInfo
from policies.eviction.lru import LruPolicy
from tests.offload.planner.simulated_ranks import key_of

SIZE = 100


class Queue:
    """A planner whose lower tiers hold the chunks 0 to 99, and requests that wait. ``settings``
    are further settings of the planner."""

    def __init__(
        self,
        slots: int = 40,
        share: float = 0.5,
        tiers: int = 1,
        health: TierHealths | None = None,
        **settings: Any,
    ) -> None:
        self.disks = [
            TierIndex(f"disk{n}", ByteCapacity(1 << 20), LruPolicy()) for n in range(tiers)
        ]
        for disk in self.disks:
            info = EntryInfo(0, "full", size_bytes=SIZE)
            disk.recover([key_of(n) for n in range(100)], [info] * 100)
        cpu = TierIndex("cpu", SlotCapacity(slots), LruPolicy())
        groups = {0: GroupInfo("full", 16, (SIZE,) * tiers)}
        self.planner = Planner(
            groups,
            cpu,
            self.disks,
            PlannerSettings(look_ahead=share, **settings),
            health=health,
        )
        self.ahead = self.planner.look_ahead
        self.now = 0.0
        self.reading: list[LoadJob] = []

    def wait(self, name: str, numbers: Iterable[int], *order: int, **origin: object) -> None:
        self.ahead.enter(name, order, [batch(numbers, **origin)])

    def step(self, seconds: float = 0.01) -> list[int]:
        """Run a step; return the chunks whose reads ahead it begins."""
        self.now += seconds
        self.planner.tick(self.now)
        loads = self.planner.step().loads
        self.reading += loads
        return [number(item.key) for job in loads if job.is_ahead for item in job.items]

    def end(self, *bad: int, tiers: Sequence[int] = (0, 1), **answer: object) -> None:
        """End the reads of these tiers that are under way with this ``answer``; those of ``bad``
        chunks fail."""
        failed = frozenset(map(key_of, bad))
        jobs = [job for job in self.reading if job.items[0].tier in tiers]
        self.reading = [job for job in self.reading if job not in jobs]
        results = {
            job.job: JobResult(bad=failed & {item.key for item in job.items}, **answer)  # type: ignore[arg-type]  # tests give what fits
            for job in jobs
        }
        self.planner.complete(StepReport(results))
        self.planner.check()

    def held(self) -> list[int]:
        return sorted(map(number, self.ahead._held))

    def wanted(self) -> list[int]:
        """The chunks that the CPU tier keeps for the first requests."""
        return sorted(map(number, self.ahead._wanted.keys))

    def evictable(self) -> list[int]:
        """The chunks that an eviction of everything removes."""
        return sorted(map(number, self.planner.cpu.evict(1 << 20)))


def number(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


def batch(numbers: Iterable[int], **origin: object) -> ChunkBatch:
    keys = list(map(key_of, numbers))
    depths = range(16, 16 * (len(keys) + 1), 16)
    return ChunkBatch(keys, 0, (), depths, RequestOrigin(**origin))  # type: ignore[arg-type]  # tests give what fits


def test_chunks_are_read_in_the_order_of_the_requests_up_to_the_share() -> None:
    queue = Queue()
    queue.wait("second", range(30, 45), 2)
    queue.wait("first", range(10), 1)
    assert queue.step() == [*range(10), *range(30, 40)], "half of 40 slots"
    queue.end()
    assert queue.step() == [], "they have not been used"


def test_pins_of_clients_and_reads_ahead_leave_slots_for_stores() -> None:
    queue = Queue(share=0.25)
    queue.planner.cpu.retention.register_client_pins(set(map(key_of, range(1000, 1030))))
    queue.wait("one", range(20), 1)
    assert queue.step() == list(range(5)), "half of the ten slots that are not pinned"


def test_what_the_request_loads_is_used_and_the_rest_is_given_up() -> None:
    """vLLM may accept fewer tokens than were found."""
    queue = Queue()
    queue.wait("one", range(10), 1)
    queue.step()
    queue.end()
    use = queue.ahead.leave("one", [batch(range(6))])
    assert use == AheadUse(tokens=6 * 16, wasted_tokens=4 * 16)
    assert queue.ahead.counts.chunks == {"read": 10, "used": 6, "late": 0, "wasted": 4}
    totals = queue.planner.totals()
    assert (totals["ahead_used_bytes"], totals["ahead_wasted_bytes"]) == (6 * SIZE, 4 * SIZE)
    assert queue.evictable() == list(range(10))


def test_bytes_are_those_of_all_ranks() -> None:
    queue = Queue(ranks=2)
    queue.wait("one", range(10), 1)
    queue.step()
    assert queue.planner.totals()["ahead_read_bytes"] == 2 * 10 * SIZE


def test_the_tokens_are_those_of_the_group_with_the_most() -> None:
    groups = {0: GroupInfo("full", 16, (SIZE,)), 1: GroupInfo("window", 32, (2 * SIZE,))}
    counts = AheadCounts(groups, ranks=1)
    keys = {*map(key_of, range(3)), *(bytes([n]) + group_suffix(1) for n in range(2))}
    assert counts.used(keys, set()) == AheadUse(tokens=2 * 32)
    assert counts.totals()["ahead_used_bytes"] == (3 + 2 * 2) * SIZE


def test_a_load_that_still_waits_for_its_read_is_late() -> None:
    queue = Queue()
    queue.wait("one", range(10), 1)
    queue.step()
    use = queue.ahead.leave("one", [batch(range(10))])
    assert use == AheadUse(tokens=160, late_tokens=160)
    assert queue.ahead.counts.chunks == {"read": 10, "used": 10, "late": 10, "wasted": 0}


def test_the_saved_time_is_that_of_reads_that_were_used_and_not_late() -> None:
    queue = Queue()
    queue.wait("one", range(10), 1)
    queue.step()
    queue.end(9, seconds=2.0)
    use = queue.ahead.leave("one", [batch([*range(4), 9])])
    assert use.saved_s == pytest.approx(4 * 2.0 / 10)
    assert queue.planner.totals()["ahead_saved_seconds"] == use.saved_s
    queue.wait("late", range(20, 30), 2)
    queue.step()
    assert queue.ahead.leave("late", [batch(range(20, 30))]).saved_s == 0.0
    queue.end(seconds=5.0)
    assert queue.ahead.counts.saved_s == pytest.approx(0.8)
    assert queue.ahead.counts._took_s == {}, "nothing is kept for chunks that no request waits for"


def test_chunks_that_were_read_for_another_request_save_their_read_time() -> None:
    queue = Queue()
    queue.wait("one", range(10), 1)
    queue.wait("two", range(5, 10), 2)
    queue.step()
    queue.end(seconds=1.0)
    queue.ahead.leave("one")
    assert queue.ahead.counts.saved_s == 0.0
    queue.ahead.leave("two", [batch(range(5, 10))])
    assert queue.ahead.counts.saved_s == pytest.approx(0.5)


def test_what_a_request_lost_before_it_left_is_wasted() -> None:
    """A read fails, and a reset drops the rest."""
    queue = Queue()
    queue.wait("one", range(10), 1)
    queue.wait("two", range(10, 13), 2)
    queue.step()
    queue.end(3)
    assert queue.ahead.counts.chunks["wasted"] == 1
    queue.ahead.forget_all()
    assert queue.ahead.leave("one", [batch(range(10))]) == AheadUse(wasted_tokens=10 * 16)
    assert queue.ahead.leave("one") == NOT_READ_AHEAD, "it is counted once"
    assert queue.ahead.leave("two") == AheadUse(wasted_tokens=3 * 16)
    assert not queue.ahead.counts._wasted


def test_chunks_read_for_a_request_that_leaves_pass_to_the_next_that_wants_them() -> None:
    queue = Queue()
    queue.wait("one", range(10), 1)
    queue.wait("two", range(5, 15), 2)
    queue.step()
    queue.end()
    assert queue.ahead.leave("one") == AheadUse(wasted_tokens=5 * 16), "not what the next one wants"
    assert queue.held() == list(range(5, 15))
    assert queue.ahead.counts.chunks["wasted"] == 5
    assert queue.ahead.leave("two", [batch(range(5, 15))]) == AheadUse(tokens=10 * 16)
    assert queue.held() == []
    assert queue.ahead.counts.chunks == {"read": 15, "used": 10, "late": 0, "wasted": 5}


def test_a_request_is_late_only_if_others_overtake_it_after_its_read() -> None:
    """In a long queue, chunks that were read for its end are not given up at once."""
    queue = Queue(share=0.25)
    queue.wait("first", range(10), 1)
    queue.wait("last", range(10, 20), 2)
    queue.step()
    queue.end()
    queue.step(ahead_requests.AHEAD_STALE_S - 1)
    queue.ahead.leave("first", [batch(range(10))])
    assert queue.step(2.0) == list(range(10, 20)), "it has waited for a minute"
    queue.end()
    queue.step()
    assert queue.held() == list(range(10, 20))
    queue.wait("urgent", (), 0)
    queue.ahead.leave("urgent")
    queue.step(ahead_requests.AHEAD_STALE_S)
    assert queue.held() == []
    assert queue.ahead.counts.chunks["wasted"] == 10


def test_the_next_request_keeps_its_chunks_while_others_write_long_answers() -> None:
    """No request leaves the queue for minutes, so none overtakes it."""
    queue = Queue(share=0.5)
    queue.wait("next", range(10), 1)
    queue.step()
    queue.end()
    for _ in range(4):
        queue.step(ahead_requests.AHEAD_STALE_S)
    assert queue.ahead.counts.chunks["wasted"] == 0
    assert queue.evictable() == []


def test_in_a_queue_of_minutes_each_chunk_is_read_once_and_used() -> None:
    """Twenty requests take twenty seconds each: chunks that were read for a request stay while it
    advances in the queue."""
    queue = Queue(share=0.5)
    prompts = {f"r{n}": range(5 * n, 5 * n + 5) for n in range(20)}
    for place, (name, numbers) in enumerate(prompts.items()):
        queue.wait(name, numbers, place)
    for name, numbers in prompts.items():
        for _ in range(20):
            queue.step(ahead_requests.AHEAD_STALE_S / 60)
            queue.end()
        queue.ahead.leave(name, [batch(numbers)])
    assert queue.ahead.counts.chunks == {"read": 100, "used": 100, "late": 0, "wasted": 0}


def test_a_request_that_others_overtake_for_minutes_loses_what_was_read_for_it() -> None:
    """Whenever an urgent request runs, another one arrives, so the patient request never advances
    in the queue."""
    queue = Queue(share=0.25)
    queue.wait("patient", range(10), 9)
    queue.wait("urgent0", (), 0)
    queue.step()
    queue.end()
    for number in range(1, 6):
        queue.ahead.leave(f"urgent{number - 1}")
        queue.wait(f"urgent{number}", (), number)
        queue.step(ahead_requests.AHEAD_STALE_S / 4)
    assert queue.held() == []
    use = queue.ahead.leave("patient", [batch(range(10))])
    assert use == AheadUse(wasted_tokens=10 * 16), "once it has left"


def test_a_failed_read_is_given_up_and_not_repeated() -> None:
    queue = Queue()
    queue.wait("one", range(10), 1)
    queue.step()
    queue.end(3, 4)
    assert queue.held() == [0, 1, 2, 5, 6, 7, 8, 9]
    assert queue.ahead.counts.chunks["wasted"] == 2
    assert queue.step() == []
    queue.ahead.leave("one")
    assert queue.ahead.counts.chunks == {"read": 10, "used": 0, "late": 0, "wasted": 10}


def test_a_request_that_enters_again_reads_what_is_missing_by_then() -> None:
    """A read has failed, and chunks were evicted from the CPU tier; the rest is not read again."""
    queue = Queue()
    fill(queue, range(3))
    queue.wait("one", range(10), 1)
    assert queue.step() == list(range(3, 10))
    queue.end(4)
    assert queue.evictable() == [0, 1, 2]
    assert queue.step() == []
    queue.wait("one", range(10), 1)
    assert queue.step() == [0, 1, 2, 4]
    queue.end()
    assert queue.evictable() == []
    assert queue.ahead.leave("one", [batch(range(10))]) == AheadUse(160, wasted_tokens=16)
    assert queue.ahead.counts.chunks == {"read": 11, "used": 10, "late": 0, "wasted": 1}


def test_a_request_that_enters_again_gives_up_what_it_no_longer_loads() -> None:
    queue = Queue()
    queue.wait("one", range(10), 1)
    queue.wait("two", range(8, 12), 2)
    assert queue.step() == list(range(12))
    queue.wait("one", range(6), 1)
    queue.end()
    assert queue.held() == [*range(6), *range(8, 12)]
    assert queue.ahead.counts.chunks["wasted"] == 2
    assert queue.evictable() == [6, 7]
    queue.ahead.enter("one", (1,), [])
    assert queue.evictable() == list(range(6)), "none of its chunks is left in any tier"
    queue.ahead.enter("three", (3,), [])
    assert queue.ahead.leave("one") == AheadUse(wasted_tokens=8 * 16)
    assert queue.ahead.leave("two", [batch(range(8, 12))]) == AheadUse(4 * 16)
    assert not any((queue.ahead.queue, queue.ahead._wanted.keys, queue.ahead._watch))


def test_what_a_request_wants_when_it_enters_again_is_evicted_last() -> None:
    queue = Queue(share=0.25)
    fill(queue, range(200, 240))
    queue.wait("one", range(200, 210), 1)
    queue.wait("one", range(210, 220), 1)
    queue.planner.cpu.evict(30)
    assert sorted(map(number, queue.planner.cpu.resident)) == list(range(210, 220))


def test_a_reset_during_reads_ends_them() -> None:
    queue = Queue()
    queue.wait("one", range(10), 1)
    queue.step()
    queue.planner.forget_all()
    queue.end()
    assert queue.held() == []
    assert len(queue.planner.cpu) == 0
    assert not queue.ahead.is_reading
    assert queue.ahead.counts.chunks["wasted"] == 10
    queue.ahead.leave("one")
    queue.wait("two", range(20, 30), 1)
    queue.step()
    assert queue.wanted() == list(range(20, 30))
    queue.planner.check()


@pytest.mark.parametrize(("priority", "begun"), [(hints.LOW, 0), (hints.NORMAL, 10)])
def test_low_priority_evicts_nothing_for_reads_ahead(priority: str, begun: int) -> None:
    queue = Queue()
    fill(queue, range(200, 240))
    stored = RequestHints(stored={hints.PRIORITY: priority})
    queue.wait("one", range(10), 1, hints=stored)
    assert len(queue.step()) == begun


def fill(queue: Queue, numbers: Sequence[int]) -> None:
    """Fill the CPU tier with chunks that no request wants."""
    keys = [key_of(n) for n in numbers]
    infos = [EntryInfo(0, "full", size_bytes=1)] * len(keys)
    queue.planner.cpu.reserve(keys, infos)
    queue.planner.cpu.commit(keys, infos)


def test_a_full_cpu_tier_is_tried_again_when_a_job_has_ended() -> None:
    queue = Queue()
    keys = range(200, 240)
    fill(queue, keys)
    queue.planner.cpu.pin([key_of(n) for n in keys])
    queue.wait("one", range(10), 1)
    assert queue.step() == []
    queue.planner.cpu.unpin([key_of(n) for n in keys])
    assert [len(queue.step()) for _ in range(look_ahead.AHEAD_RETRY_STEPS + 1)] == [
        0
    ] * look_ahead.AHEAD_RETRY_STEPS + [10]


def test_what_was_read_is_not_evicted_before_its_request_leaves() -> None:
    queue = Queue()
    queue.wait("one", range(10), 1)
    queue.step()
    queue.end()
    assert queue.evictable() == []
    queue.ahead.leave("one", [batch(range(10))])
    assert queue.evictable() == list(range(10))


def test_what_waiting_requests_want_is_evicted_last() -> None:
    queue = Queue(share=0.25)
    fill(queue, range(200, 220))
    queue.wait("one", range(200, 210), 1)
    cpu = queue.planner.cpu
    assert sorted(map(number, cpu.evict(10))) == list(range(210, 220))
    assert sorted(map(number, cpu.evict(10))) == list(range(200, 210)), "but it is evicted"


@pytest.mark.parametrize(
    ("left", "kept"), [((), range(200, 215)), (("one",), range(215, 230))], ids=["first", "second"]
)
def test_what_the_next_requests_want_is_evicted_last(left: Sequence[str], kept: range) -> None:
    """At most half of the CPU tier is spared in this way; the next request's chunks follow when the
    first request has left."""
    queue = Queue(share=0.25)
    fill(queue, range(200, 240))
    queue.wait("one", range(200, 215), 1)
    queue.wait("two", range(215, 230), 2)
    for name in left:
        queue.ahead.leave(name, [batch(range(200, 215))])
    queue.planner.cpu.evict(25)
    assert sorted(map(number, queue.planner.cpu.resident)) == list(kept)


def test_what_an_urgent_request_wants_displaces_what_later_ones_want() -> None:
    queue = Queue(share=0.25)
    fill(queue, range(200, 240))
    queue.wait("later", range(200, 215), 2)
    queue.wait("urgent", range(215, 230), 1)
    assert sorted(map(number, queue.planner.cpu.evict(25))) == [
        *range(200, 215),
        *range(230, 240),
    ]


def test_an_error_ends_look_ahead_and_not_the_steps_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = Queue()
    queue.wait("one", range(10), 1)
    with monkeypatch.context() as patch:
        patch.setattr(queue.ahead, "_read", None)
        with pytest.raises(TypeError):
            queue.step()
        assert queue.step() == []
    queue.wait("two", range(10), 2)
    assert queue.step() == list(range(10))


def test_a_long_prompt_enters_with_its_head_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wanted_soon, "WANTED_CHUNKS_MAX", 4)
    queue = Queue()
    queue.wait("one", range(10), 1)
    assert queue.step() == [0, 1, 2, 3]


def test_a_spent_step_reads_nothing_ahead() -> None:
    queue = Queue()
    queue.wait("one", range(10), 1)
    queue.planner.budget.spend(queue.planner.budget.left)
    assert queue.step() == []
    assert queue.step() == list(range(10))


def test_a_chunk_that_was_dropped_is_read_for_the_request_that_wants_it_next() -> None:
    queue = Queue()
    queue.wait("one", range(4), 1)
    queue.step()
    queue.end()
    queue.planner.cpu.drop([key_of(2)])
    queue.wait("two", range(4), 2)
    assert queue.step() == [2]
    queue.end()
    assert queue.ahead.leave("one", [batch(range(4))]) == AheadUse(3 * 16, wasted_tokens=16)
    assert queue.held() == [2]
    assert queue.ahead.leave("two", [batch(range(4))]) == AheadUse(16)
    assert queue.held() == []
    assert queue.ahead.counts.chunks == {"read": 5, "used": 4, "late": 0, "wasted": 1}


@pytest.mark.parametrize(
    ("at", "call"),
    [
        ("_leave", lambda queue: queue.ahead.leave("one")),
        ("_enter", lambda queue: queue.wait("two", range(10), 2)),
        ("_renew", lambda queue: queue.wait("one", range(10), 1)),
    ],
)
def test_an_error_at_a_request_keeps_nothing_in_the_cpu_tier(
    at: str, call: Callable[[Queue], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue()
    queue.wait("one", range(10), 1)
    queue.step()
    queue.end()
    with monkeypatch.context() as patch:
        patch.setattr(queue.ahead, at, None)
        with pytest.raises(TypeError):
            call(queue)
    assert queue.held() == []
    assert queue.step() == []
    assert queue.evictable() == list(range(10))
