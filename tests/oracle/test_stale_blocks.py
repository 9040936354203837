"""GPU blocks that must not be stored, under vLLM's real scheduler: blocks computed with old
weights, and blocks that may have been overwritten because a hook failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from offload.connector.model.adapters import AdapterBook
from offload.connector.scheduler.block_tables import BlockTables, ChunkBatches
from offload.connector.scheduler.scheduler_side import SchedulerSide
from offload.connector.scheduler.store_progress import StoreProgress
from offload.planner.jobs import JobKind
from offload.planner.load_or_recompute import ReadQueue
from offload.planner.step_budget import StepBudget
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.test_miss_reasons import PROMPT, stored
from tests.oracle.test_requests_reported import _request
from tests.unprintable import Unprintable

OTHER = list(range(30, 94))


def ask(world: OracleEngine, name: str, prompt: list[int]) -> Any:
    request = _request(world, name, prompt, None)
    world.scheduler.add_request(request)
    return request


@pytest.fixture(params=["full", "mamba1_full"])
def world(request: Any, tmp_path: Path) -> Any:
    """Worlds with and without recurrent states, which are stored in a different way."""
    conditions = Conditions(slots=100, tier=False, batched_tokens=16)
    with OracleEngine(MODELS[request.param], conditions, tmp_path, 2) as made:
        yield made


def compute_a_part(world: OracleEngine) -> None:
    """The weights change while a request is in the middle of its prompt, and the request is not
    restarted."""
    request = ask(world, "running", PROMPT)
    world.step()
    world.step()
    assert 0 < request.num_computed_tokens < len(PROMPT)
    world.scheduler.reset_connector_cache()


def test_blocks_computed_before_new_weights_are_not_stored_after_them(world: OracleEngine) -> None:
    """The blocks after them are not stored either, because they are computed from the old KV
    cache."""
    compute_a_part(world)
    world.drain()
    world.check()
    assert world.finished == 1
    assert len(world.planner.cpu) == 0
    ask(world, "later", OTHER)
    world.drain()
    assert len(world.planner.cpu) > 0


def test_blocks_that_a_step_in_flight_computes_are_not_stored_under_new_weights(
    tmp_path: Path,
) -> None:
    """With asynchronous scheduling: vLLM has no output of the request yet."""
    conditions = Conditions(slots=100, tier=False, batched_tokens=16, asynchronous=True)
    with OracleEngine(MODELS["full"], conditions, tmp_path, 2) as world:
        request = ask(world, "running", PROMPT)
        world.step()
        assert request.num_in_flight_tokens == request.num_computed_tokens > 0
        world.scheduler.reset_connector_cache()
        world.drain()
        world.check()
        assert world.finished == 1
        assert len(world.planner.cpu) == 0
        world.check_idle()


def test_a_restarted_request_is_stored_under_new_weights(world: OracleEngine) -> None:
    compute_a_part(world)
    world.forget_locally()  # vLLM preempts it and computes it from the beginning
    world.drain()
    world.check()
    assert len(world.planner.cpu) >= len(PROMPT) // 4
    world.check_idle()


def change_weights(world: OracleEngine) -> bool:
    """Reset all caches for new weights, as a server does. Returns vLLM's answer."""
    world.weights += 1
    return world.scheduler.reset_prefix_cache(reset_connector=True)


def ask_later(
    world: OracleEngine,
    prompt: list[int] = PROMPT,
    wrong: int = 0,
    faults: dict[str, int] | None = None,
) -> None:
    """Ask for a prompt again, then empty vLLM's own cache and restore it from the tiers. After
    ``wrong`` reads of old KV, no other may be wrong. ``faults`` are those of the hooks until then
    and from then on."""
    ask(world, "next", prompt)
    world.drain()
    assert world.scheduler.reset_prefix_cache()
    before = sum(world.loaded().values())
    ask(world, "third", prompt)
    world.drain()
    assert sum(world.loaded().values()) > before
    assert len(world.mismatches) == wrong
    assert world.connector.faults.by_hook == (faults or {})


def test_a_reset_empties_the_gpu_cache_although_a_request_runs(tmp_path: Path) -> None:
    """vLLM refuses. The tiers are empty, and must not be filled from its old blocks."""
    with OracleEngine(MODELS["full"], Conditions(slots=100), tmp_path, 0) as world:
        ask(world, "cached", PROMPT)
        world.drain()
        running = ask(world, "running", OTHER)
        while not running.num_output_tokens:
            world.step()
        assert not change_weights(world)
        ask_later(world)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", ["full", "sliding_full", "mamba1_full_match_unit", "full_mtp"])
