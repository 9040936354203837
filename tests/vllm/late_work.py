"""Plants work that Model Runner V2 does too late: after the connector's hooks of a step.

On a GPU, V2 zeroes fresh blocks and writes KV on its own stream, and copies of this project run
beside it. Events keep them in order; a CPU does not need these. The faults run the work in an order
that would be possible if an event were missing. Each function runs in a worker
(``Engine.call(on_workers, ...)``).
"""

from __future__ import annotations

import threading
from typing import Any

from vllm.v1.kv_cache_interface import AttentionSpec

from tests.patience import PATIENCE_S
from tests.vllm.copy_faults import Undone
from tests.vllm.faults import executor


def zero_late(worker: Any) -> None:
    """From now on, blocks that V2 has zeroed in the step that begins their load are zeroed again
    when they have been loaded."""
    runner, engine = worker.model_runner, executor(worker)._engine
    zeroer, submit = runner.kv_block_zeroer, type(engine).submit_load
    groups = runner.kv_cache_config.kv_cache_groups
    attention = [isinstance(group.kv_cache_spec, AttentionSpec) for group in groups]
    held: set[int] = set()
    engine.kvtest_zeroed = 0

    def zero_block_ids(ids: list[int]) -> None:
        held.clear()
        held.update(ids)
        type(zeroer).zero_block_ids(zeroer, ids)

    def submit_load(batches: Any, after: Any = None) -> Any:
        loaded = {b.group: {int(n) for n in b.blocks.ravel()} for b in batches}
        late = {g: sorted(ids & held) for g, ids in loaded.items() if attention[g]}
        engine.kvtest_zeroed += sum(map(len, late.values()))
        return Undone(submit(engine, batches, after), lambda: worker.kvtest_fill(late, 0))

    zeroer.zero_block_ids, engine.submit_load = zero_block_ids, submit_load


def zeroed(worker: Any) -> int:
    """The number of blocks that were zeroed again."""
    return int(executor(worker)._engine.kvtest_zeroed)


def zero_in_time(worker: Any) -> None:
    """Remove the fault of ``zero_late``."""
    del worker.model_runner.kv_block_zeroer.zero_block_ids
    del executor(worker)._engine.submit_load


def write_late(worker: Any) -> None:
    """From now on, what a forward pass writes into the KV cache appears there only when the stores
    of its step have read their blocks. Nothing may be loaded meanwhile."""
    connector, engine = worker.model_runner.kv_connector, executor(worker)._engine
    real, submit, memory = type(connector), type(engine).submit_store, worker._memory()
    copied = threading.Semaphore(0)
    step: dict[str, Any] = {}

    def submit_store(batches: Any, after: Any = None) -> Any:
        return Undone(submit(engine, batches, after), copied.release)

    def pre_forward(scheduled: Any, *args: Any, **options: Any) -> None:
        real.pre_forward(connector, scheduled, *args, **options)
        step["before"] = memory.clone()
        step["rank_folders"] = len(scheduled.kv_connector_metadata.plan.stores)

    def post_forward(finished: Any) -> Any:
        written = memory.clone()
        memory.copy_(step["before"])
        output = real.post_forward(connector, finished)
        for _ in range(step["rank_folders"]):
            assert copied.acquire(timeout=PATIENCE_S), "a store was not copied"
        memory.copy_(written)
        return output

    engine.submit_store = submit_store
    connector.pre_forward, connector.post_forward = pre_forward, post_forward


def write_in_time(worker: Any) -> None:
    """Remove the fault of ``write_late``."""
    connector = worker.model_runner.kv_connector
    del connector.pre_forward, connector.post_forward, executor(worker)._engine.submit_store


def hold_stores(worker: Any) -> None:
    """From now on, no store reads its blocks before a fence waits for it, like a copy in a long
    queue of a GPU. V2 overwrites blocks before it lets the connector fence."""
    runner, found = worker.model_runner, executor(worker)
    engine, gate = found._engine, threading.Event()
    reading: dict[int, list[int]] = {}
    overwritten: dict[str, set[int]] = {"zeroed": set(), "copied": set(), "moved": set()}
    found.kvtest_held = gate, overwritten

    def submit_store(batches: Any, after: Any = None) -> Any:
        for batch in batches:
            blocks = {int(n) for n in batch.blocks.ravel() if n > 0}
            reading[batch.group] = sorted(blocks.union(reading.get(batch.group, [])))
        return type(engine).submit_store(engine, batches, after)

    def store(batches: Any) -> None:
        assert gate.wait(PATIENCE_S), "no fence came"
        type(engine)._store(engine, batches)

    def fence(jobs: Any) -> None:
        gate.set()
        type(found).fence(found, jobs)

    def update_requests(scheduled: Any) -> None:
        type(runner).update_requests(runner, scheduled)
        held = set() if gate.is_set() else set().union(*reading.values())
        copies = {copy.dst_block_id for copy in scheduled.kv_cache_block_copies or ()}
        overwritten["zeroed"] |= held & {*(scheduled.new_block_ids_to_zero or ())}
        overwritten["copied"] |= held & copies

    def preprocess_state(*args: Any, **options: Any) -> None:
        held = {} if gate.is_set() else dict(reading)  # other threads submit stores meanwhile
        before = worker.kvtest_read(held)
        type(runner.model_state).preprocess_state(runner.model_state, *args, **options)
        after = worker.kvtest_read(held)
        for group, ids in held.items():
            for block, old, new in zip(ids, before[group], after[group], strict=True):
                overwritten["moved"] |= {block} if old != new else set()

    engine.submit_store, engine._store, found.fence = submit_store, store, fence
    runner.update_requests, runner.model_state.preprocess_state = update_requests, preprocess_state


def release_stores(worker: Any) -> dict[str, set[int]]:
    """Remove the fault of ``hold_stores``. Returns the blocks that V2 has overwritten before the
    first fence although stores were to read them."""
    found = executor(worker)
    gate, overwritten = found.kvtest_held
    gate.set()
    del found._engine.submit_store, found._engine._store, found.fence
    del worker.model_runner.update_requests, worker.model_runner.model_state.preprocess_state
    return dict(overwritten)


def trust_late_fences(worker: Any, does_trust: bool) -> None:
    """Decide whether stores are committed, from now on, although their fence came too late."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    get_kv_transfer_group()._worker._fence_is_late = not does_trust
