"""Every reason for a miss, produced in vLLM's real scheduler and read back from memory, from the
counters, and from the file by the command line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload.cli import app
from offload.connector.scheduler.scheduler_side import SchedulerSide
from offload.layout.keys import group_of
from offload.layout.prefix_match import PrefixMatcher
from offload.messages.report import JobResult
from offload.requests import miss_reasons as why
from offload.requests.miss_reasons import MEANINGS, Miss, Reason
from offload.requests.request_log import LoggedRequest, RequestLog
from offload.telemetry.removed_chunks import RemovalCauses
from policies.base import AdmissionPolicy, EntryInfo
from tests.oracle import serving as oracle_world
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.test_requests_reported import _request
from tiers.base import ReadOutcome

PROMPT = list(range(64))


def reason(record: LoggedRequest) -> Reason:
    return record.miss.reason


def serve(world: OracleEngine, name: str, prompt: list[int], **options: Any) -> LoggedRequest:
    """Serve one request alone; return the record of its lookup."""
    world.scheduler.add_request(
        _request(world, name, prompt, {"kvtiers": options} if options else None)
    )
    world.drain()
    world.check()
    found = world.connector.serving.side.log.last[-1]
    assert found.request == name
    return found  # type: ignore[no-any-return]  # vllm is untyped here


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make all worlds record their requests to this file."""
    file = tmp_path / "requests.jsonl"
    make = oracle_world.make_config

    def recording(*arguments: Any) -> Any:
        config, kv_cache_config = make(*arguments)
        config.kv_transfer_config.kv_connector_extra_config["record_requests"] = str(file)
        return config, kv_cache_config

    monkeypatch.setattr(oracle_world, "make_config", recording)
    return file


@pytest.fixture
def world(recorded: Path, tmp_path: Path) -> Iterator[OracleEngine]:
    with OracleEngine(MODELS["full"], Conditions(slots=100), tmp_path, 1) as made:
        yield made
        made.check_idle()


