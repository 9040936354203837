"""Blocks that leave vLLM's cache are restored bit for bit: from the CPU tier, from disk, after a
restart, after a crash, on two ranks, under preemption, after aborts, and from a damaged disk.

Every engine compares what it loads with what was computed, and must detect a wrong bit and a
swapped pair that the tests plant.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import faults
from tests.vllm.engine import Engine
from tests.vllm.probes import (
    check,
    connector,
    is_idle,
    look_up_in_steps,
    lookups_put_off,
    totals,
)
from tests.vllm.restored import (
    HASH,
    PATIENT,
    Reference,
    all_were_compared,
    ask,
    ask_and_compare,
    ask_twice,
    config,
    fill,
    loaded_tokens,
    planted_faults_are_seen,
    prompts,
    restore_and_verify,
    see_planted_faults,
    settle,
    until_compared,
)

CHUNK = 32 * 1024  # 4 layers x 8 KiB


@pytest.fixture(scope="module")
def reference(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference.record(llama, tmp_path_factory.mktemp("ref") / "log", prompts(4))


def serve(model: Path, tmp_path: Path, name: str, **changes: Any) -> Engine:
    """An engine with a CPU tier and an LMDB tier in ``tmp_path``."""
    options = HASH | {"connector": config(tmp_path / "kv")} | changes
    return Engine(model, log=tmp_path / f"{name}.log", **options)


def test_cold_then_from_the_cpu_tier_then_from_disk_after_a_restart(
    llama: Path, tmp_path: Path, reference: Reference
) -> None:
    with serve(llama, tmp_path, "first") as engine:
        fill(engine, reference)
        ask_and_compare(engine, reference, "cpu")
        stored = engine.call(totals)["stored_chunks:lmdb"]
        assert stored == engine.call(totals)["stored_chunks:cpu"] > 0
    with serve(llama, tmp_path, "second") as engine:
        ask_and_compare(engine, reference, "lmdb")
        # The other half of a shared prefix came from the CPU tier, or was in vLLM's own cache.
        assert engine.call(totals)["loaded_tokens:lmdb"] <= stored * 32
        planted_faults_are_seen(engine, reference)
    with serve(llama, tmp_path, "third") as engine:
        planted_faults_are_seen(engine, reference)
        assert loaded_tokens(engine, "lmdb") > 0


def partly_on_disk(llm: Any) -> bool:
    """Some chunks are on disk, others are still being written."""
    planner = connector(llm).serving.side.planner
    return len(planner.lower[0]) >= 4 and planner.busy


def resident_on_disk(llm: Any) -> int:
    return len(connector(llm).serving.side.planner.lower[0])


def test_after_kill_9_in_the_middle_of_storing(
    llama: Path, tmp_path: Path, reference: Reference
) -> None:
    for cycle in range(2):
        with serve(llama, tmp_path, f"killed-{cycle}") as engine:
            # so many that the first prompts are on disk before the last ones are stored
            more = prompts(24, seed=cycle + 7)
            for number, prompt in enumerate([*reference.prompts, *more]):
                engine.submit(str(number), prompt, max_tokens=8)
            engine.step_until(partly_on_disk)
            engine.kill()
    with serve(llama, tmp_path, "after") as engine:
        recovered = engine.call(resident_on_disk)
        assert recovered >= 4
        restore_and_verify(engine, reference, "lmdb")
        after = engine.call(totals)
        assert after["late_answers"] == after["load_failures"] == 0
        assert after["dropped_chunks:lmdb"] == 0, "a committed record was lost"
        planted_faults_are_seen(engine, reference)


def test_two_ranks(llama: Path, tmp_path: Path) -> None:
    """Two ranks over a file tier; ``test_kinds`` and ``test_geometry`` have two ranks over LMDB."""
    both: dict[str, Any] = {"tensor_parallel_size": 2}
    expected = Reference.record(llama, tmp_path / "ref.log", prompts(2), **both)
    tier = {"type": "file", "path": str(tmp_path / "kv"), "capacity": "256MiB", "reserve": 0}
    both["connector"] = config(None, tiers=[tier])
    with serve(llama, tmp_path, "first", **both) as engine:
        fill(engine, expected)
        ask_and_compare(engine, expected, "cpu")
    with serve(llama, tmp_path, "second", **both) as engine:
        ask_and_compare(engine, expected, "file")
        planted_faults_are_seen(engine, expected)
        engine.reset_prefix_cache(connector=True)
        before = loaded_tokens(engine, "cpu") + loaded_tokens(engine, "file")
        fill(engine, expected)
        assert loaded_tokens(engine, "cpu") + loaded_tokens(engine, "file") == before


def preemptions(engine: Engine) -> float:
    return sum(v for k, v in engine.metrics().items() if k.startswith("vllm:num_preemptions"))


def test_more_requests_than_the_cache_can_hold(llama: Path, tmp_path: Path) -> None:
    asked = prompts(8, tokens=200, seed=3)
    long = {"max_tokens": 60}
    small = {"num_gpu_blocks_override": 30, "max_num_seqs": 8, "max_model_len": 512}
    with serve(llama, tmp_path, "small", **small) as engine:
        engine.call(look_up_in_steps)
        for _ in range(3):
            engine.generate(asked, **long)
            settle(engine)
        assert preemptions(engine) > 0
        assert all_were_compared(engine)
        assert engine.call(lookups_put_off) > 0
        see_planted_faults(engine, lambda: engine.generate(asked, **long))


def is_loading(llm: Any) -> bool:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    states = [request.status.name for request in scheduler.requests.values()]
    return states.count("WAITING_FOR_REMOTE_KVS") >= 2


def free_blocks(llm: Any) -> int:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def test_requests_aborted_while_loading(llama: Path, tmp_path: Path, reference: Reference) -> None:
    with serve(llama, tmp_path, "first") as engine:
        fill(engine, reference)
    with serve(llama, tmp_path, "second") as engine:
        free = engine.call(free_blocks)
        engine.call(faults.on_workers, faults.hold_reads)
        for number, prompt in enumerate(reference.prompts):
            engine.submit(str(number), prompt)
        engine.step_until(is_loading)
        engine.abort("0", "1", "2", "3")
        engine.step(3)
        assert engine.call(free_blocks) < free, "blocks of a running load must not be freed"
        engine.call(faults.on_workers, faults.release_reads)
        engine.step_until(is_idle)
        assert engine.states() == {}
        assert engine.call(free_blocks) == free
        engine.call(check)
        ask_and_compare(engine, reference, "cpu")
        planted_faults_are_seen(engine, reference)


def damage_half(folder: Path) -> int:
    """Flip one bit in every other chunk-sized piece of every payload file; returns how many."""
    damaged = 0
    for path in folder.rglob("payload.data"):
        with path.open("r+b") as file:
            for number in range(0, path.stat().st_size // CHUNK, 2):
                file.seek(number * CHUNK + 1000)
                byte = file.read(1)
                file.seek(number * CHUNK + 1000)
                file.write(bytes([byte[0] ^ 0x10]))
                damaged += 1
    return damaged


def test_half_of_the_records_on_disk_are_damaged(
    llama: Path, tmp_path: Path, reference: Reference
) -> None:
    with serve(llama, tmp_path, "first") as engine:
        fill(engine, reference)
    assert damage_half(tmp_path / "kv") > 10
    with serve(llama, tmp_path, "second") as engine:
        before = engine.call(totals)
        ask_twice(engine, reference)
        settle(engine)
        after = engine.call(totals)
        assert after["load_failures"] > before["load_failures"]
        assert after["dropped_chunks:lmdb"] > 0
        # The recomputed chunks are on disk again, intact.
        assert restore_and_verify(engine, reference, "cpu") == len(reference.prompts)
    with serve(llama, tmp_path, "third") as engine:
        assert restore_and_verify(engine, reference, "lmdb") == len(reference.prompts)
        assert engine.call(totals)["load_failures"] == 0
        planted_faults_are_seen(engine, reference)


def test_a_reset_with_the_connector_forgets_every_tier_for_good(
    llama: Path, tmp_path: Path, reference: Reference
) -> None:
    with serve(llama, tmp_path, "first") as engine:
        fill(engine, reference)
        engine.reset_prefix_cache(connector=True)
        fill(engine, reference)  # the blocks count as computed with weights that match no file
        engine.kill()  # the reset was durable when it returned
    with serve(llama, tmp_path, "second") as engine:
        assert ask(engine, reference) == len(reference.prompts)
        counters = engine.call(totals)
        assert counters["loaded_tokens:lmdb"] == counters["loaded_tokens:cpu"] == 0
        settle(engine)
        planted_faults_are_seen(engine, reference)


def test_other_weights_at_the_same_path_find_nothing(
    llama: Path, tmp_path: Path, reference: Reference
) -> None:
    import shutil

    from demo.tiny_model import make_llama

    model = tmp_path / "model"
    shutil.copytree(llama, model)
    with serve(model, tmp_path, "first") as engine:
        fill(engine, reference)
    shutil.rmtree(model)
    make_llama(model, seed=99)
    with serve(model, tmp_path, "second") as engine:
        answer = engine.generate_one(reference.prompts[0])
        assert answer.tokens != reference.answers[0, 0].tokens
        assert engine.call(totals)["loaded_tokens:lmdb"] == 0
        assert "are not used, because model.weights.digest differs" in engine.log()


SCHEDULER_HOOKS = ["lookup", "finished", "admit", "_plan_load", "hit_sources", "_prepare", "update"]
"""``update`` is last: a report that is lost leaves its jobs open, which costs later hits."""


def break_scheduler(llm: Any, name: str) -> None:
    """From now on, the next call of this method raises, and later a quarter of the calls."""
    _break(connector(llm).serving.side, name)


def break_executor(worker: Any, name: str) -> None:
    _break(faults.executor(worker), name)


def _break(side: Any, name: str) -> None:
    real, draw, calls = getattr(side, name), random.Random(name), itertools.count()

    def broken(*args: Any) -> Any:
        # at random: every n-th call might never be, or always be, the one that plans the load
        if next(calls) == 0 or draw.random() < 0.25:
            raise RuntimeError(f"planted in {name}")
        return real(*args)

    setattr(side, name, broken)


def heal_executor(worker: Any, name: str) -> None:
    vars(faults.executor(worker)).pop(name, None)


def worker_faults(worker: Any) -> int:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return sum(get_kv_transfer_group().faults.by_hook.values())


def heal(llm: Any, name: str) -> None:
    vars(connector(llm).serving.side).pop(name, None)


def hook_faults(llm: Any) -> dict[str, int]:
    return dict(connector(llm).faults.by_hook)


def ask_with_a_broken_hook(engine: Engine, reference: Reference) -> None:
    """Send everything one by one until answers could be compared, then everything in flight
    together."""

    def ask_again() -> int:
        engine.try_to_reset()
        return ask_twice(engine, reference)

    until_compared(ask_again)
    engine.try_to_reset()
    engine.generate(reference.prompts)


def test_a_hook_that_raises_costs_hits_but_never_changes_an_answer(
    llama: Path, tmp_path: Path, reference: Reference
) -> None:
    with serve(llama, tmp_path, "first") as engine:
        for name in SCHEDULER_HOOKS:
            engine.call(break_scheduler, name)
            ask_with_a_broken_hook(engine, reference)
            engine.call(heal, name)
        assert len(engine.call(hook_faults)) >= 5
        assert engine.call(totals)["loaded_tokens:cpu"] > 0
    with serve(llama, tmp_path, "second") as engine:
        for name in ("fence", "drain"):
            engine.call(faults.on_workers, break_executor, name)
            ask_with_a_broken_hook(engine, reference)
            engine.call(faults.on_workers, heal_executor, name)
        assert sum(engine.call(faults.on_workers, worker_faults)) > 0, "no fault occurred"
    with serve(llama, tmp_path, "third") as engine:
        restore_and_verify(engine, reference, "lmdb")  # nothing wrong was stored
        # Some chunks may have been missing. Now the CPU tier holds all of them.
        assert restore_and_verify(engine, reference, "cpu") == len(reference.prompts)


def recomputes_failed_loads(llm: Any) -> bool:
    """vLLM's scheduler recomputes such requests, whatever the configuration says."""
    return bool(llm.llm_engine.engine_core.engine_core.scheduler.recompute_kv_load_failures)


def test_the_connector_works_by_its_short_name_and_without_configuration(
    llama: Path, tmp_path: Path, reference: Reference
) -> None:
    """The installed package's plugin registers the name; defaults fit the machine, and failed loads
    are recomputed. Only time limits are given."""
    plain: dict[str, Any] = {"kv_connector": "KvTiersConnector", "kv_role": "kv_both"}
    plain["kv_connector_extra_config"] = PATIENT
    with Engine(llama, log=tmp_path / "log", connector=plain, **HASH) as engine:
        fill(engine, reference)
        planted_faults_are_seen(engine, reference)
        assert engine.call(recomputes_failed_loads)
        log, shared_memory = engine.log(), engine.shared_memory()
    assert "cpu.capacity not given: using" in log
    assert "kv_load_failure_policy was 'fail' (vLLM's default) and is now 'recompute'" in log
    assert not [path for path in shared_memory if path.exists()]
