"""Every test here runs on a simulated clock, even tests that drive the scheduler side without an
``OracleEngine``, which always has this clock."""

from __future__ import annotations

import pytest

from tests.oracle.clock import pass_time_by_steps


@pytest.fixture(autouse=True)
def _time_passes_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_time_by_steps(monkeypatch)
