"""Sleep mode over a KV cache that is really unmapped: see `tests.oracle.sleeping`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from offload.connector.compat import worker_sleep
from offload.connector.scheduler.scheduler_side import SchedulerSide
from offload.planner.write_through import WriteThrough
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.sleeping import CYCLES, SleepingEngine
from tests.oracle.test_miss_reasons import PROMPT, _request

SEEDS = (0, 1)
COUNTER = "some_counter"


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """One process runs all seeds. Touching an unmapped page kills the process."""
    folder = tmp_path_factory.mktemp("sleeping")
    command = [sys.executable, "-m", "tests.oracle.sleeping", str(folder), *map(str, SEEDS)]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert ran.returncode != -signal.SIGSEGV, f"the unmapped KV cache was accessed\n{ran.stderr}"
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert [each["seed"] for each in found] == [*SEEDS]
    return found


def test_nothing_touches_an_unmapped_cache_in_20_cycles(lives: list[dict[str, float]]) -> None:
    """The world also checks that every byte read after a sleep is right."""
    for each in lives:
        assert each["kept"] + each["lost"] >= CYCLES - 2  # there may be nothing to keep at first


def test_what_the_tiers_hold_stays_unless_the_weights_change(
    lives: list[dict[str, float]],
) -> None:
    for each in lives:
        assert each["lost"] == CYCLES // 4
        assert each["kept"] > CYCLES // 2
        assert each["cpu"] + each["file"] > 0, "nothing was loaded"


def test_stores_that_were_not_sent_are_cancelled_when_the_server_falls_asleep(
    tmp_path: Path,
) -> None:
    planned, sent = [], []
    with OracleEngine(MODELS["full"], Conditions(slots=100), tmp_path, 0) as world:
        planner, step = world.planner, world.planner.step

        def asleep(**options: Any) -> Any:
            planned.extend(planner.stores._planned)
            world.connector.serving.side.hold()
            plan = step(**options)
            sent.extend(plan.stores)
            return plan

        planner.step = asleep
        world.scheduler.add_request(_request(world, "a", PROMPT, None))
        world.drain()
    assert planned
    assert sent == []


def test_what_could_not_be_forgotten_is_not_kept_by_a_later_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error stops the reset after new weights. Later the server sleeps with the same ones."""

    def fail(_self: WriteThrough) -> None:
        raise RuntimeError("a fault in a hook")

    with SleepingEngine(MODELS["full"], Conditions(slots=100, late=0), tmp_path, 0) as world:
        serve(world, "old", PROMPT)
        with monkeypatch.context() as patch:
            patch.setattr(WriteThrough, "suspend", fail)
            world.load_weights()
            serve(world, "new", PROMPT)
        faults = dict(world.connector.faults.by_hook)
        assert faults.pop("update_connector_output") == 1
        assert faults.keys() == {"build_connector_meta"}, "it must be tried again"
        world.nap()
        for _ in range(100):
            world.step()  # computes nothing, so no worker answers
            assert world.connector.serving.side.is_held, "the weights are not known yet"
        serve(world, "awake", PROMPT[::-1])
        assert not world.connector.serving.side.is_held
        world.forget_locally()
        serve(world, "again", PROMPT)
        assert world.mismatches == []
        assert len(world.planner.cpu) > 0


def test_an_error_about_an_adapter_does_not_lose_the_answer_about_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers answer each question once, so the tiers would stay held. The workers' counters
    are not lost either."""

    def fail(_self: SchedulerSide, _loaded: object) -> None:
        raise RuntimeError("a fault in a hook")

    with SleepingEngine(MODELS["full"], Conditions(slots=100, late=0), tmp_path, 0) as world:
        serve(world, "before", PROMPT)
        world.nap()
        serving, hook = world.connector.serving, world.connector.update_connector_output
        failed: list[str] = []
        counted: dict[str, float] = {}
        add = serving.metrics.add_worker_counters

        def counting(counters: Mapping[str, float]) -> None:
            counted.update(counters)
            add(counters)

        def with_adapter(output: Any) -> None:
            meta = output.kv_connector_worker_meta
            if not failed and meta is not None and meta.weights is not None:
                failed.append("adapter")
                meta = replace(meta, adapters={"a": "content"}, counters={COUNTER: 1.0})
                output = replace(output, kv_connector_worker_meta=meta)
            hook(output)

        monkeypatch.setattr(world.connector, "update_connector_output", with_adapter)
        monkeypatch.setattr(SchedulerSide, "adapters_loaded", fail)
        monkeypatch.setattr(serving.metrics, "add_worker_counters", counting)
        serve(world, "awake", PROMPT[::-1])
        assert failed
        assert world.connector.faults.by_hook == {"update_connector_output": 1}
        assert serving.resets.question == 0
        assert not serving.side.is_held
        assert counted[COUNTER] == 1
        world.forget_locally()
        serve(world, "again", PROMPT)
        assert world.mismatches == []
        assert world.loaded()["cpu"] > 0


def serve(world: OracleEngine, name: str, prompt: list[int]) -> None:
    world.scheduler.add_request(_request(world, name, prompt, None))
    world.drain()


def test_a_reset_without_a_sleep_fails_loads(tmp_path: Path) -> None:
    """The weights are replaced in a server that can sleep, while a request waits for its load."""
    with SleepingEngine(MODELS["full"], Conditions(slots=100, late=3), tmp_path, 0) as world:
        serve(world, "before", PROMPT)
        assert world.scheduler.reset_prefix_cache()
        world.scheduler.add_request(_request(world, "loading", PROMPT, None))
        world.step()
        assert world.scheduler.requests["loading"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert not world.scheduler.reset_prefix_cache(reset_connector=True)
        world.weights += 1
        world.model.weight[0] += 1.0
        world.drain()
        assert world.planner.totals()["load_failures"] == 1
        serve(world, "after", PROMPT)
        assert world.mismatches == []
        assert len(world.planner.cpu) > 0


def test_the_worlds_leave_vllms_worker_as_it_is(tmp_path: Path) -> None:
    """Otherwise other tests in the same process would depend on their order."""
    with SleepingEngine(MODELS["full"], Conditions(), tmp_path, 0):
        assert worker_sleep._FOLLOWED == []