def stored(world: OracleEngine) -> list[bytes]:
    """Serve the prompt; return the keys of its chunks in prefix order. Afterwards the prompt is no
    longer in the GPU's cache."""
    request = _request(world, "first", PROMPT, None)
    world.scheduler.add_request(request)
    state = world.connector.serving.side.admit(request)
    world.drain()
    world.forget_locally()
    return list(state.identity.keys[0][: len(PROMPT) // 4])


def test_never_stored_then_complete(world: OracleEngine) -> None:
    first = serve(world, "a", PROMPT)
    assert reason(first) is Reason.NEVER_STORED
    assert (first.miss.depth_tokens, first.hit_tokens, first.loaded) == (4, 0, {})
    assert first.wanted_tokens == 64
    world.forget_locally()
    second = serve(world, "b", PROMPT)
    assert reason(second) is Reason.COMPLETE
    assert second.loaded == {"cpu": 64}
    third = serve(world, "c", PROMPT)  # the GPU has it now
    assert third.gpu_tokens == 60
    assert third.wanted_tokens == 0
    longer = serve(world, "d", [*PROMPT, *range(100, 120)])
    assert reason(longer) is Reason.NEVER_STORED
    assert longer.miss.depth_tokens == 68


def test_evicted_names_the_policy_and_the_time(recorded: Path, tmp_path: Path) -> None:
    with OracleEngine(MODELS["full"], Conditions(slots=24, tier=False), tmp_path, 1) as world:
        keys = stored(world)
        for number in range(4):
            serve(world, f"x{number}", [200 - number, *range(1, 80)])
        assert keys[0] not in world.planner.cpu
        world.forget_locally()
        miss = serve(world, "b", PROMPT).miss
        assert miss.reason is Reason.EVICTED
        assert (miss.tier, miss.policy) == ("cpu", type(world.planner.cpu.policy.active).__name__)
        assert (miss.ago_s or 0) > 0
        assert miss.key == keys[0]
        world.check_idle()


def test_no_room(recorded: Path, tmp_path: Path) -> None:
    with OracleEngine(MODELS["full"], Conditions(slots=4, tier=False), tmp_path, 1) as world:
        stored(world)
        cpu = world.planner.cpu
        cpu.pin(list(cpu.resident))  # everything is in use
        serve(world, "a", [9, *PROMPT])
        world.forget_locally()
        assert reason(serve(world, "b", [9, *PROMPT])) is Reason.NO_SPACE


def test_not_admitted(world: OracleEngine) -> None:
    class Never(AdmissionPolicy):
        def admit(self, key: Any, info: Any) -> bool:
            return False

    world.planner.stores._admission = Never()
    stored(world)
    assert reason(serve(world, "b", PROMPT)) is Reason.NOT_ADMITTED


def test_being_stored(world: OracleEngine) -> None:
    keys = stored(world)
    world.planner.cpu.drop(keys)
    world.planner.lower[0].drop(keys)
    world.planner.cpu.reserve(keys[:1], [EntryInfo()])
    request = _request(world, "b", PROMPT, None)
    world.scheduler.add_request(request)
    world.step()
    assert reason(world.connector.serving.side.log.last[-1]) is Reason.STORING
    world.planner.cpu.abort(keys[:1])
    world.drain()


def test_the_chunks_of_a_load_are_computed_once(
    world: OracleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(world)
    load_ranges, made = PrefixMatcher.load_ranges, []

    def counted(self: Any, start: int, end: int) -> Any:
        made.append((start, end))
        return load_ranges(self, start, end)

    monkeypatch.setattr(PrefixMatcher, "load_ranges", counted)
    world.scheduler.add_request(_request(world, "again", PROMPT, None))
    world.drain()
    assert world.planner.stats.tier(-1).loaded_tokens > 0
    assert len(made) == 1


def test_store_failed(world: OracleEngine) -> None:
    """vLLM gave away the store's blocks before the store was sent."""
    request = _request(world, "a", PROMPT, None)
    world.scheduler.add_request(request)
    planner = world.planner
    step = planner.step

    def cancelled(**options: Any) -> Any:
        planner.stores.cancel_planned()
        return step(**options)

    planner.step = cancelled
    world.drain()
    planner.step = step
    world.forget_locally()
    assert reason(serve(world, "b", PROMPT)) is Reason.STORE_FAILED


def reads_give(world: OracleEngine, outcome: ReadOutcome) -> None:
    """From now on, every read of the lower tier returns this outcome; the CPU tier is empty."""
    world.planner.cpu.drop(list(world.planner.cpu.resident))

    async def read(keys: Any, into: Any) -> list[ReadOutcome]:
        return [outcome] * len(keys)

    world.executor._tiers[0].read = read


@pytest.mark.parametrize(
    ("outcome", "first", "then"),
    [
        (ReadOutcome.CORRUPT, Reason.CORRUPT, Reason.CORRUPT),
        (ReadOutcome.MISS, Reason.LOST, Reason.LOST),
        (ReadOutcome.BUSY, Reason.LOAD_FAILED, None),
    ],
)
def test_bad_records(
    world: OracleEngine, outcome: ReadOutcome, first: Reason, then: Reason | None
) -> None:
    stored(world)
    reads_give(world, outcome)
    found = serve(world, "b", PROMPT)
    assert reason(found) is first, "this is the request whose load failed"
    assert found.loaded == {}
    if then is not None:
        world.planner.cpu.drop(list(world.planner.cpu.resident))
        world.planner.lower[0].drop(list(world.planner.lower[0].resident))
        world.forget_locally()
        later = serve(world, "c", PROMPT, no_store=True)
        assert reason(later) is then, "this request comes after the record was dropped"
        assert later.miss.tier == "file"


def test_deadline(world: OracleEngine) -> None:
    """The request was answered before its load ended."""
    stored(world)
    world.planner.cpu.drop(list(world.planner.cpu.resident))
    run_load = world.executor._run_load

    async def late(task: Any) -> None:
        world.executor._end_load(task.job, is_ok=False)
        task.give_up(late=True)
        world.executor._answer(task.job, await task.run())

    world.executor._run_load = late
    found = serve(world, "b", PROMPT)
    world.executor._run_load = run_load
    assert reason(found) is Reason.DEADLINE
    assert why.failed(None) is why.failed(JobResult(late=True)) is Reason.DEADLINE


def test_namespace_names_the_field_that_differs(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conditions = Conditions(slots=100)
    with OracleEngine(MODELS["full"], conditions, tmp_path, 1) as world:
        stored(world)
        world.check_idle()
    make = oracle_world.make_config

    def other(*arguments: Any) -> Any:
        config, kv_cache_config = make(*arguments)
        config.kv_transfer_config.kv_connector_extra_config["chunk_blocks"] = 2
        return config, kv_cache_config

    monkeypatch.setattr(oracle_world, "make_config", other)
    with OracleEngine(MODELS["full"], conditions, tmp_path, 1) as world:
        miss = serve(world, "a", PROMPT).miss
        assert miss.reason is Reason.NAMESPACE
        assert "chunk_blocks differs" in miss.note
        monkeypatch.setattr(why, "OTHER_NAMESPACES_S", -1.0)
        assert reason(serve(world, "b", [7, *PROMPT])) is Reason.NEVER_STORED, (
            "the guess must not be made much later"
        )


def test_reset(world: OracleEngine) -> None:
    stored(world)
    world.change_weights()
    assert reason(serve(world, "b", PROMPT)) is Reason.RESET


@pytest.mark.parametrize("name", ["sliding_full", "mamba1_full"])
def test_window(name: str, recorded: Path, tmp_path: Path) -> None:
    """The full-attention layers have the prefix; the others have kept another boundary."""
    with OracleEngine(MODELS[name], Conditions(slots=200, tier=False), tmp_path, 1) as world:
        kinds = {g.group: g.kind for g in world.connector.serving.side.layout.groups}
        serve(world, "a", [*PROMPT, *range(64, 120)])
        world.forget_locally()
        cpu = world.planner.cpu
        # As if they had never been stored: the chunks of a window are kept or dropped together with
        # their boundary.
        cpu.drop([key for key in list(cpu.resident) if kinds[group_of(key)] == "window"])
        miss = serve(world, "b", PROMPT).miss
        assert miss.reason is Reason.WINDOW
        assert kinds[miss.group] in ("window", "state")
        world.check_idle()


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"no_load": True}, "no_load"),
        ({"tiers": []}, "no_load"),
        ({"max_load_tokens": 8}, "max_load_tokens"),
        ({"tiers": ["file"]}, "tiers"),
    ],
)
def test_filtered_by_the_request(world: OracleEngine, options: dict[str, Any], note: str) -> None:
    stored(world)
    world.planner.lower[0].drop(list(world.planner.lower[0].resident))
    found = serve(world, "b", PROMPT, **options)
    assert reason(found) is Reason.FILTERED
    assert found.miss.note == note


