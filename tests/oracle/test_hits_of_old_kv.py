"""Requests that hit vLLM's own cache after a reset, while others hold KV of the old weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.test_look_ahead import prompts_of
from tests.oracle.test_miss_reasons import PROMPT, stored
from tests.oracle.test_stale_blocks import OTHER, ask, ask_later, change_weights


def test_what_hits_old_kv_in_the_step_that_adds_it_is_not_stored(tmp_path: Path) -> None:
    """A load had ended when the weights changed. When its request begins, vLLM adds the blocks to
    its cache, and two requests that begin in the same step hit them."""
    conditions = Conditions(slots=100, late=0, batched_tokens=64)
    with OracleEngine(MODELS["full"], conditions, tmp_path, 0) as world:
        stored(world)
        assert world.scheduler.reset_prefix_cache()
        loading = ask(world, "loading", PROMPT)
        while "loading" not in world.scheduler.finished_recving_kv_req_ids:
            world.step()
        assert loading.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        ask(world, "beside", PROMPT)
        ask(world, "too", PROMPT)
        assert not change_weights(world)
        world.drain()
        wrong = world.mismatches
        for name in ("beside", "too"):
            assert any(f"request {name} " in each for each in wrong), "it has not hit old blocks"
        ask_later(world, wrong=len(wrong))


def test_what_hits_the_window_of_a_running_request_is_not_stored(tmp_path: Path) -> None:
    """The last step of a prompt computes a whole window. A request that begins in this step hits
    it, because it needs no block before the window."""
    conditions = Conditions(slots=100, late=0, batched_tokens=64, long_prefill=16)
    with OracleEngine(MODELS["sliding"], conditions, tmp_path, 0) as world:
        other = ask(world, "other", OTHER[:3])  # vLLM computes 16 tokens only beside others
        other.max_tokens = 20
        while not other.num_output_tokens:
            world.step()
        running = ask(world, "running", PROMPT)
        while running.num_computed_tokens < len(PROMPT) - 16:
            world.step()
        assert not change_weights(world)
        longer = [*PROMPT, OTHER[0]]  # so that its window, which is stored, has blocks that it hit
        ask(world, "beside", longer)
        world.drain()
        wrong = world.mismatches
        assert any("beside" in each for each in wrong), "it has not hit old blocks"
        ask_later(world, longer, wrong=len(wrong))


def test_a_request_that_hits_new_kv_holds_no_old_kv(tmp_path: Path) -> None:
    """Requests that begin together share a prompt, as the samples of one prompt do, while another
    holds old KV. The third hits what the second computes after its own hit. New ones begin before
    these end, so vLLM's cache would give no hits for long."""
    conditions = Conditions(slots=100, batched_tokens=128, seqs=8)
    with OracleEngine(MODELS["full"], conditions, tmp_path, 0) as world:
        holders = world.connector.serving.side.old_kv._holders
        old = ask(world, "old", OTHER[:8])
        while not old.num_output_tokens:
            world.step()
        assert not change_weights(world)
        assert holders == {"old"}
        for number, prompt in enumerate(prompts_of(4, 24)):
            lengths = {"first": 12, "second": 20, "third": 24}
            asked = [ask(world, f"{at} of {number}", prompt[:n]) for at, n in lengths.items()]
            for each in asked:
                each.max_tokens = 12
            world.step()
            assert asked[2].num_computed_tokens == 24
            assert holders <= {"old"}
            for _ in range(8):
                world.step()
        assert old.is_finished()
        assert not holders
        world.drain()
        ask_later(world, prompt)


@pytest.mark.parametrize(("seed", "hits_itself"), [(0, False), (2, True)])
def test_the_last_holder_leaves_no_old_kv_when_it_restarts(
    seed: int, tmp_path: Path, *, hits_itself: bool
) -> None:
    """With asynchronous scheduling and drafts, vLLM adds a block between two steps. It restarts the
    only holder then, but keeps its cache because a step is in flight. The request hits the block if
    it is its first one. If not, a later request hits it when the blocks before it are there."""
    conditions = Conditions(slots=100, batched_tokens=16, asynchronous=True, vllm_errs=True)
    with OracleEngine(MODELS["full_ngram"], conditions, tmp_path, seed) as world:
        cached = world.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        running = ask(world, "running", PROMPT[:2])
        running.max_tokens = 40
        while not running.num_computed_tokens:
            world.step()
        assert not change_weights(world)
        while not (len(cached) and world._queue):
            assert not running.is_finished()
            world.step()
        with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
            world.scheduler.reset_prefix_cache(reset_running_requests=True)
        world.step()
        assert bool(world.connector.serving.side.old_kv._holders) == hits_itself
        world.drain()
        assert (world.events()["vllm_errors"] > 0) == hits_itself
        assert (len(cached) == 0) == hits_itself
        ask_later(world, [*running.all_token_ids, *OTHER[:3]])
