"""No hook of vLLM waits for a file system: every system call on files hangs, and the engine
continues.

vLLM's real scheduler with the connector in both roles, real tiers and the real loop thread. The
test watches the thread that stands for vLLM's own: it must end, and must not have made any such
call.
"""

from __future__ import annotations

import _io
import builtins
import fcntl
import io
import logging
import mmap
import os
import posix
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.lora.request import LoRARequest

from offload.connector import guard
from offload.connector.worker import worker_side
from offload.worker import rank_memory
from tests.oracle import serving as oracle_world
from tests.oracle.models import MODELS
from tests.oracle.reports import failed_loads
from tests.oracle.serving import Conditions, OracleEngine
from tests.oracle.test_miss_reasons import PROMPT
from tests.oracle.test_requests_reported import _request
from tests.patience import PATIENCE_S
from tiers.testing.simulated_copy import SimulatedCopyEngine

CALLS = (
    *("access", "chmod", "chown", "copy_file_range", "fchmod", "fdatasync", "fstat", "fstatvfs"),
    *("fsync", "ftruncate", "link", "listdir", "lseek", "lstat", "mkdir", "open", "pread"),
    *("posix_fadvise", "posix_fallocate", "preadv", "pwrite", "pwritev", "read", "readlink"),
    *("readv", "remove", "rename", "replace", "rmdir", "scandir", "sendfile", "stat", "statvfs"),
    *("symlink", "sync", "truncate", "unlink", "utime", "write", "writev"),
)
OTHERS = [
    (builtins, "open"),
    (io, "open"),
    (_io, "open"),
    (_io, "open_code"),
    (_io, "FileIO"),
    (io, "FileIO"),
    (fcntl, "flock"),
    (fcntl, "lockf"),
    (mmap, "mmap"),
]


NOT_CALLED = {
    "explain",  # parts of other hooks
    "build_connector_meta",
    "look_ahead",
    "lookup",
    "request_finished",  # vLLM calls it for connectors that know one group only
    "shutdown",  # not called while vLLM serves
}


class DeadDisk:
    """From now until ``revive``, system calls on files and folders do not return, in any thread.
    ``calls`` records the calls of one thread."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.hung: set[str] = set()
        self._watched: threading.Thread | None = None
        self._back = threading.Event()

    def watch(self, thread: threading.Thread) -> None:
        self._watched = thread

    def revive(self) -> None:
        self._back.set()

    def _dead(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def hang(*arguments: Any, **more: Any) -> Any:
            if threading.current_thread() is self._watched:
                frames = islice(traceback.walk_stack(None), 16)
                where = " < ".join(f"{at.f_code.co_filename}:{line}" for at, line in frames)
                self.calls.append(f"{name}{arguments!r:.200} at {where}")
            self.hung.add(threading.current_thread().name)
            self._back.wait()
            return call(*arguments, **more)

        return hang

    @contextmanager
    def dies(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            # vLLM's handler may still hold the captured output of a test that has ended. The report
            # that logging then prints about its failure contains source lines.
            patch.setattr(logging, "raiseExceptions", False)
            for name in CALLS:
                call = getattr(posix, name, None)
                if call is not None:
                    dead = self._dead(name, call)
                    patch.setattr(posix, name, dead)
                    patch.setattr(os, name, dead)
            for module, name in OTHERS:
                patch.setattr(module, name, self._dead(name, getattr(module, name)))
            try:
                yield
            finally:
                self.revive()


class Served(OracleEngine):
    """A server with the loop's own thread and real tiers."""

    @contextmanager
    def _patched(self) -> Iterator[None]:
        def engine(registration: Any, slab: Any, _: object) -> SimulatedCopyEngine:
            groups, blocks = registration.groups, registration.num_blocks
            return SimulatedCopyEngine(groups, slab, num_blocks=blocks, seed=self.seed)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank_memory, "make_engine", engine)
            patch.setattr(VllmConfig, "use_v2_model_runner", self._conditions.runner == 2)
            yield

    def _start(self) -> None:
        super()._start()
        self.executor.fence = self._fence

    def _turn(self) -> None:
        self.engine.advance(50)

    def ask(self, name: str, prompt: list[int]) -> None:
        self.scheduler.add_request(_request(self, name, prompt, None))

    def serve(self, name: str, prompt: list[int]) -> None:
        self.ask(name, prompt)
        self.until(lambda: name not in self.scheduler.requests)

    def until(self, over: Callable[[], bool]) -> None:
        """Step until a condition is met; the caller limits the time."""
        while not over():
            self.step()
            self.check()


@contextmanager
def opened(folder: Path, **more: Any) -> Iterator[Served]:
    """Two disk tiers and all optional features that write files."""
    make = oracle_world.make_config

    def with_all(*arguments: Any) -> Any:
        config, kv_cache_config = make(*arguments)
        extra = config.kv_transfer_config.kv_connector_extra_config
        extra["tiers"] = [
            {"type": kind, "path": str(folder / kind), "capacity": size, "reserve": 0, **more}
            for kind, size in (("file", "1MiB"), ("lmdb", "16MiB"))
        ]
        extra["load_timeout_s"] = 1
        extra["record_requests"] = str(folder / "requests.jsonl")
        extra["record_trace"] = str(folder / "trace.jsonl")
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        return config, kv_cache_config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle_world, "make_config", with_all)
        with Served(MODELS["full"], Conditions(slots=100), folder, 2) as made:
            yield made


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Served]:
    with opened(tmp_path) as made:
        yield made


