"""Requests that end with more unstored chunks than may be in flight, under vLLM's scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import pytest

from offload.planner.late_stores import LateStores
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.test_look_ahead import Backlog, prompts_of
from tests.oracle.test_scheduler import conditions_of, live

TOKENS = 121
CHUNKS = TOKENS // 4
IN_FLIGHT = 8


@pytest.mark.parametrize("asynchronous", [False, True])
def test_short_answers_leave_their_whole_prompts_in_the_cpu_tier(
    asynchronous: bool, tmp_path: Path
) -> None:
    """Each prompt is computed in one step and ends with it. vLLM's cache holds all of them."""
    conditions = Conditions(
        slots=120,
        batched_tokens=128,
        late=20,
        asynchronous=asynchronous,
        options={"max_inflight_store": IN_FLIGHT * 4096},
    )
    model = dataclasses.replace(MODELS["full"], blocks=150)
    with Backlog(model, conditions, tmp_path, 0) as served:
        served.answer_tokens = 1
        prompts = prompts_of(3, TOKENS)
        for number, prompt in enumerate(prompts):
            served.ask(str(number), prompt)
        served.drain()
        for prompt in prompts:
            assert all(key in served.planner.cpu for key in served.keys_of(prompt))
        served.check_idle()


@pytest.mark.parametrize(
    ("name", "seed", "in_flight"), [("full", 2, 1), ("full", 3, 1), ("mamba1_full", 2, 4)]
)
def test_every_byte_is_right_when_few_stores_may_be_in_flight(
    name: str, seed: int, in_flight: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worlds must overwrite blocks of chunks that wait."""
    lost = [0]
    overwritten = LateStores.overwritten

    def counted(late: LateStores, blocks: Iterable[int]) -> None:
        before = late.chunks
        overwritten(late, blocks)
        lost[0] += before - late.chunks

    monkeypatch.setattr(LateStores, "overwritten", counted)
    conditions = dataclasses.replace(
        conditions_of(name, seed), slots=80, options={"max_inflight_store": in_flight * 4096}
    )
    with OracleEngine(MODELS[name], conditions, tmp_path, seed) as world:
        live(world, in_flight=0.5)
        assert sum(world.loaded().values()) > 0
    assert lost[0] > 0
