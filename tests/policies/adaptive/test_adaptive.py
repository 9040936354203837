"""The default policy: learns what is used again, uses hints, and falls back to LRU order."""

from __future__ import annotations

import random

import pytest

from policies.adaptive import AdaptivePolicy
from policies.adaptive.reuse_table import ReuseTable
from policies.eviction.lru import LruPolicy
from policies.simulation.simulator import simulate
from policies.simulation.trace import Request, Trace, to_runs
from policies.testing import synthetic_trace


def _ratio(policy, trace: Trace, capacity: int, hints: str = "none") -> float:
    return simulate(trace, policy, capacity, hints=hints).token_hit_ratio


def _chat(seed: int, requests: int = 4000, goes_on: float = 0.9, second: float = 0.2) -> Trace:
    """Many conversations end after one request; those that continue do so for long."""
    rng = random.Random(seed)
    fresh = iter(range(10**9))
    pending: list[tuple[int, int, list[int], int]] = []
    found = []
    for now in range(requests):
        due = [entry for entry in pending if entry[0] <= now]
        if due:
            entry = min(due)
            pending.remove(entry)
            _, session, blocks, turn = entry
        else:
            session, blocks, turn = now, [], 0
        blocks = [*blocks, *(next(fresh) for _ in range(5))]
        last = rng.random() > (second if turn == 0 else goes_on) or turn > 10
        if not last:
            pending.append((now + rng.randint(40, 90), session, blocks, turn + 1))
        found.append(Request(float(now), 16 * len(blocks), to_runs(blocks), 0, session, last=last))
    return Trace("chat", 16, found)


def test_learns_which_conversations_continue() -> None:
    trace = _chat(1)
    assert _ratio(AdaptivePolicy(), trace, 300) > 1.3 * _ratio(LruPolicy(), trace, 300)


def test_ends_of_sessions_help() -> None:
    trace = _chat(2)
    without, hinted = (_ratio(AdaptivePolicy(), trace, 300, level) for level in ("none", "end"))
    assert hinted > 1.1 * without


def test_a_false_hint_loses_its_effect() -> None:
    """Every request claims that its session is over, which must be as good as no hint at all."""
    trace = _chat(3)
    lies = [
        Request(r.time_s, r.prompt_tokens, r.runs, 0, r.session, last=True) for r in trace.requests
    ]
    lying = _ratio(AdaptivePolicy(), Trace("lies", 16, lies), 300, "end")
    assert lying == pytest.approx(_ratio(AdaptivePolicy(), trace, 300), abs=0.01)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [40, 150, 500])
def test_not_worse_than_lru_if_there_is_nothing_to_learn(seed: int, capacity: int) -> None:
    trace = synthetic_trace(seed, requests=1500, sessions=60)
    lru, ours = (_ratio(policy, trace, capacity) for policy in (LruPolicy(), AdaptivePolicy()))
    assert ours >= lru - 0.01


def test_is_lru_before_anything_is_learned() -> None:
    trace = synthetic_trace(5, requests=250)
    logs: list[list[int]] = [[], []]
    for policy, log in zip((LruPolicy(), AdaptivePolicy()), logs, strict=True):
        simulate(trace, policy, 80, hit_log=log)
    assert logs[0] == logs[1]


def test_returns_to_lru_when_the_workload_changes() -> None:
    """The trace begins with conversations, which density order serves better. Then each prompt is
    sent three times in a row, so that only recency counts."""
    before = _chat(4)
    repeats = [Request(1e6 + turn, 160, ((10**9 + turn // 3 * 10, 10),)) for turn in range(6000)]
    log: list[int] = []
    policy = AdaptivePolicy()
    simulate(before, policy, 300)
    assert policy.order == "density"
    both = Trace("turns", 16, [*before.requests, *repeats])
    policy = AdaptivePolicy()
    simulate(both, policy, 300, hit_log=log)
    assert policy.order == "lru"
    assert sum(log[-3000:]) >= 0.66 * 3000 * 10


def test_worth_follows_the_chance_of_reuse() -> None:
    table = ReuseTable()
    rng = random.Random(1)
    often, rarely, late = (table.row((name,)) for name in ("often", "rarely", "late"))
    for _ in range(2000):
        table.record(often, rng.uniform(100, 1000), 1, reused=rng.random() < 0.9)
        table.record(rarely, rng.uniform(100, 1000), 1, reused=rng.random() < 0.1)
        table.record(late, rng.uniform(50_000, 60_000), 1, reused=True)
    table.relearn([])
    assert table.worth(often, 0) > 3 * table.worth(rarely, 0)
    assert table.worth(often, 0) > table.worth(late, 0)
    assert table.worth(late, 45_000) > table.worth(late, 0)  # closer to its return
    few = table.row(("often", "seldom seen"))
    table.record(few, 500, 1, reused=False)
    table.relearn([])
    assert table.known(few) == often
    assert table.worth(few, 0) > table.worth(rarely, 0)  # relies on its prefix
    assert table.worth(table.row(("never seen",)), 0) == table.worth(table.row(()), 0)


def test_past_observations_fade() -> None:
    table = ReuseTable(half_life=100)
    kind = table.row(("k",))
    for reused in (True, False):
        for _ in range(1000):
            table.record(kind, 500, 1, reused=reused)
        table.relearn([])
        if reused:
            before = table.worth(kind, 0)
    assert table.worth(kind, 0) < before / 20


def test_spans_that_wait_long_count_as_not_reused() -> None:
    tables = ReuseTable(), ReuseTable()
    for table in tables:
        for _ in range(100):
            table.record(table.row(("k",)), 500, 1, reused=True)
    kind = tables[1].row(("k",))
    tables[0].relearn([])
    tables[1].relearn([(kind, 5000.0, 1.0, False)] * 300)
    assert tables[0].worth(kind, 0) > 2 * tables[1].worth(kind, 0)