def test_what_a_running_request_adds_after_a_reset_is_not_hit(
    name: str, asynchronous: bool, tmp_path: Path
) -> None:
    """It computes the rest of its prompt from old KV, and its answer, whose block is complete at
    the end."""
    conditions = Conditions(slots=100, batched_tokens=16, asynchronous=asynchronous)
    with OracleEngine(MODELS[name], conditions, tmp_path, 0) as world:
        running = ask(world, "running", PROMPT)
        running.max_tokens = 5
        while not running.num_computed_tokens:
            world.step()
        assert running.num_computed_tokens < len(PROMPT)
        assert not change_weights(world)
        world.drain()
        ask(world, "beside", PROMPT)
        world.drain()
        ask_later(world, [*PROMPT, *running.output_token_ids, *OTHER[:3]])


def test_a_request_whose_hooks_fail_can_hold_old_kv(unknown: set[str], tmp_path: Path) -> None:
    """Its arrival, its lookup and the allocation of its blocks fail, so it has no state here. vLLM
    computes the rest of it from old KV, and adds the blocks to its own cache."""
    unknown.add("running")
    conditions = Conditions(slots=100, batched_tokens=16)
    with OracleEngine(MODELS["full"], conditions, tmp_path, 0) as world:
        running = ask(world, "running", PROMPT)
        while not running.num_computed_tokens:
            world.step()
        assert running.num_computed_tokens < len(PROMPT)
        assert not change_weights(world)
        world.drain()
        ask(world, "beside", PROMPT)
        world.drain()
        faults = dict.fromkeys(
            ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc"), 1
        )
        ask_later(world, faults=faults)


def test_a_request_whose_hooks_fail_can_hit_old_kv(unknown: set[str], tmp_path: Path) -> None:
    """It begins in the step that adds old KV to vLLM's own cache, and goes on after the request
    that had this KV has ended."""
    conditions = Conditions(slots=100, late=0, batched_tokens=64, vllm_errs=True)
    with OracleEngine(MODELS["full"], conditions, tmp_path, 0) as world:
        stored(world)
        assert world.scheduler.reset_prefix_cache()
        loading = ask(world, "loading", PROMPT)
        while "loading" not in world.scheduler.finished_recving_kv_req_ids:
            world.step()
        unknown.add("beside")
        beside = ask(world, "beside", PROMPT)
        beside.max_tokens = 20
        assert not change_weights(world)
        while not loading.is_finished():
            world.step()
        assert not beside.is_finished()
        world.drain()
        assert world.events()["vllm_errors"] > 0, "it has not hit old blocks"
        wrong, faults = list(world.mismatches), dict(world.connector.faults.by_hook)
        assert all("request loading" in each for each in wrong)
        answered = [*PROMPT, *beside.output_token_ids, *OTHER[:3]]
        ask(world, "again", PROMPT)
        world.drain()
        ask_later(world, answered, wrong=len(wrong), faults=faults)


def test_an_ended_request_holds_no_old_kv(unknown: set[str], tmp_path: Path) -> None:
    """Although its hooks have failed. vLLM's own cache is used after a reset."""
    unknown.add("gone")
    with OracleEngine(MODELS["full"], Conditions(slots=100), tmp_path, 0) as world:
        ask(world, "gone", PROMPT)
        world.drain()
        assert change_weights(world)
        ask(world, "next", PROMPT)
        world.drain()
        cached = world.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        assert len(cached) > 0


