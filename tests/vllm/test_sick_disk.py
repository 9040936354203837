"""Whatever happens to the disk, every request is answered with the right tokens. After a few
failures the tier is not used and costs nothing; it is used again when the disk works."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.worker import executor
from tests.vllm import copy_faults, faults, sick_disk
from tests.vllm.engine import Engine
from tests.vllm.probes import check, totals
from tests.vllm.protocol import Prompt
from tests.vllm.restored import (
    HASH,
    Reference,
    all_were_compared,
    ask_twice,
    config,
    fill,
    planted_faults_are_seen,
    prompts,
    restore_and_verify,
    settle,
)
from tests.vllm.sick_disk import LONG, QUICKLY, SHORT, SLOWLY, tier_state

FAILURES = 3
STALL_S = 0.5
"""Minimum time for which a process is stopped."""


@pytest.fixture(scope="module")
def reference(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference.record(llama, tmp_path_factory.mktemp("ref") / "log", prompts(4))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sick") / "kv"


@pytest.fixture(scope="module")
def engine(llama: Path, reference: Reference, root: Path) -> Iterator[Engine]:
    """A CPU tier that holds only one prompt at a time, so that most hits come from the disk."""
    offload = config(root, cpu="1MiB", breaker_failures=FAILURES, break_even=True)
    with Engine(llama, log=root.with_name("log"), connector=offload, **HASH) as found:
        found.call(sick_disk.retry_soon)
        found.call(sick_disk.compute_at, *SLOWLY)
        fill(found, reference)
        store_again(found, reference)
        yield found


def on_disk(engine: Engine, function: Any, *args: Any) -> Any:
    return engine.call(faults.on_workers, function, *args)


def store_again(engine: Engine, reference: Reference) -> None:
    """Send every prompt and wait until it is on the disk. The CPU tier holds only one prompt. If
    several prompts were sent in a row and the disk did not keep up, some writes would be given up,
    and hits would have other lengths than in the reference."""
    engine.reset_prefix_cache()
    for prompt in reference.prompts:
        engine.generate_one(prompt)
        settle(engine)


def ask_all(engine: Engine, reference: Reference, seed: int) -> int:
    """Send everything again, and something new to store; the answers must be right. Returns how
    many answers were compared."""
    engine.reset_prefix_cache()
    compared = ask_twice(engine, reference)
    for prompt in prompts(2, seed=1000 + seed):
        engine.generate_one(prompt)
    engine.call(check)
    return compared


def ask_while(engine: Engine, reference: Reference, goes_on: Callable[[], bool]) -> None:
    """Send everything again and again, and once more at the end; some answers must have been
    compared. The number of repetitions depends on the speed of this machine, so only pytest's own
    time limit ends it."""
    compared = turn = 0
    while goes_on():
        compared += ask_all(engine, reference, turn)
        turn += 1
    assert compared + ask_all(engine, reference, turn) > 0, "no answer was compared"


def is_shut(engine: Engine, wanted: tuple[bool, bool]) -> bool:
    """True if the disk is read and written at most as expected."""
    readable, writable, _ = engine.call(tier_state)
    return readable <= wanted[0] and writable <= wanted[1]


def ask_until(engine: Engine, reference: Reference, wanted: tuple[bool, bool]) -> None:
    """Send requests until the disk is read and written as expected."""
    ask_while(engine, reference, lambda: engine.call(tier_state)[:2] != wanted)


@pytest.mark.parametrize(
    ("state", "shut"),
    [
        ("hangs", (False, False)),
        pytest.param("fails", (False, False), marks=pytest.mark.thorough),
        ("is full", (True, False)),
        pytest.param("is read-only", (True, False), marks=pytest.mark.thorough),
        pytest.param("crawls", (False, True), marks=pytest.mark.thorough),
    ],
)
def test_a_sick_disk_is_left_out_and_used_again_when_it_works(
    engine: Engine, reference: Reference, state: str, shut: tuple[bool, bool]
) -> None:
    assert engine.call(tier_state)[:2] == (True, True)
    before = engine.call(tier_state)[2]
    on_disk(engine, sick_disk.set_limits, *SHORT)
    engine.call(sick_disk.compute_at, *(QUICKLY if state == "crawls" else SLOWLY))
    on_disk(engine, sick_disk.infect, state)
    ask_while(engine, reference, lambda: not is_shut(engine, shut))
    assert engine.call(tier_state)[2] > before or state == "crawls"
    assert on_disk(engine, sick_disk.disk_calls)[0] > 0, "the fault never occurred"
    on_disk(engine, sick_disk.infect, "well")
    on_disk(engine, sick_disk.set_limits, *LONG)
    engine.call(sick_disk.compute_at, *SLOWLY)
    ask_until(engine, reference, (True, True))
    settle(engine)
    store_again(engine, reference)
    assert restore_and_verify(engine, reference, "lmdb") > 0
    assert ask_all(engine, reference, 600) == len(reference.prompts)


@pytest.mark.parametrize(
    "comes_back", ["as it was", pytest.param("empty", marks=pytest.mark.thorough)]
)
def test_an_unplugged_disk_is_used_again_when_it_is_back(
    engine: Engine, reference: Reference, root: Path, comes_back: str
) -> None:
    """The folder disappears under the open tier and cannot be replaced (as at a mount point without
    its disk), and later it returns."""
    elsewhere = root.with_name("elsewhere")
    settle(engine)
    dropped = engine.call(totals)["dropped_chunks:lmdb"]
    root.rename(elsewhere)
    root.touch()
    ask_while(engine, reference, lambda: engine.call(tier_state)[1])
    root.unlink()
    if comes_back == "empty":
        shutil.rmtree(elsewhere)
        root.mkdir(mode=0o700)
    else:
        elsewhere.rename(root)
    ask_until(engine, reference, (True, True))
    ask_all(engine, reference, 500)  # lost chunks are stored once more
    settle(engine)
    store_again(engine, reference)
    assert restore_and_verify(engine, reference, "lmdb") > 0
    assert ask_all(engine, reference, 600) == len(reference.prompts)
    has_lost = engine.call(totals)["dropped_chunks:lmdb"] > dropped
    assert has_lost == (comes_back == "empty"), "the records of the returned disk are there"


def has_begun_to_copy(llm: Any) -> bool:
    return bool(faults.on_workers(llm, copy_faults.held_loads)[0])


def set_stall(_worker: Any, seconds: float) -> None:
    """Set for how long the executor's loop may give no sign of life."""
    executor.LOOP_STALL_S = seconds


