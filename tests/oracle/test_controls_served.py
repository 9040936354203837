"""Controls of requests that vLLM's real scheduler serves, and the report to the client."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offload.connector.scheduler import scheduler_side
from tests.offload.connector.kv_cache_configs import full, sliding
from tests.oracle import serving as oracle_world
from tests.oracle.models import MODELS, OracleModel
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.test_late_loads import still
from tests.oracle.test_miss_reasons import stored
from tests.oracle.test_requests_reported import _request
from tiers.base import ReadOutcome

PROMPT = list(range(64))


@pytest.fixture(params=["full", "sliding_full"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OracleEngine]:
    with OracleEngine(MODELS[request.param], Conditions(slots=120), tmp_path, 1) as made:
        yield made
        made.check_idle()


def serve(world: OracleEngine, name: str, prompt: list[int], **options: Any) -> dict[str, Any]:
    """Serve one request alone; return the report to its client."""
    params = serve_params(world, name, prompt, {"kvtiers": options} if options else None)
    assert bool(params) == bool(options), "a client gets a report if it sent controls"
    return dict(params["kvtiers_report"]) if params else {}


def serve_params(world: OracleEngine, name: str, prompt: list[int], sent: Any) -> dict[str, Any]:
    """Serve one request alone with these ``kv_transfer_params``; return those of its answer."""
    request = _request(world, name, prompt, sent)
    outputs: list[Any] = []
    update = world.scheduler.update_from_output

    def noting(*arguments: Any) -> Any:
        found = update(*arguments)
        outputs.extend(output for out in found.values() for output in out.outputs)
        return found

    world.scheduler.update_from_output = noting
    world.scheduler.add_request(request)
    world.drain()
    world.check()
    world.scheduler.update_from_output = update
    last = [output for output in outputs if output.finish_reason is not None]
    return dict(last[0].kv_transfer_params or {})


def loaded(world: OracleEngine) -> float:
    return sum(world.loaded().values())


def test_nothing_is_stored_or_loaded_on_request(world: OracleEngine) -> None:
    serve(world, "a", PROMPT, no_store=True)
    assert len(world.planner.cpu) == 0
    serve(world, "b", PROMPT)
    assert len(world.planner.cpu) > 0
    world.forget_locally()
    assert serve(world, "c", PROMPT, no_load=True) == {"loaded_tokens": {}}
    assert loaded(world) == 0
    world.forget_locally()
    report = serve(world, "d", PROMPT, session="s")
    assert sum(report["loaded_tokens"].values()) == loaded(world) > 0


def test_where_salts_are_required_nothing_is_shared_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = oracle_world.make_config

    def strict(*arguments: Any) -> Any:
        config, kv_cache_config = make(*arguments)
        config.kv_transfer_config.kv_connector_extra_config["require_salt"] = True
        return config, kv_cache_config

    monkeypatch.setattr(oracle_world, "make_config", strict)
    with OracleEngine(MODELS["full"], Conditions(slots=120), tmp_path, 1) as world:

        def ask(name: str, salt: str | None) -> None:
            world.forget_locally()
            world.scheduler.add_request(_request(world, name, PROMPT, None, salt))
            world.drain()
            world.check()

        ask("nobody's", None)
        assert len(world.planner.cpu) == 0
        ask("a tenant's", "tenant")
        assert len(world.planner.cpu) > 0
        ask("nobody's again", None)
        assert loaded(world) == 0
        ask("the tenant's again", "tenant")
        assert loaded(world) > 0


def test_a_client_that_leaves_during_a_load_gets_no_report_of_loaded_tokens(tmp_path: Path) -> None:
    with OracleEngine(MODELS["full"], Conditions(slots=120), tmp_path, 2) as world:
        stored(world)
        request = _request(world, "gone", PROMPT, {"kvtiers": {"session": "s"}})
        world.scheduler.add_request(request)
        with still(world):
            world.step()
            assert world.planner.loads.loading == 16
            side = world.connector.serving.side
            assert side is not None
            tables = world.scheduler.kv_cache_manager.get_block_ids("gone")
            assert side.finished(request, tables) == {"kvtiers_report": {"loaded_tokens": {}}}


def test_max_load_tokens_limits_the_load(world: OracleEngine) -> None:
    serve(world, "a", PROMPT)
    world.forget_locally()
    size = world.connector.serving.side.layout.alignment_tokens
    report = serve(world, "b", PROMPT, max_load_tokens=2 * size + 1)
    assert report["loaded_tokens"] == {"cpu": 2 * size}
    for most, tokens in ((2 * size - 1, size), (2 * size, 2 * size)):
        world.forget_locally()
        report = serve(world, "c", PROMPT, max_load_tokens=most)
        assert report["loaded_tokens"] == {"cpu": tokens}
    world.forget_locally()
    assert serve(world, "d", PROMPT, max_load_tokens=0)["loaded_tokens"] == {}


def test_a_tier_that_is_not_named_is_neither_read_nor_written(world: OracleEngine) -> None:
    serve(world, "a", PROMPT, tiers=["cpu"])
    assert len(world.planner.lower[0]) == 0
    world.forget_locally()
    assert serve(world, "b", PROMPT, tiers=["file"])["loaded_tokens"] == {}
    serve(world, "c", [*PROMPT[:32], *range(100, 132)])
    assert len(world.planner.lower[0]) > 0
    other = [7, *PROMPT[1:]]
    serve(world, "d", other)
    world.forget_locally()
    assert set(serve(world, "e", other, tiers=["file"])["loaded_tokens"]) == {"file"}
    world.forget_locally()
    assert set(serve(world, "f", other, tiers=["cpu"])["loaded_tokens"]) == {"cpu"}


def test_pinned_chunks_survive_later_requests(tmp_path: Path) -> None:
    with OracleEngine(MODELS["full"], Conditions(slots=24, tier=False), tmp_path, 1) as world:
        report = serve(world, "a", PROMPT, pin_s=600, pinned=32)
        assert report["pinned_tokens"] == 24, "a quarter of the tier's 24 slots of 4 tokens"
        for number in range(12):
            serve(world, f"x{number}", [200 - number, *range(1, 80)])
        assert world.planner.cpu.evictions > 0
        world.forget_locally()
        report = serve(world, "b", PROMPT, session="s")
        assert report["loaded_tokens"] == {"cpu": 24}
        world.change_weights()
        assert world.connector.serving.side._finished_requests.pins.used()["cpu"] == 0
        world.drain()
        world.check_idle()


def test_a_pin_ends_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's clock decides, even if no request asks for pinned chunks any more."""
    began, ahead = time.monotonic(), 0.0
    clock = SimpleNamespace(**vars(time))
    clock.monotonic = lambda: began + ahead
    monkeypatch.setattr(scheduler_side, "time", clock)
    with OracleEngine(MODELS["full"], Conditions(slots=24, tier=False), tmp_path, 1) as world:
        pins = world.connector.serving.side._finished_requests.pins
        serve(world, "a", PROMPT, pin_s=600)
        assert pins.used()["cpu"] == 6, "a quarter of 24 slots"
        ahead = 599.0
        serve(world, "b", [200, *range(1, 40)])
        assert pins.used()["cpu"] == 6
        ahead = 601.0
        serve(world, "c", [201, *range(1, 40)])
        assert pins.used()["cpu"] == 0
        world.check_idle()


