"""Look-ahead where every request runs at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle.test_look_ahead import TOKENS, prompts_of, world


@pytest.mark.parametrize("break_even", [False, True])
@pytest.mark.parametrize("reads_per_step", [1, 4, 1e9])
def test_nothing_changes_if_no_request_waits(
    reads_per_step: float, break_even: bool, tmp_path: Path
) -> None:
    """A request arrives in each third step, and at most two are there, so none has to wait."""
    found = []
    for share in (0.0, 0.5):
        with world(tmp_path / str(share), share, break_even=break_even) as served:
            left = prompts_of(8, TOKENS)
            served.store(left)
            served.reads_per_step, served.steps = reads_per_step, 0
            while left or served.scheduler.requests:
                if left and len(served.scheduler.requests) < 2 and served.steps % 3 == 0:
                    served.ask(f"again{len(left)}", left.pop())
                served.step()
                assert served.steps < 2000
            assert served.loaded()["file"] > 0
            assert served.counts()["read"] == 0
            found.append((served.steps, served.disk.order, served.loaded()))
            served.check_idle()
    assert found[0] == found[1]
