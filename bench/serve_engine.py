"""A real vLLM engine in a separate process, for ``bench serve``, ``backlog`` and ``replay``.

All of vLLM runs in that process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``), which also calls its steps.
By default vLLM's CPU platform runs the worker in another process that polls for its next step, and
gives servers with a connector a different number of cores: the benchmark would measure these two
effects instead of offloading.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from offload.connector.vllm_cli import add_missing_version
from tiers.copy.host_loop import copy_loop

ROOT = Path(__file__).resolve().parents[1]
START_DEADLINE_S = 300.0
CALL_DEADLINE_S = 300.0
PINNED_S = 150.0
PUBLISHED_S = 1.1
"""Longer than the time between two publications of the times of hooks, which is about 1 s."""
SETTLE_S = 20.0
IDLE_S = 0.001
"""Pause between the steps of an engine without requests."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h
BASE_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request would compile the sampler
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
}
COUNTED = ("vllm:prompt_tokens_by_source", "vllm:kvtiers_")
"""Counters whose increase a batch reports."""
VLLM_LABELS = ("engine", "model_name")

Prompts = Sequence[Sequence[int]]


class EngineError(Exception):
    """Raised if the engine did not start or did not answer. The message is the first line of the
    reason."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The measurements of a batch of requests. ``seconds`` is the time until the last token. The
    CPU time of the engine and all its processes also covers the work after that. ``other_cpu_s``
    is the CPU time of other processes during the batch, of which the other engines used
    ``waiting_cpu_s``. ``thread_cpu_s`` is the CPU time of this project's threads. ``held_block_s``
    is the sum, over all GPU blocks, of the seconds for which a request held the block while it
    waited for a load."""

    seconds: float
    ttft_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    counters: dict[str, float]
    cpu_s: float = 0.0
    other_cpu_s: float = 0.0
    waiting_cpu_s: float = 0.0
    thread_cpu_s: float = 0.0
    held_block_s: float = 0.0

    @property
    def restored(self) -> float:
        """The number of prompt tokens loaded from outside, by vLLM's own count."""
        return self._source("external_kv_transfer")

    @property
    def gpu_hits(self) -> float:
        """The number of prompt tokens from vLLM's own prefix cache."""
        return self._source("local_cache_hit")

    def loaded_from(self, tier: str) -> float:
        """The number of prompt tokens from kvtiers' tiers."""
        return self.counters.get(f'vllm:kvtiers_loaded_tokens{{tier="{tier}"}}', 0.0)

    def read_from(self, tier: str) -> float:
        """The bytes that kvtiers read from a lower tier."""
        return self.counters.get(f'vllm:kvtiers_read_bytes{{tier="{tier}"}}', 0.0)

    def ahead(self, what: str) -> float:
        """The bytes that look-ahead has ``read``, or has ``wasted``."""
        return self.counters.get(f"vllm:kvtiers_ahead_{what}_bytes", 0.0)

    @property
    def hook_s(self) -> float:
        """Seconds spent in kvtiers' hooks on vLLM's threads; published about once a second."""
        hooks = "vllm:kvtiers_hook_seconds{"
        return sum(value for name, value in self.counters.items() if name.startswith(hooks))

    def _source(self, name: str) -> float:
        return self.counters.get(f'vllm:prompt_tokens_by_source{{source="{name}"}}', 0.0)


