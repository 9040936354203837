"""The policy benchmark at a tiny size, and vLLM's policies behind our interface."""

from __future__ import annotations

import pytest
from rich.progress import Progress

from bench import policies
from bench.policies_rivals import VllmPolicy
from policies.eviction.lru import LruPolicy
from policies.simulation.simulator import simulate
from policies.testing import synthetic_trace

pytest.importorskip("vllm")


def test_it_measures_every_policy() -> None:
    config = policies.Config(policies=("lru", "adaptive", "arc"), shares=(0.05,), rounds=2)
    report = policies.run(config, Progress(disable=True))
    rows = {row.series: row.values for row in report.rows}
    assert {"optimum", "lru", "adaptive", "arc", "vllm lru", "vllm arc"} <= set(rows)
    for name, values in rows.items():
        assert 0 < values["token hits"] <= rows["optimum"]["token hits"], name
    assert rows["lru"]["ratio"] == 1.0
    assert all(values["ns/op"] > 0 for name, values in rows.items() if name != "optimum")


@pytest.mark.parametrize("capacity", [120, 200])
def test_our_lru_hits_as_often_as_vllms_lru(capacity: int) -> None:
    """There is space for every prompt, because vLLM evicts either everything that a request needs
    or nothing."""
    trace = synthetic_trace(13, requests=300)
    logs: list[list[int]] = [[], []]
    for policy, log in zip((LruPolicy(), VllmPolicy("lru", capacity)), logs, strict=True):
        simulate(trace, policy, capacity, hit_log=log)
    assert logs[0] == logs[1]
    assert sum(logs[0]) > 0


def test_the_adapter_of_arc_keeps_its_members() -> None:
    policy = VllmPolicy("arc", 60)
    result = simulate(synthetic_trace(13, requests=300), policy, 60)
    assert result.hit_blocks > 0
    assert 0 < len(policy) <= 60
