"""Shared tiers as the planner sees them: what is queried, remembered, forgotten, and how much."""

from __future__ import annotations

import pickle

import pytest

from offload.index.capacity import ByteCapacity, SlotCapacity
from offload.index.chunk_batch import ChunkBatch, GroupInfo
from offload.index.tier_index import TierIndex
from offload.layout.keys import group_suffix
from offload.messages.plan import StepPlan, WriteThroughJob
from offload.messages.report import JobResult, Observed, PresenceReply, StepReport
from offload.planner.circuit_breaker import BreakerState
from offload.planner.planner import Planner, PlannerSettings
from offload.planner.presence import ANSWER_MAX_S, PROBE_KEY, STEPS_MIN, PendingLookup, SharedLimits
from offload.planner.tier_health import TierHealths
from policies.eviction.lru import LruPolicy

KEYS = [bytes([n]) * 32 + group_suffix(0) for n in range(20)]
LIMITS = SharedLimits(lookup_timeout_s=0.05, remember_s=5.0, asked_max=12)


class PlannerOverSharedTier:
    """A planner with a private disk (0) and a shared store (1) below the CPU tier."""

    def __init__(
        self, ranks: int = 1, known_most: int = 100, limits: SharedLimits = LIMITS
    ) -> None:
        self.cpu = TierIndex("cpu", SlotCapacity(16), LruPolicy())
        self.disk = TierIndex("disk", ByteCapacity(100), LruPolicy())
        self.store = TierIndex("store", ByteCapacity(known_most), LruPolicy())
        self.health = TierHealths(["disk", "store"])
        self.planner = Planner(
            {0: GroupInfo("full", 16, (1, 1))},
            self.cpu,
            [self.disk, self.store],
            PlannerSettings(ranks=ranks, shared=[1], shared_limits=limits),
            health=self.health,
        )
        self.presence = self.planner.presence
        self.ranks = ranks
        self.now = 0.0

    def query(self, keys: list[bytes]) -> PendingLookup:
        return self.presence.query(keys, None, self.now)

    def at(self, now: float) -> None:
        self.now = now
        self.planner.tick(now)

    def step(self) -> StepPlan:
        return self.planner.step()

    def answer(self, plan: StepPlan, there: list[bytes] | None) -> None:
        """Let every rank reply to every query of a plan."""
        for query in plan.queries:
            flags = None if there is None else bytes(key in there for key in query.keys)
            report = StepReport(answers={query.number: PresenceReply(flags, self.ranks)})
            self.planner.complete(report)

    def learn(self, there: list[bytes], asked: list[bytes] = KEYS[:8]) -> None:
        self.query(asked)
        self.answer(self.step(), there)

    def load(self, keys: list[bytes], result: JobResult) -> None:
        self.planner.loads.plan(
            "r", [ChunkBatch(keys, 0, list(range(len(keys))), range(len(keys)))]
        )
        [job] = self.step().loads
        self.planner.complete(StepReport({job.job: result}))


def test_a_reply_makes_a_chunk_a_hit_and_its_absence_is_remembered_too() -> None:
    world = PlannerOverSharedTier()
    wait = world.query(KEYS[:8])
    assert world.presence.check_wait(wait, 0.0)
    plan = world.step()
    [query] = plan.queries
    assert (query.tier, query.keys) == (1, tuple(KEYS[:8]))
    assert not plan.empty
    world.answer(plan, KEYS[:5])
    assert not world.presence.check_wait(wait, 0.0)
    assert [world.planner.sources.present(key) for key in KEYS[:8]] == [True] * 5 + [False] * 3
    assert not world.query(KEYS[:8]).numbers, "all chunks are known now"
    assert [q.keys for q in _queries(world, KEYS[:10])] == [tuple(KEYS[8:10])]


def _queries(world: PlannerOverSharedTier, keys: list[bytes]) -> list[object]:
    world.query(keys)
    return list(world.step().queries)


def test_open_queries_are_waited_for_and_not_repeated() -> None:
    world = PlannerOverSharedTier()
    first = world.query(KEYS[:4])
    second = world.query(KEYS[2:6])
    plan = world.step()
    assert [q.keys for q in plan.queries] == [tuple(KEYS[:4]), tuple(KEYS[4:6])]
    assert first.numbers < second.numbers
    assert not world.step().queries


def test_present_and_absent_entries_expire() -> None:
    world = PlannerOverSharedTier()
    world.learn(KEYS[:3])
    world.at(4.9)
    assert not world.query(KEYS[:8]).numbers
    world.at(5.1)
    assert not any(map(world.planner.sources.present, KEYS[:3]))
    assert [q.keys for q in _queries(world, KEYS[:8])] == [tuple(KEYS[:8])]
    assert not world.step().deletes, "the store must keep records that this engine has forgotten"


