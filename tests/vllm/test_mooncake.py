"""Two real engines over a real Mooncake store: one restores what the other has computed, bit by
bit; when the master is killed and restarted under load, no answer changes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.tiers.mooncake.real_store import Master, one_store, skip_without_mooncake
from tests.vllm import faults, sick_disk
from tests.vllm.engine import Engine, EngineError
from tests.vllm.kinds import ask as ask_in_turn
from tests.vllm.other_geometry import (
    assert_refused,
    made,
    show_read_translated,
    show_what_came_later,
)
from tests.vllm.patient_store import PATIENT_ENV, be_patient
from tests.vllm.probes import check, totals
from tests.vllm.protocol import Prompt
from tests.vllm.restored import (
    HASH,
    Reference,
    ask_twice,
    compare,
    config,
    loaded_tokens,
    planted_faults_are_seen,
    prompts,
    settle,
)
from tests.vllm.restored import ask as in_turn
from tiers.mooncake.tier import MooncakeTier

skip_without_mooncake()
pytestmark = pytest.mark.thorough

LIMITS = (10.0, 5.0)
"""Time in seconds that a load and an operation of the store may take once its master may be
dead."""


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    made = Master(tmp_path / "master.log")
    made.start()
    yield made
    made.kill()


@pytest.fixture
def patient_master(tmp_path: Path) -> Iterator[Master]:
    """A master whose leases do not end while a busy machine reads. With Mooncake's 10 s, a read
    that took longer would fail although the record is there, and its prompt would be computed. It
    has no metadata server, because that one sometimes does not answer for many seconds."""
    lease = f"--default_kv_lease_ttl={int(PATIENCE_S * 1000)}"
    made = Master(tmp_path / "master.log", lease, has_metadata=False)
    made.start()
    yield made
    made.kill()


def offload(master: Master, cpu: str, segment: str = "128MiB", **others: Any) -> dict[str, Any]:
    """A CPU tier over the store."""
    return config(None, cpu=cpu, tiers=[master.tier(segment)], **others)


def ask(engine: Engine, reference: Reference) -> float:
    """Send everything again, with vLLM's own cache empty, and compare; return the tokens from the
    store."""
    engine.reset_prefix_cache()
    before = loaded_tokens(engine, "mooncake")
    assert in_turn(engine, reference) > 0, "no answer was compared"
    return loaded_tokens(engine, "mooncake") - before


def under_load(engine: Engine, reference: Reference, round_: int) -> int:
    """Send everything again while new prompts are computed and written. Returns how many answers
    were compared. None are if every hit covers only a part of its prompt, as with a small CPU tier
    alone."""
    engine.generate([*reference.prompts, *prompts(3, seed=1000 + round_)], max_tokens=2)
    engine.reset_prefix_cache()
    return ask_twice(engine, reference)


def until_restored(engine: Engine, reference: Reference) -> None:
    """Both breakers close again, the store provides what was written to it since, and an answer
    is compared."""
    deadline = time.monotonic() + PATIENCE_S
    before = loaded_tokens(engine, "mooncake")
    for round_ in itertools.count(100):
        compared = under_load(engine, reference, round_)
        if compared > 0 and loaded_tokens(engine, "mooncake") > before:
            return
        assert time.monotonic() < deadline, engine.call(totals)
        settle(engine)


def kill_under_load(engine: Engine, reference: Reference, master: Master, steps: int) -> None:
    """Kill the master after some steps of requests that load and compute."""
    engine.reset_prefix_cache()
    asked = [*reference.prompts, *prompts(3, seed=1000)]
    for number, prompt in enumerate(asked):
        engine.submit(f"load-{number}", prompt, max_tokens=4)
    engine.step(steps)
    master.kill()
    assert len(engine.run_until_finished()) == len(asked)


def test_one_engine_restores_what_the_other_has_computed(
    llama: Path, tmp_path: Path, master: Master
) -> None:
    reference = Reference.record(llama, tmp_path / "plain.log", prompts(4))
    wanted = 3 * (len(reference.prompts[0]) - 32)  # the second half of each pair is new
    with (
        Engine(llama, log=tmp_path / "1.log", connector=offload(master, "64MiB"), **HASH) as one,
        Engine(llama, log=tmp_path / "2.log", connector=offload(master, "64MiB"), **HASH) as two,
    ):
        assert ask(one, reference) == 0
        settle(one)
        assert ask(two, reference) > wanted * 0.9, "the other's blocks were not restored"
        settle(two)
        assert two.call(totals)["load_failures"] == 0
        planted_faults_are_seen(two, reference)
        new_weights_part_them(one, two, reference)
        for engine in (one, two):
            engine.call(check)


def new_weights_part_them(one: Engine, two: Engine, reference: Reference) -> None:
    """An engine that was reset finds no blocks of the others, and they do not find what it stores
    afterwards. To show that it stores at all, another engine is given its epoch and nothing
    else."""
    two.reset_prefix_cache(connector=True)
    assert ask(two, reference) == 0
    settle(two)
    two.reset_prefix_cache()
    apart, planted = prompts(1, seed=77), prompts(1, seed=78)
    two.generate([*apart, *planted])
    settle(two)
    assert found_chunks(one, apart) == 0
    [new] = two.call(faults.on_workers, faults.epoch, 0)
    [old] = one.call(faults.on_workers, faults.epoch, 0)
    assert (old, new % 2) == (0, 1)
    one.call(faults.on_workers, faults.epoch, 0, new)
    assert found_chunks(one, planted) > 0, "the reset engine has stored nothing"
    one.call(faults.on_workers, faults.epoch, 0, old)


def found_chunks(engine: Engine, asked: list[Prompt]) -> float:
    """The number of chunks that an engine found in the store, of prompts that are new to it."""
    before = engine.call(totals)["found_chunks:mooncake"]
    engine.generate(asked)
    return float(engine.call(totals)["found_chunks:mooncake"] - before)


def test_the_master_is_killed_and_restarted_under_load(
    llama: Path, tmp_path: Path, master: Master
) -> None:
    new = [prompts(1, seed=2000), prompts(1, seed=2001)]
    recorded = Reference.record(llama, tmp_path / "plain.log", [*prompts(2), *new[0], *new[1]])
    reference = Reference(recorded.prompts[:2], recorded.answers)
    small = offload(master, "1MiB")
    with (
        Engine(llama, log=tmp_path / "1.log", connector=small, **HASH) as one,
        Engine(llama, log=tmp_path / "2.log", connector=small, **HASH) as two,
    ):
        ask(one, reference)
        settle(one)
        assert ask(two, reference) > 0
        for engine in (one, two):
            engine.call(sick_disk.retry_soon)
            engine.call(faults.on_workers, sick_disk.set_limits, *LIMITS)
        for number, engine, steps in ((2, one, 3), (3, two, 6)):
            kill_under_load(engine, reference, master, steps)
            for round_ in range(3):
                under_load(engine, reference, round_)
            answer = engine.generate_one(recorded.prompts[number])
            compare(answer, recorded.answers[number, 0], number)  # no tier holds any of it
            master.start()
            until_restored(one, reference)
            until_restored(two, reference)
        for engine in (one, two):
            settle(engine)
            engine.call(check)


async def test_ranks_restore_their_parts_from_a_store_that_outlives_them(
    llama: Path, tmp_path: Path, master: Master
) -> None:
    """The engines contribute no memory; a separate client does. A chunk that lacks one rank's part
    is a miss."""
    ranks = {"tensor_parallel_size": 2} | HASH
    reference = Reference.record(llama, tmp_path / "plain.log", prompts(2), **ranks)
    connector = offload(master, "64MiB", segment="0")
    memory = MooncakeTier(master.settings(128 << 20))
    await memory.open()
    try:
        with Engine(llama, log=tmp_path / "1.log", connector=connector, **ranks) as one:
            assert ask(one, reference) == 0
            settle(one)
        with Engine(llama, log=tmp_path / "2.log", connector=connector, **ranks) as two:
            assert ask(two, reference) > 0, "the first engine's blocks were not restored"
        client = memory._client
        assert client is not None
        assert client._store.remove_by_regex("^kvtiers/.*/0/1/", True) > 0, "of rank 1"
        with Engine(llama, log=tmp_path / "3.log", connector=connector, **ranks) as three:
            assert ask(three, reference) == 0
            assert three.call(totals)["load_failures"] == 0
            settle(three)
            three.call(check)
    finally:
        await memory.aclose()


def test_tensor_parallel_sizes_read_each_other_in_a_store(
    tmp_path: Path, patient_master: Master
) -> None:
    """Engines with one and with two ranks run side by side, in both directions; what cannot be
    translated is refused. Another process provides the memory, so that an engine's records outlive
    the engine."""

    def connector(geometry: str, **others: Any) -> dict[str, Any]:
        tiers = [patient_master.tier("0") | {"geometry": geometry}]
        # The model has no weight files, so the engine's id identifies it.
        return config(None, tiers=tiers, **others) | {"engine_id": "geometry"}

    def started(ranks: int, geometry: str, **others: Any) -> Engine:
        folder, options = made("llama", ranks, tmp_path / "model")
        options["env"] |= PATIENT_ENV
        log = tmp_path / f"{ranks}-{geometry}.log"
        engine = Engine(folder, log=log, connector=connector(geometry, **others), **options)
        be_patient(engine)
        return engine

    first, second, third = (prompts(2, seed=seed) for seed in (0, 9, 11))
    with one_store(patient_master), started(2, "own") as two:
        ask_in_turn(two, first)
        by_two = two.kv_snapshot()
        settle(two)
        with started(1, "translate") as one:
            show_read_translated(one, "llama", by_two, first, 1, "mooncake")
            one.reset_prefix_cache()
            ask_in_turn(one, second)
            by_one = {key: block for key, block in one.kv_snapshot().items() if key not in by_two}
            settle(one)
            show_what_came_later(two, one, third[0], "mooncake")
            two.close()
            with started(2, "translate") as again:
                show_read_translated(again, "llama", by_one, second, 2, "mooncake")
            with pytest.raises(EngineError) as error:
                started(2, "translate", chunk_blocks=2)
    text = str(error.value)
    expected = "groups[0].chunk_tokens was 32 (1 blocks of 32) when stored and is 64 (2"
    assert_refused(text, expected, "store")
