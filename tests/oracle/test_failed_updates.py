"""Errors while the workers' results are processed, under vLLM's real scheduler: jobs end even so,
and nothing is committed that cannot be trusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload.connector.scheduler.scheduler_side import SchedulerSide
from offload.messages.report import StepReport
from offload.planner.loads import LoadPlanner
from offload.planner.planner import Planner
from offload.planner.tier_health import TierHealth
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.test_miss_reasons import PROMPT, stored
from tests.oracle.test_stale_blocks import OTHER, ask

HOOK = "update_connector_output"
Due = Callable[[StepReport, tuple[str, ...]], object]
"""Whether an update is to fail that has this report, and the requests whose loads have ended."""


def fail_once(patch: pytest.MonkeyPatch, owner: type, name: str, due: Due) -> list[StepReport]:
    """In the first update that is due, the first call of this method raises an error. Returns the
    report of that update, once there was one."""
    hit: list[StepReport] = []
    update, real = SchedulerSide.update, getattr(owner, name)

    def updating(side: Any, report: StepReport | None, finished: Any, failed: Any) -> None:
        if hit or report is None or not report.results or not due(report, tuple(finished)):
            update(side, report, finished, failed)
            return
        hit.append(report)
        with pytest.MonkeyPatch.context() as armed:

            def broken(*_: Any, **__: Any) -> None:
                armed.setattr(owner, name, real)
                raise RuntimeError("a fault in a hook")

            armed.setattr(owner, name, broken)
            update(side, report, finished, failed)

    patch.setattr(SchedulerSide, "update", updating)
    return hit


PARTS: dict[str, tuple[type, str, Due]] = {
    "the states of requests": (SchedulerSide, "_note_loads", lambda _, finished: finished),
    "the end of a load": (LoadPlanner, "request_ended", lambda _, finished: finished),
    "the time": (Planner, "tick", lambda _, finished: finished),
    "the state of a tier": (TierHealth, "observe", lambda report, _: report.tiers),
}


@pytest.mark.parametrize("part", PARTS)
def test_jobs_end_although_something_else_fails(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OracleEngine(MODELS["full"], Conditions(slots=100, late=1), tmp_path, 2) as world:
        hit = fail_once(monkeypatch, *PARTS[part])
        stored(world)
        if not hit:
            ask(world, "again", PROMPT)
        world.drain()
        at_rest(world, hit)
        assert world.loaded()["cpu"] > 0 or part == "the state of a tier"
        assert len(world.planner.cpu) > 0


def at_rest(world: OracleEngine, hit: list[StepReport]) -> None:
    """The update has failed, and nothing is left of it."""
    assert hit, "the fault has not happened"
    assert world.connector.faults.by_hook == {HOOK: 1}
    world.connector.faults.by_hook.clear()
    world.check_idle()


def test_what_ends_when_a_change_was_not_noted_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another connector could not fill its blocks, which stores may have read."""
    conditions = Conditions(slots=100, tier=False, late=1)
    with OracleEngine(MODELS["full"], conditions, tmp_path, 2) as world:
        hit: list[StepReport] = []
        hook = world.connector.update_connector_output

        def unfilled(output: Any) -> None:
            meta = output.kv_connector_worker_meta
            if not hit and meta is not None and meta.report.results:
                hit.append(meta.report)
                output = replace(output, invalid_block_ids={1})
            hook(output)

        def broken(_side: SchedulerSide) -> None:
            raise RuntimeError("a fault in a hook")

        monkeypatch.setattr(world.connector, HOOK, unfilled)
        monkeypatch.setattr(SchedulerSide, "load_failed_elsewhere", broken)
        ask(world, "storing", OTHER)
        while not hit:
            world.step()
        assert len(world.planner.cpu) == 0
        world.drain()
        assert world.planner.totals()["store_failures:cpu"] > 0
        at_rest(world, hit)