@pytest.fixture
def failed(world: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return failed_loads(world.connector, monkeypatch)


def live(world: Served, failed: list[str]) -> None:
    """All hooks that vLLM calls while it serves; loads, stores and resets use the dead disks."""
    connector: Any = world.connector
    world.serve("loads from a disk", PROMPT)
    assert failed, "the disk is dead"
    for number in range(4):
        world.serve(f"stores {number}", [number, *PROMPT])
    adapted = _request(world, "has an adapter", [6, *PROMPT], None)
    adapted.lora_request = LoRARequest("adapter", 1, str(Path(__file__).parent))
    world.scheduler.add_request(adapted)
    world.until(lambda: adapted.request_id not in world.scheduler.requests)
    world.ask("is aborted", [7, *PROMPT])
    world.step()
    world.abort()
    with suppress(RuntimeError):
        world.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert connector.reset_cache() is False
    assert connector.reset_cache() is False, "the second call must not wait again"
    world.serve("after the reset", PROMPT)
    world.worker.unregister_kv_caches()
    world.worker.restore_kv_caches()
    connector.get_kv_connector_stats()
    list(connector.take_events())
    connector.has_pending_push_work()
    connector.has_pending_block_frees()
    lookups = connector.serving.side.lookups
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookups, "look_up", None)  # a fault, which is logged with its location
        world.ask("a hook fails", [8, *PROMPT])
        while "a hook fails" in world.scheduler.requests:
            world.step()
    assert connector.faults.by_hook == {"get_num_new_matched_tokens": 1}
    connector.faults.by_hook.clear()


def while_the_disks_are_dead(world: Served, work: Callable[[], None]) -> DeadDisk:
    """Run this in a thread that stands for vLLM's. The thread must end without having made a system
    call on files."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # raised again in the test's thread
            errors.append(error)

    disk = DeadDisk()
    thread = threading.Thread(target=run, name="vllm", daemon=True)
    disk.watch(thread)
    with disk.dies():
        thread.start()
        thread.join(PATIENCE_S)
        hangs = thread.is_alive()
        disk.revive()
        thread.join(PATIENCE_S)
    assert not disk.calls, "\n".join(disk.calls)
    assert not hangs
    if errors:
        raise errors[0]
    return disk


def stored_on_disk(world: Served) -> None:
    """Prepare a prompt that is on both disks and nowhere else."""
    world.serve("first", PROMPT)
    world.until(lambda: not world.planner.busy)
    world.forget_locally()
    world.planner.cpu.drop(list(world.planner.cpu.resident))
    assert len(world.planner.lower[0]) == len(world.planner.lower[1]) == len(PROMPT) // 4


def test_no_hook_waits_for_a_file_system(world: Served, failed: list[str]) -> None:
    stored_on_disk(world)
    disk = while_the_disks_are_dead(world, lambda: live(world, failed))
    assert any(name.startswith("kvtiers-epoch") for name in disk.hung), disk.hung
    called = {**world.connector.faults.times(), **world.worker.faults.times()}
    missing = {hook for hook in guard.HOOKS if f"hook_calls:{hook}" not in called}
    assert missing == NOT_CALLED, missing
    # The disks are back, and the tiers receive the reset.
    owed: Any = world.connector.serving.resets.epochs
    world.until(lambda: not owed._pending)
    assert all(not queue._is_closed for queue in world.planner.write_through.queues)


def test_no_hook_waits_for_shared_folders(tmp_path: Path) -> None:
    """Lookups query them, writes to them hang, and a reset does not need them."""
    with opened(tmp_path, shared=True) as world:
        world.serve("first", PROMPT)
        world.until(lambda: not world.planner.busy)
        world.forget_locally()
        world.planner.cpu.drop(list(world.planner.cpu.resident))
        world.planner.presence.forget_all()

        owed: Any = world.connector.serving.resets.epochs
        owed.reset = partial(owed.reset, PATIENCE_S)  # its thread may be slow to start

        def work() -> None:
            world.serve("asks", PROMPT)
            assert world.planner.totals()["loaded_tokens:file"] == 0, "the disk is dead"
            world.serve("stores", [3, *PROMPT])
            assert world.connector.reset_cache() is True
            world.serve("after the reset", PROMPT)

        while_the_disks_are_dead(world, work)


def test_shutdown_waits_for_no_file_system(world: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_side, "RANK_CLOSE_TIMEOUT_S", 0.2)
    stored_on_disk(world)

    def end() -> None:
        world.ask("loads from a disk", PROMPT)
        world.step()
        world.worker.shutdown()
        world.connector.shutdown()

    while_the_disks_are_dead(world, end)