def test_the_hint_pinned_limits_the_number_of_pinned_tokens(tmp_path: Path) -> None:
    """The pins cover the first tokens of the prompt, and never more than the prompt has."""
    with OracleEngine(MODELS["full"], Conditions(slots=120, tier=False), tmp_path, 1) as world:
        assert serve(world, "a", PROMPT, pin_s=600, pinned=10)["pinned_tokens"] == 8
        other = [7, *PROMPT[1:62]]  # with its answer the request has 64 tokens or more
        assert serve(world, "b", other, pin_s=600, pinned=10_000)["pinned_tokens"] == 60
        world.check_idle()


def test_tokens_of_a_failed_load_are_not_reported_as_loaded(world: OracleEngine) -> None:
    serve(world, "a", PROMPT)
    world.forget_locally()
    world.planner.cpu.drop(list(world.planner.cpu.resident))

    async def read(keys: Any, into: Any) -> list[ReadOutcome]:
        return [ReadOutcome.CORRUPT] * len(keys)

    world.executor._tiers[0].read = read
    assert serve(world, "b", PROMPT, session="s") == {"loaded_tokens": {}}
    assert loaded(world) == 0


TWO_FULL_GROUPS = OracleModel(
    lambda: {
        **{f"f.{n}": full(4) for n in range(4)},
        **{f"s.{n}": sliding(4, 10) for n in range(2)},
    },
    blocks=90,
)
"""vLLM makes groups whose number of layers is that of the smallest kind."""