def test_chunks_that_a_load_uses_are_not_forgotten() -> None:
    world = PlannerOverSharedTier()
    world.learn(KEYS[:3])
    world.planner.loads.plan("r", [ChunkBatch(KEYS[:1], 0, [1], [1])])
    world.at(6.0)
    assert [world.planner.lower[1].is_in_use(k) for k in KEYS[:3]] == [True, False, False]
    assert KEYS[0] in world.store
    assert KEYS[1] not in world.store
    [job] = world.step().loads
    world.planner.complete(StepReport({job.job: JobResult()}))
    world.at(12.0)
    assert KEYS[0] not in world.store
    world.planner.check()


def test_a_request_waits_for_the_deadline_and_at_least_some_steps() -> None:
    world = PlannerOverSharedTier()
    wait = world.query(KEYS[:2])
    for _ in range(STEPS_MIN - 1):
        world.step()
    assert world.presence.check_wait(wait, 10.0), "the engine has been busy"
    world.step()
    assert world.presence.check_wait(wait, 0.049)
    assert not world.presence.check_wait(wait, 0.051)
    assert not world.presence.check_wait(wait, 0.0), "a request that continued must not wait again"
    assert world.planner.totals()["lookup_timeouts"] == 1
    assert world.presence.is_unanswered(1, KEYS[0])


def test_a_late_reply_is_remembered() -> None:
    world = PlannerOverSharedTier()
    world.query(KEYS[:2])
    plan = world.step()
    world.at(ANSWER_MAX_S - 1)
    world.answer(plan, KEYS[:2])
    assert world.planner.sources.present(KEYS[0])


def test_a_query_without_a_reply_ends() -> None:
    world = PlannerOverSharedTier()
    world.query(KEYS[:2])
    plan = world.step()
    assert world.planner.busy
    world.at(ANSWER_MAX_S)
    assert not world.planner.busy
    world.answer(plan, KEYS[:2])
    assert not world.planner.sources.present(KEYS[0]), "the query is no longer known"
    assert world.query(KEYS[:2]).numbers, "the chunk can be queried again"


def test_one_rank_without_its_part_is_a_miss() -> None:
    world = PlannerOverSharedTier(ranks=2)
    wait = world.query(KEYS[:3])
    [query] = world.step().queries
    world.planner.complete(StepReport(answers={query.number: PresenceReply(b"\1\1\0")}))
    assert world.presence.check_wait(wait, 0.0)
    assert not world.planner.sources.present(KEYS[0])
    world.planner.complete(StepReport(answers={query.number: PresenceReply(b"\1\0\1")}))
    assert [world.planner.sources.present(key) for key in KEYS[:3]] == [True, False, False]


def test_reports_of_ranks_are_combined_before_or_after_they_arrive() -> None:
    one = StepReport(answers={1: PresenceReply(b"\1\1\0"), 2: PresenceReply(b"\1")})
    other = StepReport(answers={1: PresenceReply(b"\0\1\1"), 3: PresenceReply(None)})
    merged = one.merge(other)
    assert merged.answers[1] == PresenceReply(b"\0\1\0", 2)
    assert merged.answers[2] == PresenceReply(b"\1", 1)
    assert PresenceReply(b"\1").merge(PresenceReply(None)) == PresenceReply(None, 2)
    assert not merged.empty


def test_a_tier_that_cannot_reply_leaves_nothing_behind() -> None:
    world = PlannerOverSharedTier()
    wait = world.query(KEYS[:2])
    world.answer(world.step(), None)
    assert not world.presence.check_wait(wait, 0.0)
    assert world.query(KEYS[:2]).numbers
    assert world.planner.totals()["unanswered_questions:store"] == 1


def test_concurrent_queries_are_bounded() -> None:
    world = PlannerOverSharedTier()
    world.query(KEYS)
    [query] = world.step().queries
    assert query.keys == tuple(KEYS[:12])
    assert not world.query(KEYS[12:]).numbers


def test_remembered_chunks_are_bounded_without_deleting_anything() -> None:
    world = PlannerOverSharedTier(known_most=4)
    world.learn(KEYS[:8])
    assert len(world.store) <= 4
    world.planner.check()
    world.learn(KEYS[8:12], KEYS[8:12])
    assert KEYS[8] in world.store
    assert not world.step().deletes


