"""The same policy, unchanged, in the simulator, the CPU tier and the LMDB tier of a real server."""

from __future__ import annotations

import pytest

from examples import custom_policy
from policies.testing import PolicyContract

pytest.importorskip("vllm")


class TestHeadsLastPolicy(PolicyContract):
    """The example keeps the interface."""

    examples = 10

    def make_policy(self) -> custom_policy.HeadsLastPolicy:
        return custom_policy.HeadsLastPolicy()


@pytest.mark.thorough
@pytest.mark.vllm
def test_the_example_serves(tmp_path, capsys) -> None:
    custom_policy.in_the_simulator()
    assert custom_policy.in_a_server(tmp_path), capsys.readouterr().out
    log = (tmp_path / "server.log").read_text(errors="replace")
    # Both tiers were too small, and each had a separate policy.
    assert log.count("HeadsLastPolicy names its first victims") == 2
    assert "is replaced by LRU" not in log
