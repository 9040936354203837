"""Runs the same policy, unchanged, in the simulator, the CPU tier and the LMDB tier of a real
server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from demo.server import VllmServer
from demo.sources import read_compared
from examples import custom_policy
from policies import make_policy, simulate
from policies.testing import PolicyContract, synthetic_trace

pytest.importorskip("vllm")

ROOT = Path(__file__).resolve().parents[2]


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


def test_the_guide_prints_the_example_s_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    custom_policy.in_the_simulator()
    numbers = re.findall(r": ([\d.]+%) of the prompt tokens hit", capsys.readouterr().out)
    page = (ROOT / "docs/guides/write-a-policy.md").read_text(encoding="utf-8")
    assert len(numbers) == 4
    assert [number for number in numbers if number not in page.partition("## 1.")[0]] == []


@pytest.mark.thorough
@pytest.mark.vllm
def test_the_example_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    custom_policy.in_the_simulator()
    extension = "--worker-extension-cls=tests.vllm.worker_extension.KvBytes"
    with custom_policy.serving(tmp_path, extension) as server:
        assert custom_policy.in_a_server(server), capsys.readouterr().out
        see_planted_faults(server)
    log = (tmp_path / "server.log").read_text(errors="replace")
    # Both tiers were too small, and each had its own policy object.
    assert log.count("EndedFirstPolicy names its first victims") == 2
    assert "is replaced by LRU" not in log


def see_planted_faults(server: VllmServer) -> None:
    """The comparison must find a swapped pair of chunks, and a wrong bit."""
    for fault, wrong in (("swapped_chunks", 2), ("wrong_bit", 1)):
        before = read_compared(server)
        server.call_workers("kvtest_plant_in_loads", fault)
        custom_policy.converse(server, 2)
        server.call_workers("kvtest_heal_loads")
        assert read_compared(server).different >= before.different + wrong, (
            f"{fault} was not detected"
        )
