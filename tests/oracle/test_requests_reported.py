"""Requests of vLLM's real scheduler are reported to the policies and the recorded trace."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from offload.requests.trace_recorder import RecordedPrompt, TraceRecorder
from policies import hints as names
from policies.base import EntryInfo
from policies.eviction.lru import LruPolicy
from policies.simulation.simulator import simulate
from policies.simulation.trace_formats import read_trace
from tests.oracle import serving as oracle_world
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine


class Spy(LruPolicy):
    """LRU that records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.infos: dict[Any, EntryInfo] = {}
        self.uses: list[list[Any]] = []
        self.advice: list[tuple[list[Any], Any]] = []

    def insert(self, key: Any, info: EntryInfo) -> None:
        self.infos[key] = info
        super().insert(key, info)

    def touch(self, keys: Any) -> None:
        self.uses.append(list(keys))
        super().touch(keys)

    def advise(self, keys: Any, hints: Any) -> None:
        self.advice.append((list(keys), hints))


def _request(
    world: OracleEngine, name: str, prompt: list[int], params: Any, salt: str | None = None
) -> Request:
    sampling = SamplingParams(
        max_tokens=4,
        ignore_eos=True,
        temperature=0.0,
        extra_args={"kv_transfer_params": params} if params is not None else None,
    )
    world._salts[name] = salt
    return Request(name, prompt, sampling, None, cache_salt=salt, block_hasher=world._hasher)


def _serve(
    world: OracleEngine, name: str, prompt: list[int], params: Any, salt: str | None = None
) -> None:
    world.scheduler.add_request(_request(world, name, prompt, params, salt))
    world.drain()
    world.check()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    trace = str(tmp_path / "served.jsonl")
    make = oracle_world.make_config

    def recording(*arguments: Any) -> Any:
        config, kv_cache_config = make(*arguments)
        config.kv_transfer_config.kv_connector_extra_config["record_trace"] = trace
        return config, kv_cache_config

    monkeypatch.setattr(oracle_world, "make_config", recording)
    with OracleEngine(MODELS["full"], Conditions(slots=80, tier=False), tmp_path, 1) as made:
        made.trace = trace  # type: ignore[attr-defined]  # for the test alone
        yield made


def test_hints_of_a_served_request_reach_the_policy(
    world: OracleEngine, caplog: pytest.LogCaptureFixture
) -> None:
    spy = world.planner.cpu.policy = Spy()
    end = {"kvtiers": {"session": "s", "session_end": True}}
    prompt = list(range(64))
    _serve(world, "a", prompt, end, salt="tenant")
    assert {info.hints.get(names.SESSION) for info in spy.infos.values()} == {"s"}
    assert {len(info.salt) for info in spy.infos.values()} == {8}
    assert all(info.depth_tokens and info.cost for info in spy.infos.values())
    assert len(spy.uses) == len(spy.advice) == 1  # one use per request, at its end
    keys, hints = spy.advice[0]
    assert set(keys) == set(spy.infos)
    assert hints == {names.SESSION_END: True}

    world.forget_locally()
    logging.getLogger("offload").propagate = True  # the connector may have sent it to vLLM's log
    with caplog.at_level(logging.WARNING, logger="offload"):
        for name in "bc":
            _serve(world, name, prompt, {"kvtiers": {"session_end": "yes"}}, salt="tenant")
    assert len(spy.advice) == 1
    assert len(spy.uses) == 3
    # Compared by identity: a record that reaches two handlers of the test is one line.
    assert len({id(r) for r in caplog.records if "kv_transfer_params of request" in r.message}) == 1


def test_chunks_evicted_while_their_request_runs_are_stored_again(world: OracleEngine) -> None:
    prompt = list(range(64))
    _serve(world, "a", prompt, None)
    keys = list(world.planner.cpu.resident)
    request = _request(world, "b", [*prompt, *range(40)], None)
    world.scheduler.add_request(request)
    while not request.num_output_tokens:
        world.step()
    gone = world.planner.cpu.drop(keys[-3:])
    assert gone
    assert not all(key in world.planner.cpu for key in keys)
    world.drain()
    world.check()
    assert all(key in world.planner.cpu for key in keys)


def test_the_recorded_trace_can_be_simulated(world: OracleEngine) -> None:
    prompt = list(range(64))
    _serve(world, "a", prompt, {"kvtiers": {"session": 7, "pinned": 40}})
    _serve(world, "b", prompt + [1] * 32, {"kvtiers": {"session": 7, "session_end": True}})
    _serve(world, "c", prompt, None, salt="other")
    world.connector.shutdown()
    trace = read_trace(world.trace)  # type: ignore[attr-defined]  # set by the fixture
    first, second, third = trace.requests
    size = trace.block_tokens
    assert [r.prompt_tokens for r in trace.requests] == [64, 96, 64]
    assert first.blocks() == second.blocks()[: 64 // size]
    assert not set(third.blocks()) & set(second.blocks())
    assert first.session == second.session >= 0 > third.session
    assert (first.last, second.last, first.pinned) == (False, True, 40 // size)
    result = simulate(trace, LruPolicy(), 1000)
    assert result.hit_tokens == 64


def _seen(number: int, keys: tuple[Any, ...] = (b"a", b"b")) -> RecordedPrompt:
    return RecordedPrompt(float(number), keys, 32, {}, 0)


def test_recording_ends_at_its_bound(tmp_path: Path) -> None:
    recorder = TraceRecorder(str(tmp_path / "t.jsonl"), 16, blocks_max=3)
    for number in range(4):
        recorder.record(_seen(number, (b"%d" % number, b"-%d" % number)))
    recorder.close()
    assert len(read_trace(tmp_path / "t.jsonl").requests) == 2


@pytest.mark.parametrize("fault", ["folder", "thread"])
def test_a_failing_recording_is_logged_and_only_the_recording_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    path = tmp_path / ("missing/t.jsonl" if fault == "folder" else "t.jsonl")
    with caplog.at_level(logging.ERROR):
        recorder = TraceRecorder(str(path), 16)
        recorder.record(_seen(0, ([],) if fault == "thread" else (b"a",)))
        for number in range(3000):
            recorder.record(_seen(number))  # more than fits into the queue
        recorder.close()
    assert recorder.dropped > 0
    assert [r.levelname for r in caplog.records if "recording" in r.message] == ["ERROR"]
