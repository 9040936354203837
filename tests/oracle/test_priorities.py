"""Requests that vLLM preempts by their priority. It may have scheduled them in the same step, and
keeps blocks in its cache that this step would have computed (vllm#57580). Nobody may hit these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request

from offload.connector.connector import OffloadConnector
from offload.connector.scheduler.cache_resets import CacheResets
from tests.oracle.mixed import MixedEngine
from tests.oracle.models import MODELS, OracleModel
from tests.oracle.serving import Conditions

PROMPT, URGENT = list(range(90)), list(range(40, 60))
STEP = 48
CONDITIONS: dict[str, Any] = {
    "slots": 200,
    "tier": False,
    "scheduling": "priority",
    "batched_tokens": STEP,
    "long_prefill": 8,
    "features": ("priorities",),
}
NAMES = [name for name in MODELS if name not in ("sliding", "mamba1")]
"""Without those of which vLLM caches only the end of a prompt."""
QUICK = ("full", "sliding_full", "mamba1_full", "mamba1_full_match_unit", "full_mtp")


@dataclass
class Preempted:
    """A request that was preempted when this many of its tokens were computed."""

    request: Request
    tokens: int


class PriorityEngine(MixedEngine):
    """Wrong KV in vLLM's own cache counts in ``events()``; wrong KV from the tiers is an error that
    ``check`` raises."""

    def __init__(self, name: str, folder: Path, *, asynchronous: bool = False) -> None:
        conditions = Conditions(asynchronous=asynchronous, vllm_errs=True, **CONDITIONS)
        super().__init__(MODELS[name], conditions, folder, 2)

    def ask(self, name: str, prompt: list[int]) -> Request:
        """Send a request. Those of equal priority begin in the order of the numbers in their
        names."""
        self._salts[name] = None
        request = self.make_request(name, prompt, 8)
        request.priority = 1
        self.scheduler.add_request(request)
        return request

    def preempt(
        self, *, is_scheduled: bool, victims: int = 1, others: Sequence[Request] = ()
    ) -> list[Preempted]:
        """Preempt requests in the middle of their prompts, because a more urgent one gets no block.
        ``is_scheduled``: the step has already scheduled them. The ``others`` go on."""
        requests = [self.ask(f"r{1 + at}", PROMPT[at:]) for at in range(victims)]
        urgent = self.ask("r9" if is_scheduled else "r0", URGENT)
        while urgent.num_computed_tokens < len(URGENT):
            self.step()
        self.settle()  # vLLM preempts no request of which a step is in flight
        for each in (urgent, *others):
            each.priority = 0
        found = [Preempted(each, each.num_computed_tokens) for each in requests]
        assert all(0 < each.tokens <= len(PROMPT) - STEP for each in found), found
        manager = self.scheduler.kv_cache_manager
        allocate, refused = manager.allocate_slots, []

        def find_no_blocks(request: Request, *args: Any, **more: Any) -> Any:
            if request is not urgent or len(refused) == victims:
                return allocate(request, *args, **more)
            refused.append(request)
            return None

        manager.allocate_slots = find_no_blocks
        self.step()
        assert [each.request.num_preemptions for each in found] == [1] * victims
        assert bool(self.seen["uncomputed blocks"]) == is_scheduled
        return found

    def note_removed(self) -> list[tuple[int, Any]]:
        """Return a list of the blocks that are removed from vLLM's own cache from now on, with
        their hashes."""
        removed: list[tuple[int, Any]] = []
        pool = self.scheduler.kv_cache_manager.block_pool
        evict = pool.evict_blocks

        def note_and_evict(blocks: set[int]) -> None:
            removed.extend((block, pool.blocks[block].block_hash) for block in blocks)
            evict(blocks)

        pool.evict_blocks = note_and_evict
        return removed

    def drain_and_check(self) -> None:
        """Let all requests end; everything that they have read is right."""
        self.drain()
        self.check()
        assert self.events()["vllm_errors"] == 0

    def restore(self) -> None:
        """Load the prompt of the preempted request from the CPU tier, and check it."""
        self.forget_locally()
        before = sum(self.loaded().values())
        self.ask("r10", PROMPT)
        self.drain_and_check()
        assert sum(self.loaded().values()) > before
        self.check_idle()


MODEL = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in NAMES],
)
SCHEDULING = pytest.mark.parametrize("asynchronous", [False, True])


@MODEL
@SCHEDULING
def test_nothing_follows_from_blocks_that_vllm_has_not_computed(
    name: str, asynchronous: bool, tmp_path: Path
) -> None:
    """Neither the preempted request hits them, nor one with the same prompt."""
    with PriorityEngine(name, tmp_path, asynchronous=asynchronous) as world:
        world.preempt(is_scheduled=True)
        world.ask("r5", [*PROMPT[:-2], 3])
        world.drain()
        world.check()
        world.restore()


@SCHEDULING
@pytest.mark.parametrize("victims", [1, 2])
@pytest.mark.parametrize("is_scheduled", [False, True])
def test_what_preempted_requests_have_computed_is_used_and_stored(
    is_scheduled: bool, victims: int, asynchronous: bool, tmp_path: Path
) -> None:
    with PriorityEngine("full", tmp_path, asynchronous=asynchronous) as world:
        preempted = world.preempt(is_scheduled=is_scheduled, victims=victims)
        side, found = world.connector.serving.side, []
        for each in preempted:
            cached = world.scheduler.kv_cache_manager.get_computed_blocks(each.request)[1]
            assert cached == each.tokens // 4 * 4
            found.append(side.admit(each.request).identity.keys[0])
        world.drain_and_check()
        for keys in found:
            assert all(key in world.planner.cpu for key in list(keys)[: len(PROMPT) // 4 - 1])
        world.restore()


def test_uncomputed_blocks_of_a_request_whose_hooks_fail_are_removed(
    unknown: set[str], tmp_path: Path
) -> None:
    unknown.add("r1")
    with PriorityEngine("full", tmp_path) as world:
        world.preempt(is_scheduled=True)
        unknown.clear()
        assert set(world.connector.faults.by_hook.values()) == {1}
        world.connector.faults.by_hook.clear()
        world.ask("r5", [*PROMPT[:-2], 3])
        world.drain_and_check()
        world.restore()


@pytest.mark.parametrize("part", ["the plan", "a block"])
def test_an_error_keeps_no_other_uncomputed_block(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that preempts two requests fails: before its plan is made, or after the first block
    is removed."""
    with PriorityEngine("full", tmp_path) as world:
        failed: list[str] = []

        def fail_once(real: Callable[..., None]) -> Callable[..., None]:
            def call(*args: Any) -> None:
                real(*args)
                if world.seen["uncomputed blocks"] and not failed:
                    failed.append(part)
                    raise RuntimeError("a fault in a hook")

            return call

        pool = world.scheduler.kv_cache_manager.block_pool
        owner, name = {
            "the plan": (CacheResets, "before_step"),
            "a block": (pool, "evict_blocks"),
        }[part]
        monkeypatch.setattr(owner, name, fail_once(getattr(owner, name)))
        world.preempt(is_scheduled=True, victims=2)
        assert failed
        for block, block_hash in world._features[0].uncomputed:
            assert pool.blocks[block].block_hash != block_hash
        assert world.connector.faults.by_hook == {"build_connector_meta": 1}
        world.connector.faults.by_hook.clear()
        world.drain_and_check()
        world.restore()