def test_a_wrong_reply_is_forgotten_and_only_damage_is_deleted() -> None:
    world = PlannerOverSharedTier()
    world.learn(KEYS[:3])
    gone, damaged = frozenset(KEYS[:1]), frozenset(KEYS[1:2])
    world.load(KEYS[:3], JobResult(bad=gone | damaged, lost=gone | damaged, corrupt=damaged))
    assert [key in world.store for key in KEYS[:3]] == [False, False, True]
    assert world.step().deletes == {1: (KEYS[1],)}


def test_written_chunks_are_remembered_as_long_as_replies() -> None:
    world = PlannerOverSharedTier()
    world.planner.stores.plan(ChunkBatch(KEYS[:1], 0, [1], [16]))
    [store] = world.step().stores
    world.planner.complete(StepReport({store.job: JobResult()}))
    write_throughs: dict[int, WriteThroughJob] = {
        job.tier: job for job in world.step().write_throughs
    }
    world.planner.complete(StepReport({write_throughs[1].job: JobResult()}))
    assert KEYS[0] in world.store
    assert not world.query([KEYS[0]]).numbers
    world.at(5.1)
    assert KEYS[0] not in world.store
    assert not world.step().deletes


def test_a_write_that_failed_on_one_rank_deletes_nothing() -> None:
    world = PlannerOverSharedTier(ranks=2)
    world.planner.stores.plan(ChunkBatch(KEYS[:1], 0, [1], [16]))
    [store] = world.step().stores
    world.planner.complete(StepReport({store.job: JobResult(ranks=2)}))
    write_throughs = {job.tier: job for job in world.step().write_throughs}
    world.planner.complete(
        StepReport({write_throughs[1].job: JobResult(2, bad=frozenset(KEYS[:1]))})
    )
    assert 1 not in world.step().deletes


def test_a_tier_that_lost_everything_is_queried_again() -> None:
    world = PlannerOverSharedTier()
    world.learn(KEYS[:3])
    world.planner.complete(StepReport(tiers={(1, 0): Observed(losses=1)}))
    assert not any(map(world.planner.sources.present, KEYS[:3]))
    assert world.query(KEYS[:3]).numbers
    assert 1 not in world.step().deletes


def test_a_reset_forgets_replies_of_old_weights_including_those_on_their_way() -> None:
    world = PlannerOverSharedTier()
    world.learn(KEYS[:3])
    wait = world.query(KEYS[8:10])
    plan = world.step()
    world.planner.forget_all()
    assert not world.presence.check_wait(wait, 0.0)
    assert not world.query(KEYS).numbers, "its new epoch has not begun"
    world.planner.begin_epochs({1: 7})
    world.answer(plan, KEYS[8:10])
    assert not any(map(world.planner.sources.present, KEYS))
    world.query(KEYS[:2])
    new = world.step()
    assert (new.reset, new.epochs, len(new.queries)) == (True, {1: 7}, 1)


def test_an_unavailable_tier_is_probed_by_a_query() -> None:
    world = PlannerOverSharedTier()
    world.planner.complete(StepReport(tiers={(1, 0): Observed(reads_failed=3)}))
    health = world.health[1]
    assert health.reads.state is BreakerState.OPEN
    assert not world.query(KEYS[:2]).numbers
    world.at(6.0)
    plan = world.step()
    assert [q.keys for q in plan.queries] == [(PROBE_KEY,)]
    world.answer(plan, None)
    assert health.reads.state is BreakerState.OPEN
    world.at(30.0)
    world.answer(world.step(), [])
    assert health.reads.closed, "the tier replies, although it holds nothing"
    assert world.query(KEYS[:2]).numbers


def test_a_probe_overtaken_by_a_reset_is_repeated() -> None:
    world = PlannerOverSharedTier()
    world.planner.complete(StepReport(tiers={(1, 0): Observed(reads_failed=3)}))
    world.at(6.0)
    world.step()
    world.planner.forget_all()
    world.planner.begin_epochs({0: 1, 1: 1})
    world.at(6.1)
    assert [q.keys for q in world.step().queries] == [(PROBE_KEY,)]


@pytest.mark.parametrize("keys", [KEYS[:3], [b"a", b"bcd"]])
def test_a_plan_with_queries_can_be_pickled(keys: list[bytes]) -> None:
    world = PlannerOverSharedTier()
    world.query(keys)
    [query] = pickle.loads(pickle.dumps(world.step())).queries
    assert (query.tier, list(query.keys)) == (1, keys)


def test_without_shared_tiers_there_is_no_cost() -> None:
    cpu = TierIndex("cpu", SlotCapacity(4), LruPolicy())
    planner = Planner({0: GroupInfo("full", 16, ())}, cpu)
    assert not planner.presence.query(KEYS, None, 0.0).numbers
    assert not planner.step().queries
    assert not [name for name in planner.totals() if "asked" in name or "lookup" in name]