def test_budget(world: OracleEngine) -> None:
    stored(world)
    world.planner.loads.loading = 1
    loads = world.planner.loads
    limits = replace(loads._context.limits, load_chunks=2)
    loads._context = replace(loads._context, limits=limits)
    found = serve(world, "b", PROMPT)
    assert reason(found) is Reason.BUDGET
    assert (found.loaded, world.planner.totals()["loads"]) == ({}, 0), "the chunk was computed"


@pytest.mark.parametrize("which", [Reason.BREAKER, Reason.BREAK_EVEN])
def test_an_unavailable_tier_is_not_queried(world: OracleEngine, which: Reason) -> None:
    stored(world)
    health = world.planner.health[0]
    far = time.monotonic() + 1e6
    if which is Reason.BREAKER:
        health.reads._open(time.monotonic(), 1e6)
    else:
        health.break_even.pays, health.break_even._retry_at = False, far
    world.planner.cpu.drop(list(world.planner.cpu.resident))
    found = serve(world, "b", PROMPT)
    assert reason(found) is which
    assert found.miss.tier == "file"


def test_too_few_tokens_to_load(world: OracleEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(world)
    world.planner.cpu.drop(list(world.planner.cpu.resident))
    break_even = type(world.planner.health[0].break_even)
    monkeypatch.setattr(break_even, "tokens_min", 1000.0)
    assert reason(serve(world, "b", PROMPT)) is Reason.BREAK_EVEN


# -- counted, written and read back --------------------------------------------------------------


def test_counters_and_file_agree(world: OracleEngine, recorded: Path) -> None:
    serve(world, "a", PROMPT)
    world.forget_locally()
    serve(world, "b", [*PROMPT, *range(80, 100)])
    serve(world, "c", PROMPT, no_load=True)
    totals = world.connector.serving.side.log.totals()
    assert totals["misses:never_stored"] == 2
    assert totals["recomputed_tokens:never_stored"] == 64 + 16 + 4
    world.connector.shutdown()
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    assert [line["request"] for line in lines] == ["a", "b", "c"]
    assert lines[1]["loaded_tokens"] == {"cpu": 64}
    assert recorded.stat().st_mode & 0o777 == 0o600
    shown = CliRunner().invoke(app, ["why", str(recorded), "--json", "--reason", "never_stored"])
    assert shown.exit_code == 0, shown.output
    assert [r["request"] for r in json.loads(shown.output)["requests"]] == ["a", "b"]
    table = CliRunner().invoke(app, ["why", str(recorded), "--request", "b"])
    assert "64 cpu" in table.output
    assert "token 68 of group 0" in table.output
    assert MEANINGS[Reason.NEVER_STORED][:40] in table.output


def test_a_failing_record_does_not_fail_the_load(
    world: OracleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(world)

    def broken(*_: Any) -> Miss:
        raise RuntimeError("planted")

    monkeypatch.setattr(why.Explainer, "why", broken)
    world.scheduler.add_request(_request(world, "b", PROMPT, None))
    world.drain()
    assert world.loaded()["cpu"] == 64
    assert world.connector.faults.by_hook.pop("explain") >= 1


# -- planted faults ------------------------------------------------------------------------------


def _departures_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RemovalCauses, "note", lambda self, keys, departure: None)


def _one_boundary_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixMatcher, "next_boundary", lambda self, hit: max(4, hit))


