"""Runs the same policy, unchanged, in the simulator, the CPU tier and the LMDB tier of a real
server."""

from __future__ import annotations

import pytest

from examples import custom_policy
from policies import make_policy, simulate
from policies.testing import PolicyContract, synthetic_trace

pytest.importorskip("vllm")


class TestEndedFirstPolicy(PolicyContract):
    """The example fulfils the interface."""

    examples = 10

    def make_policy(self) -> custom_policy.EndedFirstPolicy:
        return custom_policy.EndedFirstPolicy()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_beats_lru_and_the_default(seed: int) -> None:
    trace = synthetic_trace(seed, requests=1000)
    capacity = trace.unique_blocks() // 20
    lru, adaptive, ours = (
        simulate(trace, policy, capacity, hints="end").token_hit_ratio
        for policy in (
            make_policy("lru"),
            make_policy("adaptive"),
            custom_policy.EndedFirstPolicy(),
        )
    )
    assert ours > adaptive
    assert ours > lru + 0.01


@pytest.mark.thorough
@pytest.mark.vllm
def test_the_example_serves(tmp_path, capsys) -> None:
    custom_policy.in_the_simulator()
    assert custom_policy.in_a_server(tmp_path), capsys.readouterr().out
    log = (tmp_path / "server.log").read_text(errors="replace")
    # Both tiers were too small, and each had its own policy object.
    assert log.count("EndedFirstPolicy names its first victims") == 2
    assert "is replaced by LRU" not in log