def test_an_error_without_a_text_does_not_leave_a_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Third-party policies can raise it."""

    def fail(*_: Any) -> None:
        raise Unprintable

    with OracleEngine(MODELS["full"], Conditions(slots=100), tmp_path, 0) as world:
        monkeypatch.setattr(AdapterBook, "identity_of", fail)
        ask(world, "running", PROMPT)
        world.drain()
        assert world.finished == 1
        assert world.connector.faults.by_hook["on_new_request"] == 1


def test_a_session_that_is_admitted_late_can_hold_old_kv(unknown: set[str], tmp_path: Path) -> None:
    """The hooks of its first part have failed. It waits for its client while the caches are reset,
    and is admitted when it continues."""
    unknown.add("session")
    with OracleEngine(MODELS["full"], Conditions(slots=100), tmp_path, 0) as world:
        session = ask_part(world, OTHER[:40])
        while session.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
            world.step()
        assert not change_weights(world)
        unknown.clear()
        ask_part(world, OTHER[40:60])
        while session.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
            world.step()
        assert session.num_computed_tokens > 60
        assert "session" in world.connector.serving.side.requests.by_name
        world.scheduler.finish_requests("session", RequestStatus.FINISHED_ABORTED)
        world.drain()
        assert len(world.planner.cpu) == 0


def ask_part(world: OracleEngine, tokens: list[int]) -> Any:
    """Send a part of a streamed prompt."""
    part = _request(world, "session", tokens, None)
    part.resumable = True
    world.scheduler.add_request(part)
    return part


def test_a_request_that_loads_after_a_reset_holds_no_old_kv(tmp_path: Path) -> None:
    """While another request holds old KV, it loads from the tiers what was stored since then. Its
    own chunks are stored, and vLLM's cache is used again when the other one has ended."""
    with OracleEngine(MODELS["full"], Conditions(slots=100), tmp_path, 0) as world:
        holder = ask(world, "holder", OTHER[:20])
        holder.max_tokens = 60
        while not holder.num_output_tokens:
            world.step()
        assert not change_weights(world)
        first = ask(world, "first", PROMPT)
        while not first.is_finished() or world.planner.busy:
            world.step()
        loading = ask(world, "loading", PROMPT)
        loading.max_tokens = 100
        while not holder.is_finished():
            world.step()
        assert world.loaded()["cpu"] == len(PROMPT)
        before = len(world.planner.cpu)
        while not loading.is_finished():
            world.step()
        world.drain()
        assert len(world.planner.cpu) >= before + 10
        cached = world.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        assert len(cached) > 0
        world.check()


def test_a_request_whose_load_a_reset_fails_is_stored(tmp_path: Path) -> None:
    """vLLM computes all of it under the new weights."""
    with OracleEngine(MODELS["full"], Conditions(slots=100, late=3), tmp_path, 0) as world:
        stored(world)
        assert world.scheduler.reset_prefix_cache()
        loading = ask(world, "loading", PROMPT)
        world.step()
        assert loading.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert not change_weights(world)
        world.drain()
        assert world.planner.totals()["load_failures"] == 1
        assert len(world.planner.cpu) >= (len(PROMPT) - 1) // 4
        assert world.mismatches == []


