"""Functions that tests run inside an engine process (`Engine.call`, `Engine.step_until`)."""

from __future__ import annotations

from typing import Any


def connector(llm: Any) -> Any:
    """The scheduler-side connector object."""
    return llm.llm_engine.engine_core.engine_core.scheduler.connector


def is_idle(llm: Any) -> bool:
    """Whether the connector has nothing left to do."""
    return not connector(llm).has_pending_push_work()


def totals(llm: Any) -> dict[str, float]:
    """The planner's counters."""
    return connector(llm)._scheduler.planner.totals()


def check(llm: Any) -> None:
    """Verify the planner's invariants, and that no hook has failed."""
    found = connector(llm)
    found._scheduler.planner.check()
    assert found.faults.by_hook == {}, found.faults.by_hook