def _health_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(why.Explainer, "_held_back", staticmethod(lambda *_: None))


def _failures_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestLog, "count_failed_load", lambda self, record, reason: None)


def _recorded_at_each_lookup(patch: pytest.MonkeyPatch) -> None:
    lookup = SchedulerSide.lookup

    def twice(self: Any, request: Any, computed: int) -> Any:
        found = lookup(self, request, computed)
        state = self.admit(request)
        state.lookup.note_logged(None)
        self._note_accepted(state, request, 0)
        state.lookup.note_logged(None)
        return found

    patch.setattr(SchedulerSide, "lookup", twice)


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        (_departures_forgotten, test_reset),
        (_one_boundary_too_early, test_never_stored_then_complete),
        (
            _health_is_ignored,
            lambda world: test_an_unavailable_tier_is_not_queried(world, Reason.BREAKER),
        ),
        (_failures_are_not_counted, test_deadline),
        (
            _recorded_at_each_lookup,
            lambda world: test_counters_and_file_agree(world, Path("unused")),
        ),
    ],
)
def test_planted_faults_are_detected(
    world: OracleEngine,
    fault: Callable[[pytest.MonkeyPatch], None],
    test: Callable[[OracleEngine], None],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises(AssertionError):
            test(world)
    world.drain()
