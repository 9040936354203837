"""Functions that tests run inside an engine process (`Engine.call`, `Engine.step_until`)."""

from __future__ import annotations

from typing import Any


def connector(llm: Any) -> Any:
    """The scheduler-side connector object."""
    return llm.llm_engine.engine_core.engine_core.scheduler.connector


def is_idle(llm: Any) -> bool:
    """True if the connector has no work left."""
    return not connector(llm).has_pending_push_work()


def totals(llm: Any) -> dict[str, float]:
    """The planner's counters."""
    return connector(llm).serving.side.planner.totals()


def look_up_in_steps(llm: Any) -> None:
    """Limit a step's lookups to three chunks instead of a thousand, however long steps take."""
    lookups = connector(llm).serving.side.lookups
    allowance = connector(llm).serving.side.planner.budget.lookups
    allowance.chunks, allowance.chunks_min, allowance._scales = 3, 1, False
    allowance.renew()
    lookups.put_off, ask = 0, lookups.look_up

    def counted(*about: Any) -> int | None:
        found: int | None = ask(*about)
        lookups.put_off += found is None
        return found

    lookups.look_up = counted


def lookups_put_off(llm: Any) -> int:
    """The number of lookups since then that did not end within one step."""
    return int(connector(llm).serving.side.lookups.put_off)


def check(llm: Any) -> None:
    """Check the planner's invariants, and that no hook has failed."""
    found = connector(llm)
    found.serving.side.planner.check()
    assert found.faults.by_hook == {}, found.faults.by_hook