class Engine:
    """The parent's side. To start several engines concurrently, construct all of them, then
    ``wait`` for each. All methods may raise ``EngineError``."""

    def __init__(self, arguments: dict[str, Any], env: dict[str, str], log: Path) -> None:
        self.log = log
        self._is_busy = True  # it has not answered the last request, or has not started
        self._connection, theirs = Pipe()
        code = "from bench.serve_engine import child; child()"
        command = [sys.executable, "-c", code, str(theirs.fileno()), json.dumps(arguments)]
        with log.open("wb") as log_file, theirs:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | BASE_ENV | env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until the engine has started."""
        self._receive(START_DEADLINE_S)

    @property
    def process(self) -> int:
        """The id of the engine's process."""
        return self._process.pid

    def reset(self) -> None:
        """Empty vLLM's own prefix cache."""
        self._call("reset")

    def empty_cpu_tier(self, chunks_below: int) -> None:
        """Evict everything from kvtiers' CPU tier; the first tier below must hold this many
        chunks."""
        self._call("empty_cpu_tier", chunks_below)

    def run(self, prompts: Prompts, output_tokens: int, in_flight: int) -> Batch:
        """Let the engine answer these prompts, ``in_flight`` at a time, and wait for the resulting
        transfers."""
        return self._measured("run", prompts, output_tokens, in_flight)

    def replay(
        self, prompts: Prompts, output_tokens: Sequence[int], arrivals_s: Sequence[float]
    ) -> Batch:
        """Send each prompt at its arrival time, however many are being answered, and measure its
        time to first token from then on."""
        deadline_s = arrivals_s[-1] + CALL_DEADLINE_S
        return self._measured("replay", prompts, output_tokens, arrivals_s, deadline_s=deadline_s)

    def cpu_s(self) -> float:
        """CPU seconds used so far by the engine's process and all its descendants."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # the process has ended
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self._process.pid:  # proc(5): pgrp; utime, stime
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def complaint(self) -> str:
        """The first line of the log that names an error."""
        text = re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text(errors="replace"))
        lines = re.findall(r"^\w*(?:Error|Exception): .*$", text, re.MULTILINE)
        lines += re.findall(r"^.*\bERROR\b.*$", text, re.MULTILINE)
        return lines[0] if lines else "it names no error"

    def close(self) -> None:
        """End the engine and all processes that it started. Does not wait for an engine that is
        still busy because the benchmark was interrupted."""
        if not self._is_busy:
            with contextlib.suppress(EngineError):
                self._call("close")
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _measured(self, method: str, *arguments: Any, deadline_s: float = CALL_DEADLINE_S) -> Batch:
        before = self.cpu_s(), busy_s()
        batch: Batch = self._call(method, *arguments, deadline_s=deadline_s)
        own = self.cpu_s() - before[0]
        others = max(0.0, busy_s() - before[1] - own)
        return replace(batch, cpu_s=own, other_cpu_s=others)

    def _call(self, method: str, *arguments: Any, deadline_s: float = CALL_DEADLINE_S) -> Any:
        self._is_busy = True
        try:
            self._connection.send((method, arguments))
        except OSError as error:
            raise EngineError(self._end()) from error
        return self._receive(deadline_s)

    def _receive(self, deadline_s: float) -> Any:
        try:
            if not self._connection.poll(deadline_s):
                raise EngineError(f"no answer in {deadline_s:.0f} s")
            error, value = self._connection.recv()
        except (EOFError, OSError):
            raise EngineError(self._end()) from None
        self._is_busy = False
        if error:
            raise EngineError(error)
        return value

    def _end(self) -> str:
        """Describe how an engine ended that sent no message."""
        code = self._process.wait()
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"the process ended with {code}: {lines[-1] if lines else 'no output'}"


def busy_s() -> float:
    """Total busy time of all cores since the machine started, in seconds, including time stolen by
    its host."""
    with open("/proc/stat", encoding="ascii") as file:  # proc(5): user nice system idle iowait ...
        ticks = [int(field) for field in file.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def own_threads() -> dict[int, float]:
    """The CPU time so far, in seconds, of each of this project's threads in this process."""
    found = {}
    for thread in threading.enumerate():
        if thread.name.startswith(("kvtiers-", "tier-")) and thread.ident is not None:
            with contextlib.suppress(OSError):  # the thread has just ended
                clock = time.pthread_getcpuclockid(thread.ident)
                found[thread.ident] = time.clock_gettime(clock)
    return found


def wait_until_pinned(_worker: Any) -> bool:
    """Wait until the whole CPU tier of a worker can be used. kvtiers pins it in the background;
    vLLM's own offloading does so before it starts. Returns False on timeout."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    from offload.connector.connector import KvTiersConnector

    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    return not isinstance(group, KvTiersConnector) or group.wait_until_pinned(PINNED_S)


class Arrivals:
    """Decides when each request is sent: at its time, or, without times, as soon as fewer than
    ``in_flight`` requests are being answered. All times are in seconds since the first one."""

    def __init__(
        self, count: int, in_flight: int = 0, times_s: Sequence[float] | None = None
    ) -> None:
        self._count = count
        self._in_flight = in_flight
        self._times_s = times_s
        self._sent = 0

    def __bool__(self) -> bool:
        """True if requests are still to be sent."""
        return self._sent < self._count

    def due(self, now_s: float, flying: int) -> tuple[int, float] | None:
        """The next request to send and its arrival time, or None if it is too early. ``flying``
        requests are being answered."""
        if not self:
            return None
        if self._times_s is None:
            is_due, arrived_s = flying < self._in_flight, now_s
        else:
            arrived_s = self._times_s[self._sent]
            is_due = arrived_s <= now_s
        if not is_due:
            return None
        self._sent += 1
        return self._sent - 1, arrived_s


class _HeldBlocks:
    """Adds up the time for which GPU blocks are held by requests that wait for a load. Looks at
    vLLM's scheduler after each step, because these blocks change only in steps."""

    def __init__(self, scheduler: Any) -> None:
        self.block_s = 0.0
        self._scheduler = scheduler
        self._blocks = 0
        self._since = time.perf_counter()

    def observe(self) -> None:
        """Add the time since the last call for the blocks that were held at that call."""
        from vllm.v1.request import RequestStatus

        now = time.perf_counter()
        self.block_s += self._blocks * (now - self._since)
        self._since = now
        manager = self._scheduler.kv_cache_manager
        self._blocks = sum(
            len(table)
            for name, request in self._scheduler.requests.items()
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            for table in manager.get_block_ids(name)
        )