@pytest.mark.parametrize("how", ["failed", "preempted"])
def test_chunks_computed_after_a_failed_load_are_stored(how: str, tmp_path: Path) -> None:
    """A load has failed, or its request has lost its blocks again: none of its chunks count as
    loaded, and other requests need not wait for the end of this one."""
    with OracleEngine(MODELS["full"], Conditions(slots=100), tmp_path, 2) as world:
        keys = stored(world)[: (len(PROMPT) - 1) // 4]
        if how == "failed":
            world.planner.cpu.clear()
            world.executor._tiers[0].records.clear()
        again = ask(world, "again", PROMPT)
        while not again.num_output_tokens:
            world.step()
        if how == "preempted":
            assert world.loaded()["cpu"] > 0
            world.planner.cpu.clear()
            world.planner.lower[0].clear()
            world.forget_locally()
            assert again.num_computed_tokens == 0
            while not again.num_computed_tokens > len(PROMPT):
                world.step()
        else:
            assert world.planner.totals()["load_failures"] == 1
        assert "again" in world.scheduler.requests
        assert not any(map(world.planner.cpu.is_absent, keys))
        world.drain()
        world.check()


def chunks_being_stored(world: OracleEngine) -> int:
    """The chunks of stores that were sent and not answered."""
    unsent = {store.job for store in world.planner.stores._planned}
    jobs = [job for job in world.planner.jobs.jobs() if job.kind is JobKind.STORE]
    return sum(len(job.fills) for job in jobs if job.job not in unsent)


@pytest.mark.parametrize("hook", ["build_plan", "build_connector_meta", "update_state_after_alloc"])
def test_a_fault_that_may_have_hidden_a_fence_fails_every_open_store(
    hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content of these stores' blocks is unknown. The chunks may be stored again later."""
    with OracleEngine(
        MODELS["full"], Conditions(slots=100, tier=False, late=1), tmp_path, 2
    ) as world:
        ask(world, "stored", PROMPT)
        world.drain()
        world.forget_locally()
        ask(world, "storing", OTHER)
        while not chunks_being_stored(world):
            world.step()
        spoilt = []

        def broken(*_: Any) -> Any:
            monkeypatch.undo()
            spoilt.append(chunks_being_stored(world))
            raise RuntimeError("a fault in a hook")

        if hook == "build_plan":
            monkeypatch.setattr(SchedulerSide, "build_plan", broken)
        elif hook == "build_connector_meta":
            monkeypatch.setattr(BlockTables, "rewritten", broken)
        else:
            monkeypatch.setattr(ChunkBatches, "of_load", broken)
            ask(world, "loading", PROMPT)
        world.drain()
        assert world.connector.faults.by_hook == {hook: 1}
        assert spoilt[0] > 0, "the stores ended before the fault"
        assert world.planner.totals()["store_failures:cpu"] == spoilt[0]
        assert world.finished == (3 if hook == "update_state_after_alloc" else 2)
        assert world.mismatches == []
        world.planner.check()


def test_blocks_of_a_load_that_could_not_be_planned_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM counts these blocks as computed. The client aborts the request before the load is
    reported as failed, and meanwhile the tiers have evicted its chunks."""
    with OracleEngine(MODELS["full"], Conditions(slots=100), tmp_path, 2) as world:
        keys = stored(world)

        def broken(*_: Any) -> Any:
            raise RuntimeError("a fault in a hook")

        with monkeypatch.context() as patch:
            patch.setattr(ChunkBatches, "of_load", broken)
            request = ask(world, "gone", PROMPT)
            world.step()
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert request.num_computed_tokens == len(PROMPT)
        world.planner.cpu.clear()
        world.planner.lower[0].clear()
        world.scheduler.finish_requests("gone", RequestStatus.FINISHED_ABORTED)
        for _ in range(20):
            world.step()
        assert all(map(world.planner.cpu.is_absent, keys)), "blocks that were never filled"
        assert world.connector.faults.by_hook == {"update_state_after_alloc": 1}


@pytest.mark.parametrize(("owner", "part"), [(StoreProgress, "load_planned"), (ReadQueue, "begin")])
def test_a_load_that_was_planned_before_a_fault_ends_once(
    owner: type, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM begins with the request when a load is reported as ended. If another load of the request
    went on, it would fill blocks that the request computes, and its end would end the engine."""
    with OracleEngine(MODELS["full"], Conditions(slots=100), tmp_path, 2) as world:
        stored(world)
        world.planner.cpu.clear()

        def broken(*_: Any) -> Any:
            raise RuntimeError("a fault in a hook")

        with monkeypatch.context() as patch:
            patch.setattr(owner, part, broken)
            request = ask(world, "loading", PROMPT)
            world.step()
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        world.drain()
        assert world.loaded() == {"cpu": 0, "file": 64}
        assert world.connector.faults.by_hook == {"update_state_after_alloc": 1}
        world.connector.faults.by_hook.clear()
        world.check_idle()


def test_a_load_is_sent_although_the_end_of_its_step_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it were not sent, its request would wait forever, and a request with the same prompt would
    copy the slots into which nothing has read."""
    conditions = Conditions(slots=100, options={"max_load_gpu_share": 1.0})
    with OracleEngine(MODELS["full"], conditions, tmp_path, 2) as world:
        stored(world)
        world.planner.cpu.clear()
        ask(world, "other", OTHER)  # its chunks stay in the slots
        world.drain()
        world.planner.cpu.clear()
        end_step = StepBudget.end_step

        def broken(*_: Any, **__: Any) -> Any:
            monkeypatch.setattr(StepBudget, "end_step", end_step)
            raise RuntimeError("a fault in a hook")

        monkeypatch.setattr(StepBudget, "end_step", broken)
        loading = ask(world, "loading", PROMPT)
        world.step()
        assert loading.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        ask(world, "joining", PROMPT)
        for _ in range(40):
            world.step()
        assert world.mismatches == []
        assert world.finished == 4
        assert world.connector.faults.by_hook == {"build_connector_meta": 1}
        world.connector.faults.by_hook.clear()
        world.check_idle()