def test_only_tokens_that_every_group_pins_are_reported_as_pinned(tmp_path: Path) -> None:
    """The first group uses up the share, so that only a part of the prefix is complete."""
    with OracleEngine(TWO_FULL_GROUPS, Conditions(slots=60, tier=False), tmp_path, 1) as world:
        assert world.connector.serving is not None
        kinds = [group.kind for group in world.connector.serving.side.layout.groups]
        assert kinds == ["full", "full", "window"]
        report = serve(world, "a", PROMPT, pin_s=600, pinned=48)
        assert report["pinned_tokens"] == 12, "15 slots: 12 chunks of one group, 3 of the other"
        world.check_idle()


def test_wrong_values_are_reported_and_counted(world: OracleEngine) -> None:
    report = serve(world, "a", PROMPT, no_load="yes", sesion="s", pin_s=-1)
    assert len(report["ignored"]) == 3
    assert world.connector.serving.side.requests.wrong_values == 3
    assert world.connector.faults.by_hook == {}


@pytest.mark.parametrize(
    "params",
    [
        {"kvtier": {"no_store": True}},
        {"no_store": True},
        {"kvtiers": {"no_stor": True}},
        {"kvtiers": "no_store"},
    ],
)
def test_a_control_that_was_not_understood_stores_nothing(
    world: OracleEngine, params: dict[str, Any]
) -> None:
    """The answer reports this to the client, with the name that the client may have meant."""
    report = serve_params(world, "a", PROMPT, params)["kvtiers_report"]
    assert len(world.planner.cpu) == len(world.planner.lower[0]) == 0
    assert len(report["ignored"]) == 1
    assert "meant to keep this request from being stored" in report["not_stored"]
    assert world.connector.serving.side.requests.wrong_values == 1
    assert serve_params(world, "b", PROMPT, {"do_remote_prefill": False}) == {}
    assert len(world.planner.cpu) > 0
    assert world.connector.faults.by_hook == {}


def test_debug_log_contains_the_result_of_a_lookup(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with OracleEngine(MODELS["full"], Conditions(slots=120), tmp_path, 1) as world:
        logging.getLogger("offload").propagate = True  # the connector sends the line to vLLM's log
        with caplog.at_level(logging.DEBUG, logger="offload"):
            serve(world, "a", PROMPT)
            world.forget_locally()
            serve(world, "b", PROMPT)
        texts = [record.message for record in caplog.records]
        lines = {text for text in texts if "lookup of request" in text}
        assert len(lines) == 2
        assert any("request a" in line and "never_stored" in line for line in lines)
        assert any("request b" in line and "'cpu': 64" in line for line in lines)
        with caplog.at_level(logging.INFO, logger="offload"):
            serve(world, "c", PROMPT)
        later = [record.message for record in caplog.records[len(texts) :]]
        assert not any("lookup of" in text for text in later)