def test_only_uncomputed_blocks_are_removed(tmp_path: Path) -> None:
    with PriorityEngine("sliding_full", tmp_path) as world:
        removed = world.note_removed()
        world.preempt(is_scheduled=True)
        world.drain_and_check()
        assert sorted(removed) == sorted(world._features[0].uncomputed)


def with_checkpoints(model: OracleModel) -> OracleModel:
    """The same model, whose prompts end with a checkpoint of their recurrent states."""

    def layers() -> dict[str, Any]:
        states = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
        return {
            name: replace(spec, **states) if isinstance(spec, MambaSpec) else spec
            for name, spec in model.layers().items()
        }

    return replace(model, layers=layers)


@pytest.mark.parametrize("name", [*MODELS, "checkpoints"])
def test_all_uncomputed_blocks_of_a_request_are_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever vLLM keeps them: at the end of a prompt, in a part of a block, or a checkpoint. The
    oracle's forward pass has no checkpoints, so that the steps are only scheduled."""
    monkeypatch.setitem(MODELS, "checkpoints", with_checkpoints(MODELS["mamba1_full_match_unit"]))
    with PriorityEngine(name, tmp_path) as world:
        request, in_all = world.ask("r1", PROMPT[:86]), 0
        side, manager = world.connector.serving.side, world.scheduler.kv_cache_manager
        while (before := request.num_computed_tokens) < request.num_tokens:
            world.scheduler.schedule()
            after, request.num_computed_tokens = request.num_computed_tokens, before
            side.before_preemption()  # as if a more urgent request were scheduled now
            request.num_computed_tokens = after
            recorded = side.uncomputed._found.pop(request.request_id, [])
            blocks = manager.block_pool.blocks
            hashed = {b.block_id for b in blocks if (b.block_hash_num_tokens or 0) > before}
            assert {block.block_id for block, _ in recorded} == hashed
            in_all += len(hashed)
        assert in_all


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_running_request_with_the_same_prompt_goes_on(is_scheduled: bool, tmp_path: Path) -> None:
    """It is ahead of the preempted one, so that a hash may have two blocks: one that it has
    computed, which stays in vLLM's cache, and one that is removed, because it is not computed."""
    with PriorityEngine("full", tmp_path) as world:
        removed = world.note_removed()
        twin = world.ask("r2", PROMPT)
        (preempted,) = world.preempt(is_scheduled=is_scheduled, others=[twin])
        assert twin.num_computed_tokens > preempted.tokens + CONDITIONS["long_prefill"]
        uncomputed = world._features[0].uncomputed
        manager, first = world.scheduler.kv_cache_manager, preempted.tokens // 4
        hashes = [make_block_hash_with_group_id(each, 0) for each in twin.block_hashes]
        table = manager.get_block_ids(twin.request_id)[0]
        right = list(zip(table, hashes, strict=False))[first : twin.num_computed_tokens // 4]
        assert {block_hash for _, block_hash in uncomputed} <= {each for _, each in right}
        assert sorted(removed) == sorted(uncomputed)
        assert all(manager.block_pool.blocks[block].block_hash == each for block, each in right)
        world.ask("r5", PROMPT)
        world.drain_and_check()
        assert twin.num_preemptions == 0
        assert len(twin.output_token_ids) == 8
        world.restore()


def test_a_block_that_the_same_step_uses_again_stays(tmp_path: Path) -> None:
    """The urgent request gets the block of the preempted one, and computes it."""
    with PriorityEngine("full", tmp_path) as world:
        request, urgent = world.ask("r1", PROMPT), world.ask("r9", PROMPT[::-1])
        world.step()
        world.settle()
        urgent.priority = 0
        manager = world.scheduler.kv_cache_manager
        pool = manager.block_pool
        taken = pool.get_new_blocks(pool.get_num_free_blocks() - 2)
        world.step()
        assert request.num_preemptions == 1
        uncomputed = dict(world._features[0].uncomputed)
        used_again = manager.get_blocks(urgent.request_id).blocks[0][-2:]
        assert {block.block_id for block in used_again} == set(uncomputed)
        assert all(block.block_hash for block in used_again)
        pool.free_blocks(taken)
        world.drain_and_check()
        world.restore()


def multi_connector(*connectors: object) -> Any:
    """vLLM's ``MultiConnector`` with these connectors."""
    multi: Any = MultiConnector.__new__(MultiConnector)
    multi._connectors = list(connectors)
    return multi


def test_a_multi_connector_passes_on_vllms_pool_of_blocks(tmp_path: Path) -> None:
    with PriorityEngine("full", tmp_path) as world:
        request = world.ask("r1", PROMPT)
        world.step()
        ours = OffloadConnector(world._config, KVConnectorRole.SCHEDULER, world.kv_cache_config)
        manager = world.scheduler.kv_cache_manager
        multi_connector(ours).bind_kv_cache_manager(manager)
        block = ours._gpu_cache.tables(request.request_id)[0][1]
        pool, block_hash = manager.block_pool, request.block_hashes[1]
        assert pool.get_cached_block(block_hash, [0]) == [block]
        ours._gpu_cache.remove(block, block.block_hash)
        assert pool.get_cached_block(block_hash, [0]) is None
        world.drain_and_check()


def test_a_multi_connector_passes_on_that_vllm_preempts(tmp_path: Path) -> None:
    """vLLM's scheduler asks the ``MultiConnector``, which must ask ours, which serves."""
    with PriorityEngine("full", tmp_path) as world:
        hook, recorded = "has_pending_block_frees", []
        hooks = (lambda: False, getattr(world.connector, hook))
        multi = multi_connector(*(SimpleNamespace(**{hook: each}) for each in hooks))

        def ask_and_note() -> Any:
            answer = multi.has_pending_block_frees()
            found = world.connector.serving.side.uncomputed._found
            recorded.append([(block.block_id, each) for block, each in found["r1"]])
            return answer

        world.connector.has_pending_block_frees = ask_and_note
        world.preempt(is_scheduled=True)
        assert recorded == [world._features[0].uncomputed]
        world.drain_and_check()
        world.restore()
