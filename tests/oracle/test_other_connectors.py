"""Another connector loads blocks beside ours, in vLLM's ``MultiConnector`` and scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.request import RequestStatus

from offload.errors import OffloadError
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.test_miss_reasons import PROMPT, serve
from tests.oracle.test_requests_reported import _request

HOOKS = (
    "get_loaded_kv_cache_group_ids",
    "get_num_new_matched_tokens",
    "request_finished_all_groups",
    "update_state_after_alloc",
)
MINE = 96
"""Tokens that the other connector loads for each of its requests."""


class OtherConnector:
    """Finds tokens for the requests named ``other...``, and writes to their blocks at once. The end
    of its loads is reported when ``ended`` contains their requests."""

    def __init__(self, *, is_async: bool) -> None:
        self.ended: set[str] = set()
        self.blocks: list[int] = []
        self.fails = False
        self.unfilled: set[int] = set()
        self.failed: set[str] = set()
        self.finds_nothing = False
        self._is_async = is_async

    def get_num_new_matched_tokens(self, request: Any, _computed: int) -> tuple[int, bool]:
        is_mine = request.request_id.startswith("other") and not self.finds_nothing
        return (MINE, self._is_async) if is_mine else (0, False)

    def update_state_after_alloc(self, _request: Any, blocks: Any, tokens: int) -> None:
        self.blocks += blocks.get_block_ids()[0] if tokens else []

    def get_loaded_kv_cache_group_ids(self, _request: Any) -> tuple[int, ...]:
        return (0,)

    def request_finished_all_groups(self, *_: Any) -> tuple[bool, None]:
        return False, None


class TwoConnectors(OracleEngine):
    """An engine with another connector before ours. Nothing is copied unless vLLM waits for it."""

    def __init__(self, folder: Path, *, is_async: bool) -> None:
        self.other = OtherConnector(is_async=is_async)
        super().__init__(MODELS["full"], Conditions(100, late=0, batched_tokens=128), folder, 2)
        self._patch = pytest.MonkeyPatch()
        ours = SimpleNamespace(**{hook: getattr(self.connector, hook) for hook in HOOKS})
        multi: Any = MultiConnector.__new__(MultiConnector)
        multi._connectors = [self.other, ours]
        multi._requests_to_connector, multi._extra_async_saves = {}, {}
        multi._all_support_hma = True
        for hook in HOOKS:
            self._patch.setattr(self.connector, hook, getattr(multi, hook))
        self._patch.setattr(self.connector, "get_external_cache_hit_sources", lambda *_: {})
        begin, results = self._runner.begin, self.worker.get_transfer_results

        def begin_with_other(scheduled: Any) -> None:
            begin(scheduled)
            self._memory.zero(self.other.blocks)
            if self.other.fails:
                self.other.unfilled = set(self.other.blocks)
            self.other.blocks = []

        def results_of_both(finished: set[str]) -> Any:
            found = results(finished)
            found.finished_recving |= self.other.ended | self.other.failed
            found.failed_recving |= self.other.failed
            self.other.ended, self.other.failed = set(), set()
            return found

        def errors() -> set[int]:
            wrong, self.other.unfilled = self.other.unfilled, set()
            return wrong

        self._patch.setattr(self.worker, "get_block_ids_with_load_errors", errors)
        self._patch.setattr(self._runner, "begin", begin_with_other)
        self._patch.setattr(self.worker, "get_transfer_results", results_of_both)

    def ask(self, name: str, prompt: list[int]) -> Any:
        request = _request(self, name, prompt, None)
        self.scheduler.add_request(request)
        return request

    def end_others(self) -> None:
        """Abort the requests of the other connector, whose loads have ended."""
        others = [r for name, r in self.scheduler.requests.items() if name.startswith("other")]
        loading = [r for r in others if r.status is RequestStatus.WAITING_FOR_REMOTE_KVS]
        self.other.ended = {request.request_id for request in loading}
        names = [request.request_id for request in others]
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)


@pytest.fixture
def world(request: Any, tmp_path: Path) -> Iterator[TwoConnectors]:
    with TwoConnectors(tmp_path, is_async=getattr(request, "param", True)) as made:
        yield made


def test_blocks_that_another_connector_still_loads_are_not_stored(
    world: TwoConnectors,
) -> None:
    prompt = list(range(MINE + 8))
    request = world.ask("other", prompt)
    world.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    world.end_others()
    world.drain()
    assert len(world.planner.cpu) == 0
    serve(world, "again", prompt)


@pytest.mark.parametrize("world", [True, False], indirect=True, ids=["async", "sync"])
def test_blocks_that_another_connector_may_overwrite_are_not_stored(
    world: TwoConnectors,
) -> None:
    world.ask("first", PROMPT)
    world.step()
    world.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    assert world.planner.stores.storing == len(PROMPT) // 4
    for name, token in (("other 1", 95), ("other 2", 96)):  # they need nearly all blocks
        world.ask(name, [token] * (MINE + 8))
    world.step()
    world.end_others()
    world.drain()
    world.mismatches.clear()  # of the other connector's requests
    world.forget_locally()
    serve(world, "again", PROMPT)
    assert world.planner.totals()["store_failures:cpu"] > 0


@pytest.mark.parametrize("world", [False], indirect=True, ids=["sync"])
def test_blocks_that_another_connector_could_not_fill_are_not_stored(
    world: TwoConnectors,
) -> None:
    """The request has already run with these blocks when vLLM learns of the failure."""
    prompt = [95] * (MINE + 8)
    world.other.fails = True
    request = world.ask("other", prompt)
    world.step()
    assert request.num_computed_tokens == 0
    world._runs["other"].tokens = list(request.all_token_ids)  # vLLM has discarded the output
    world.mismatches.clear()
    world.drain()
    world.forget_locally()
    serve(world, "again", prompt)
    assert world.planner.totals()["store_failures:cpu"] > 0


def test_a_load_that_another_connector_failed_is_not_a_failure_of_ours(
    world: TwoConnectors,
) -> None:
    prompt = list(range(MINE + 8))
    serve(world, "first", prompt)
    world.forget_locally()
    request = world.ask("other", prompt)
    world.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    world.other.failed, world.other.finds_nothing = {"other"}, True
    before = world.loaded().get("cpu", 0)
    world.drain()
    assert world.loaded().get("cpu", 0) >= before + MINE


def test_a_connector_whose_start_up_data_replaces_ours_is_named(
    world: TwoConnectors,
) -> None:
    class TheirHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vllm is untyped here
        pass

    world.connector.serving = None  # as at the start of the engine
    with pytest.raises(OffloadError, match="here TheirHandshake"):
        world.connector.set_xfer_handshake_metadata({0: TheirHandshake()})
