"""Real vLLM engines for tests, each in its own process that can be started, killed and restarted.

    with Engine(model, log=tmp_path / "log", connector={...}) as engine:
        answers = engine.generate([prompt], max_tokens=8)
        engine.kill()

An engine with this project's connector runs with ``"verify": "device"``. When it is closed, every
loaded chunk must have been compared with the computed one and found equal (`tests.vllm.verified`).
If chunks were loaded but none was compared, that is a failure, too.

An engine runs vLLM in one process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``; with tensor parallel size
2 the ranks are separate processes), so the scheduler can be stepped and inspected. Every wait has a
deadline; when something fails, the exception carries the engine's log.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.patience import PATIENCE_S
from tests.vllm import verified
from tests.vllm.protocol import Answer, Call, Generation, Prompt, StartEngine
from tests.vllm.verified import Verified

ROOT = Path(__file__).resolve().parents[2]
LOG_CHARS = 60_000
GRACE_S = 30.0
"""Time after which an engine process itself reports that it has waited too long."""

BASE_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",  # exact repeats
    "TORCHDYNAMO_DISABLE": "1",  # no compiling of the sampler, which takes 3 s
    "NUMBA_THREADING_LAYER": "workqueue",  # n-gram drafts, whose threads would slow torch's
    "TRITON_INTERPRET": "1",  # for tests.vllm.interpreted; nothing else uses Triton on a CPU
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": str(ROOT),
}

DEFAULTS: dict[str, Any] = {
    "enforce_eager": True,
    "block_size": 32,
    "kv_cache_memory_bytes": 8 << 20,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "disable_log_stats": False,
    "enable_prefix_caching": True,
    "worker_extension_cls": "tests.vllm.worker_extension.KvBytes",
}


DTYPE = {"dtype": dtype} if (dtype := os.environ.get("KVTIERS_TEST_DTYPE")) else {}


def transfer_config(extra: dict[str, Any], **others: Any) -> dict[str, Any]:
    """The ``--kv-transfer-config`` of this project's connector with this extra configuration."""
    return {
        "kv_connector": "OffloadConnector",
        "kv_connector_module_path": "offload.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    } | others


class EngineError(AssertionError):
    """The engine process failed, ended or was too slow; the message contains its log."""


class Engine:
    """One engine process. ``connector`` is the whole ``kv_transfer_config``, or None.

    Other keyword arguments are passed to ``vllm.LLM`` and override ``DEFAULTS``. Raises
    ``EngineError``.

    A test that plants faults in loads adds the differences that were found to
    ``planted_differences``, or sets ``may_differ``. A test whose chunks come from an engine with
    other digests sets ``may_be_unknown``.
    """

    may_differ = False
    may_be_unknown = False
    planted_differences = 0

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        connector: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        **engine_kwargs: Any,
    ) -> None:
        self.log_path = log
        kwargs = DEFAULTS | DTYPE | {"model": str(model)} | engine_kwargs
        if connector is not None:
            connector = verified.added(connector, log.parent / "digests")
            kwargs["kv_transfer_config"] = connector
        self._verifies = connector is not None
        extra = {"VLLM_CPU_SIM_MULTI_NUMA": "1"} if kwargs.get("tensor_parallel_size") else {}
        order = StartEngine(extra | (env or {}), kwargs)
        with log.open("ab") as log_file:
            self._connection, self.pid = _nursery().start(order, log_file.fileno())
        self._alive = True
        self.geometry: dict[str, Any] = self._receive("start")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def generate(self, prompts: list[Prompt], **sampling: Any) -> list[Generation]:
        """Greedy answers to all prompts, in flight together (``max_tokens``, ``logprobs``)."""
        return self.ask("generate", prompts, **sampling)

    def generate_one(self, prompt: Prompt, **sampling: Any) -> Generation:
        """The greedy answer to one prompt."""
        return self.generate([prompt], **sampling)[0]

    def submit(self, request_id: str, prompt: Prompt, **sampling: Any) -> None:
        """Add a request without running it."""
        self.ask("submit", request_id, prompt, **sampling)

    def step(self, times: int = 1) -> list[str]:
        """Run engine steps; returns the ids of the requests that finished."""
        return self.ask("step", times)

    def step_until(self, condition: Callable[..., bool], *args: Any) -> None:
        """Step until ``condition(llm, *args)`` holds in the engine process."""
        self.ask("step_until", condition, *args)

    def run_until_finished(self) -> dict[str, Generation]:
        """Step until no submitted request is left; return all answers so far by request id."""
        return self.ask("run_until_finished")

    def abort(self, *request_ids: str) -> None:
        """Abort submitted requests."""
        self.ask("abort", list(request_ids))

    def states(self) -> dict[str, str]:
        """The scheduler's state of each request that it knows."""
        return self.ask("states")

    def reset_prefix_cache(self, connector: bool = False) -> None:
        """Reset vLLM's own prefix cache and, with ``connector``, the connector's tiers as well.
        While blocks are still held or a disk is busy, steps until both have emptied their
        caches."""
        self.ask("reset_prefix_cache", connector)

    def try_to_reset(self, connector: bool = False) -> bool:
        """Try the same once; return vLLM's answer."""
        return self.ask("try_to_reset", connector)

    def metrics(self) -> dict[str, float]:
        """Counters and gauges as ``name{label="value"}``."""
        return self.ask("metrics")

    def cached_blocks(self) -> dict[bytes, int]:
        """Block id for each key in vLLM's own prefix cache."""
        return self.ask("cached_blocks")

    def kv_snapshot(self) -> dict[bytes, tuple[bytes, ...]]:
        """The bytes of each block in vLLM's prefix cache, by key; one item for each rank."""
        return self.ask("kv_snapshot")

    def plant_blocks(self, content: dict[bytes, tuple[bytes, ...]]) -> None:
        """Overwrite blocks in vLLM's prefix cache, by key; one item for each rank."""
        self.ask("plant_blocks", content)

    def fill_blocks(self, blocks: dict[int, list[int]], value: int = 0) -> None:
        """Overwrite blocks (group -> block ids) on every rank: a planted fault."""
        self.ask("fill_blocks", blocks, value)

    def swap_blocks(self, group: int, first: int, second: int) -> None:
        """Exchange two blocks on every rank: a planted fault."""
        self.ask("swap_blocks", group, first, second)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(llm, *args)`` in the engine process. The function must be importable (a
        module-level function of a test file is)."""
        return self.ask("call", function, *args)

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of ``EngineHost``; raise ``EngineError``, for example if no answer
        comes."""
        try:
            self._connection.send(Call(method, args, kwargs))
        except OSError as error:
            raise self._failure(f"{method}: the engine process is gone") from error
        return self._receive(method)

    def close(self) -> None:
        """Shut down as vLLM does, and check that the whole process group ended."""
        if not self._alive:
            return
        try:
            self._check_loads()
            self.ask("close")
            self._wait_for_end()
        except EngineError:
            self.kill()
            raise
        self._alive = False
        self._connection.close()

    def verified(self) -> Verified:
        """The results of ``verify`` so far, on all ranks."""
        return self.call(verified.count)

    def _check_loads(self) -> None:
        if not self._verifies:
            return
        found = self.verified()
        if found.broken:
            raise self._failure(f"the comparison of loads has ended with an error: {found}")
        if found.different != self.planted_differences and not self.may_differ:
            raise self._failure(f"loaded chunks are not what was computed: {found}")
        if found.unknown and not self.may_be_unknown:
            raise self._failure(f"loaded chunks could not be compared: {found}")
        if found.loaded_tokens and not (found.equal or found.different or found.unknown):
            raise self._failure(f"tokens were loaded and nothing was compared: {found}")

    def shared_memory(self) -> set[Path]:
        """Files of ``/dev/shm`` that the engine's processes have mapped, or have open."""
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended
                if os.getpgid(int(folder.name)) != self.pid:
                    continue
                names = re.findall(r"/dev/shm/\S+", (folder / "maps").read_text())
                names += [os.readlink(fd) for fd in (folder / "fd").iterdir()]
                found |= {Path(name) for name in names if name.startswith("/dev/shm/")}
        return found

    def kill(self) -> None:
        """Send SIGKILL to the engine and everything it started, and wait until they are gone."""
        if not self._alive:
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self.pid, signal.SIGKILL)
        self._wait_for_end()
        self._alive = False
        self._connection.close()

    def log(self) -> str:
        """The end of the engine's log."""
        return self.whole_log()[-LOG_CHARS:]

    def whole_log(self) -> str:
        """The engine's log."""
        return self.log_path.read_text(errors="replace")

    def _receive(self, what: str) -> Any:
        try:
            if not self._connection.poll(PATIENCE_S + GRACE_S):
                os.kill(self.pid, signal.SIGUSR1)  # every thread's stack goes into the log
                time.sleep(1.0)
                failure = self._failure(f"{what}: no answer in {PATIENCE_S + GRACE_S} s")
                self.kill()
                raise failure
            answer: Answer = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._failure(f"{what}: the engine process ended") from error
        if answer.error is not None:
            raise self._failure(f"{what}:\n{answer.error}")
        return answer.value

    def _failure(self, text: str) -> EngineError:
        return EngineError(f"{text}\n--- log of the engine ({self.log_path}) ---\n{self.log()}")

    def _wait_for_end(self) -> None:
        """Wait until no process of the group is left; this polls, because they are not our
        children."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return
            if time.monotonic() > end:
                raise self._failure(f"processes of the engine are left after {PATIENCE_S} s")
            time.sleep(0.02)


class _Nursery:
    """The process that imports vLLM once and forks the engines."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [sys.executable, "-m", "tests.vllm.engine_process", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | BASE_ENV,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._control.settimeout(PATIENCE_S)
        if self._control.recv(16) != b"ready":
            raise EngineError("vLLM could not be imported; see the output above")

    def start(self, order: StartEngine, log_fd: int) -> tuple[Connection, int]:
        """Fork an engine; return our end of its connection and its process id."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            socket.send_fds(self._control, [pickle.dumps(order)], [theirs.fileno(), log_fd])
        pid = int.from_bytes(self._control.recv(8), "big")
        return Connection(ours.detach()), pid

    def close(self) -> None:
        """Let the process end, which it does when its control socket closes."""
        self._control.close()
        self._process.wait(timeout=PATIENCE_S)


_shared_nursery: _Nursery | None = None


def _nursery() -> _Nursery:
    global _shared_nursery
    if _shared_nursery is None:
        _shared_nursery = _Nursery()
        atexit.register(close_nursery)
    return _shared_nursery


def close_nursery() -> None:
    """End the shared nursery; the next engine starts a new one."""
    global _shared_nursery
    if _shared_nursery is not None:
        _shared_nursery.close()
        _shared_nursery = None