class _Host:
    """The child's side, which owns the engine."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        add_missing_version()
        # Without this, LMCache's import of numba would prevent vLLM's CPU worker from starting; see
        # tiers/copy/host_loop.py. This is done for all systems.
        copy_loop()
        from vllm import LLM

        self._llm = LLM(**arguments)
        if not all(self._llm.collective_rpc(wait_until_pinned)):
            raise TimeoutError(f"the CPU tier was not pinned after {PINNED_S:.0f} s")
        self._engine = self._llm.llm_engine
        self._names = 0

    def reset(self) -> None:
        end = time.monotonic() + SETTLE_S
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > end:
                raise TimeoutError("vLLM's prefix cache cannot be reset: blocks are still held")
            self._engine.step()

    def empty_cpu_tier(self, chunks_below: int) -> None:
        planner = self._engine.engine_core.engine_core.scheduler.connector.serving.side.planner
        cpu, below = planner.cpu, planner.lower[0]
        cpu.evict(cpu.space.used)
        if len(cpu) or len(below) < chunks_below:
            raise RuntimeError(
                f"the CPU tier has {len(cpu)} chunks that cannot be evicted, and the tier below "
                f"{len(below)} of {chunks_below}"
            )

    def run(self, prompts: Prompts, output_tokens: int, in_flight: int) -> Batch:
        answers = [output_tokens] * len(prompts)
        return self._serve(prompts, answers, Arrivals(len(prompts), in_flight))

    def replay(
        self, prompts: Prompts, output_tokens: Sequence[int], arrivals_s: Sequence[float]
    ) -> Batch:
        return self._serve(prompts, output_tokens, Arrivals(len(prompts), times_s=arrivals_s))

    def _serve(self, prompts: Prompts, answers: Sequence[int], arrivals: Arrivals) -> Batch:
        held = _HeldBlocks(self._engine.engine_core.engine_core.scheduler)
        arrived: dict[str, float] = {}
        first: dict[str, float] = {}
        flying = 0
        before, own = self._counters(), own_threads()
        began = time.perf_counter()
        while arrivals or flying:
            while due := arrivals.due(time.perf_counter() - began, flying):
                number, at = due
                arrived[self._send(prompts[number], answers[number])] = at
                flying += 1
            if not flying:
                time.sleep(IDLE_S)
            for output in self._engine.step():
                if output.outputs[0].token_ids:
                    first.setdefault(output.request_id, time.perf_counter() - began)
                flying -= bool(output.finished)
            held.observe()
        seconds = time.perf_counter() - began
        self._settle()
        after = self._counters()
        return Batch(
            seconds,
            tuple(first[name] - at for name, at in arrived.items()),
            sum(map(len, prompts)),
            sum(answers),
            {name: value - before.get(name, 0.0) for name, value in after.items()},
            thread_cpu_s=sum(cpu - own.get(name, 0.0) for name, cpu in own_threads().items()),
            held_block_s=held.block_s,
        )

    def _send(self, prompt: Sequence[int], output_tokens: int) -> str:
        """Add a request to the engine, and return its name."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        self._names += 1
        name = str(self._names)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    def _settle(self) -> None:
        """Step until transfers have ended, as an idle server would, and until the metrics include
        them."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        end = time.monotonic() + SETTLE_S
        while scheduler.has_requests() and time.monotonic() < end:
            self._engine.step()
        time.sleep(PUBLISHED_S)
        # workers report to the scheduler side, which publishes the metrics in the next step
        for _ in range(2):
            self._engine.step()

    def _counters(self) -> dict[str, float]:
        """Values by name and labels. Reads the registry, because vLLM's own reader truncates
        fractions."""
        found = {}
        for metric in REGISTRY.collect():
            if metric.type == "counter" and metric.name.startswith(COUNTED):
                for sample in metric.samples:
                    own = {k: v for k, v in sample.labels.items() if k not in VLLM_LABELS}
                    labels = ",".join(f'{k}="{v}"' for k, v in sorted(own.items()))
                    if sample.name.endswith("_total"):
                        found[f"{metric.name}{{{labels}}}" if labels else metric.name] = (
                            sample.value
                        )
        return found

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def serve(connection: Connection, arguments: dict[str, Any]) -> None:
    """Build the engine and answer requests until the parent requests the end or has ended
    itself."""
    try:
        host = _Host(arguments)
    except Exception as error:  # the parent shows any error in its table
        traceback.print_exc()
        connection.send((first_line(error), None))
        return
    connection.send(("", None))
    method = ""
    while method != "close":
        try:
            method, rest = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("", getattr(host, method)(*rest)))
        except Exception as error:  # the parent decides when to end
            traceback.print_exc()
            connection.send((first_line(error), None))


def first_line(error: BaseException) -> str:
    """The first line of an exception's text."""
    return (str(error).strip() or repr(error)).splitlines()[0]


def child() -> None:
    """The main function of the engine's process, which ends with its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    serve(Connection(int(sys.argv[1])), json.loads(sys.argv[2]))