def copies_or_is_answered(llm: Any) -> bool:
    return has_begun_to_copy(llm) or not llm.llm_engine.has_unfinished_requests()


def submit_until_it_copies(engine: Engine, prompt: Prompt) -> str:
    """Submit a prompt whose load is held while it copies; return its name. On a slow machine a load
    may be too late to copy at all; then the prompt is sent again."""
    for turn in itertools.count():
        engine.submit(name := f"late{turn}", prompt, max_tokens=8)
        engine.step_until(copies_or_is_answered)
        if engine.call(has_begun_to_copy):
            return name
        engine.reset_prefix_cache()
    raise AssertionError  # not reached


def blocks_of_requests(llm: Any) -> dict[str, set[int]]:
    """GPU blocks by the first word of the request's name."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    return {
        name.partition("-")[0]: set(manager.get_block_ids(name)[0]) for name in scheduler.requests
    }


@pytest.mark.thorough
def test_a_stopped_process_frees_no_block_during_a_copy(
    engine: Engine, reference: Reference
) -> None:
    """SIGSTOP for longer than a load may take, with a copy under way: the request is not reported
    as finished, and no other request gets its blocks, until the copy has ended."""
    settle(engine)
    engine.reset_prefix_cache()
    on_disk(engine, sick_disk.set_limits, SHORT[0], LONG[1])
    on_disk(engine, set_stall, STALL_S)
    on_disk(engine, copy_faults.hold_loads)
    late = submit_until_it_copies(engine, reference.prompts[0])
    held = engine.call(blocks_of_requests)[late]
    os.kill(engine.pid, signal.SIGSTOP)
    time.sleep(SHORT[0] + STALL_S + 0.1)
    os.kill(engine.pid, signal.SIGCONT)
    failures = engine.call(totals)["load_failures"]
    for number, prompt in enumerate(prompts(12, seed=77)):
        engine.submit(f"other{number}", prompt, max_tokens=8)
    finished: list[str] = []
    for _ in range(80):
        finished += engine.step()
        owners = engine.call(blocks_of_requests)
        assert late in owners
        for name, blocks in owners.items():
            assert name == late or held.isdisjoint(blocks), (
                "another request's blocks are overwritten"
            )
    assert finished, "other requests must be served meanwhile"
    on_disk(engine, copy_faults.release_loads)
    answers = engine.run_until_finished()
    assert engine.call(totals)["load_failures"] > failures
    # which one depends on the requests computed beside it
    assert len(answers[late].tokens) == 8
    on_disk(engine, sick_disk.set_limits, *LONG)
    on_disk(engine, set_stall, executor.LOOP_STALL_S)
    ask_until(engine, reference, (True, True))
    settle(engine)
    store_again(engine, reference)
    assert restore_and_verify(engine, reference, "lmdb") > 0


def test_planted_faults_are_detected_after_all_that(engine: Engine, reference: Reference) -> None:
    assert all_were_compared(engine)
    planted_faults_are_seen(engine, reference, "lmdb")
