"""Hits that vLLM's real scheduler does not use as found: it may shorten them afterwards (0.33:
`cap_external_hit`, replayed windows), or begin their loads later (HiSparse)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from offload.requests.miss_reasons import Reason
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.test_miss_reasons import PROMPT, serve, stored
from tests.oracle.test_requests_reported import _request


@pytest.fixture
def world(tmp_path: Path) -> Iterator[OracleEngine]:
    with OracleEngine(MODELS["full"], Conditions(slots=100), tmp_path, 2) as made:
        yield made


@pytest.mark.parametrize("kept", [0, 52])
def test_a_record_contains_the_hit_that_vllm_accepted(
    kept: int, world: OracleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(world)
    find = world.connector.get_num_new_matched_tokens

    def cut(request: Any, computed: int) -> tuple[int | None, bool]:
        tokens, _ = find(request, computed)
        assert tokens == 64
        return kept, kept > 0

    with monkeypatch.context() as patch:
        patch.setattr(world.connector, "get_num_new_matched_tokens", cut)
        found = serve(world, "cut", PROMPT)
    assert found.miss.reason is Reason.FILTERED
    assert found.miss.note == "vLLM accepted fewer tokens than were found"
    assert found.hit_tokens == kept
    assert sum(found.loaded.values()) == kept
    assert found.final, "its record is never written"
    world.check_idle()


def test_blocks_of_a_load_that_never_begins_are_not_stored(
    world: OracleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has allocated the blocks and counts them as computed, but the client aborts before vLLM
    lets the load begin."""
    keys = stored(world)
    begun: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            world.connector,
            "update_state_after_alloc",
            lambda _request, _blocks, tokens: begun.append(tokens),
        )
        request = _request(world, "gone", PROMPT, None)
        world.scheduler.add_request(request)
        world.step()
    assert begun == [64]
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert request.num_computed_tokens == 64
    world.planner.cpu.clear()
    world.planner.lower[0].clear()
    world.scheduler.finish_requests("gone", RequestStatus.FINISHED_ABORTED)
    for _ in range(20):
        world.step()
    assert all(map(world.planner.cpu.is_absent, keys)), "blocks that were never filled are stored"
