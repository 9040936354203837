"""The process side of ``engine.Engine``: a nursery that imports vLLM once and forks engines.

Importing vLLM takes four fifths of the start of an engine. The nursery (``python -m
tests.vllm.engine_process FD``) imports it once per test session and then forks one process for each
engine on request, before any thread was started. An engine process has its own session and process
group, so that the test can kill it with everything it started, and it ends by itself when the test
process is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests import model_runner, processor
from tests.models.inspection import inspect_models_here
from tests.patience import PATIENCE_S
from tests.vllm.interpreted import interpret_state_kernels
from tests.vllm.protocol import Answer, Call, Generation, Prompt, StartEngine

MAX_ORDER_BYTES = 1 << 20
PRELOADED = (
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "offload.connector.connector",
    "offload.worker.block_verifier",
)
"""Modules that most engines need."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h; an engine that spins would never notice that its test is gone


class EngineHost:
    """Owns one in-process ``vllm.LLM``; the test can call each public method."""

    def __init__(self, engine_kwargs: dict[str, Any]) -> None:
        from vllm import LLM

        _fork_ranks()
        inspect_models_here()
        if os.environ.get("KVTEST_KEEP_PREFIX_CACHING"):
            _keep_prefix_caching()
        if engine_kwargs.get("speculative_config") and not model_runner.IS_V2:
            interpret_state_kernels()
        self.llm = LLM(**engine_kwargs)
        self._finished: dict[str, Generation] = {}
        self._names: dict[str, str] = {}

    def describe(self) -> dict[str, Any]:
        """Geometry of the KV cache: number of blocks, hash block, and kind of each group."""
        config = self._scheduler.kv_cache_config
        groups = [
            {
                "kind": type(group.kv_cache_spec).__name__,
                "block_size": group.kv_cache_spec.block_size,
                "page_bytes": group.kv_cache_spec.page_size_bytes,
                "layers": list(group.layer_names),
            }
            for group in config.kv_cache_groups
        ]
        hash_block = getattr(config, "hash_block_size", None)
        return {"num_blocks": config.num_blocks, "hash_block_size": hash_block, "groups": groups}

    def generate(self, prompts: list[Prompt], **sampling: Any) -> list[Generation]:
        """Answer all prompts, in flight together."""
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(inputs, _sampling(**sampling), use_tqdm=False)
        return [_generation(output) for output in outputs]

    def submit(self, request_id: str, prompt: Prompt, **sampling: Any) -> None:
        """Add a request without running it; ``step`` advances it."""
        engine = self.llm.llm_engine
        inputs = {"prompt_token_ids": prompt}
        internal = engine.add_request(request_id, inputs, _sampling(**sampling))
        self._names[request_id] = internal if isinstance(internal, str) else request_id

    def step(self, times: int = 1) -> list[str]:
        """Run engine steps, even when no request is unfinished (the connector may have work).
        Returns the request ids that finished."""
        finished = []
        for _ in range(times):
            for output in self.llm.llm_engine.step():
                if output.finished:
                    self._finished[output.request_id] = _generation(output)
                    finished.append(output.request_id)
        return finished

    def run_until_finished(self) -> dict[str, Generation]:
        """Step until no submitted request is left; raises ``TimeoutError``."""
        end = time.monotonic() + PATIENCE_S
        while self.llm.llm_engine.has_unfinished_requests():
            self.step()
            if time.monotonic() > end:
                raise TimeoutError(f"requests unfinished after {PATIENCE_S} s: {self.states()}")
        return dict(self._finished)

    def step_until(self, condition: Callable[..., bool], *args: Any) -> None:
        """Step until ``condition(llm, *args)`` holds; raises ``TimeoutError``."""
        end = time.monotonic() + PATIENCE_S
        while not condition(self.llm, *args):
            self.step()
            if time.monotonic() > end:
                raise TimeoutError(f"{condition} not reached in {PATIENCE_S} s: {self.states()}")

    def abort(self, request_ids: list[str]) -> None:
        """Abort submitted requests."""
        internal = [self._names.get(name, name) for name in request_ids]
        self.llm.llm_engine.abort_request(internal, internal=True)

    def states(self) -> dict[str, str]:
        """The scheduler's state of each request that it knows."""
        return {name: r.status.name for name, r in self._scheduler.requests.items()}

    def reset_prefix_cache(self, connector: bool = False) -> None:
        """Empty vLLM's own prefix cache; with ``connector`` also what the connector keeps. Steps
        until both have done so; raises ``TimeoutError``."""
        self.step_until(_is_reset, connector)

    def try_to_reset(self, connector: bool = False) -> bool:
        """Try the same once; return vLLM's answer."""
        return _is_reset(self.llm, connector)

    def metrics(self) -> dict[str, float]:
        """Counters and gauges as ``name{label="value"}``, without the labels of the engine."""
        found = {}
        for metric in self.llm.get_metrics():
            if hasattr(metric, "value"):
                own = {k: v for k, v in metric.labels.items() if k not in ("engine", "model_name")}
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(own.items()))
                found[f"{metric.name}{{{labels}}}" if labels else metric.name] = metric.value
        return found

    def cached_blocks(self) -> dict[bytes, int]:
        """Block id for each key (block hash + group id) in vLLM's own prefix cache."""
        table = self._scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        keys = list(table._cache)
        return {bytes(key): table.get_one_block(key).block_id for key in keys}

    def kv_snapshot(self) -> dict[bytes, tuple[bytes, ...]]:
        """The bytes of every block in vLLM's prefix cache, by key; one item for each rank."""
        by_group: dict[int, list[tuple[bytes, int]]] = {}
        for key, block in self.cached_blocks().items():
            by_group.setdefault(int.from_bytes(key[-4:], "big"), []).append((key, block))
        blocks = {group: [block for _, block in pairs] for group, pairs in by_group.items()}
        ranks = self.llm.collective_rpc("kvtest_read", args=(blocks,))
        return {
            key: tuple(rank[group][index] for rank in ranks)
            for group, pairs in by_group.items()
            for index, (key, _) in enumerate(pairs)
        }

    def plant_blocks(self, content: dict[bytes, tuple[bytes, ...]]) -> None:
        """Overwrite blocks in vLLM's prefix cache, by key; one item for each rank."""
        ranks = range(len(next(iter(content.values()))))
        places = [(key, block) for key, block in self.cached_blocks().items() if key in content]
        planted: list[dict[int, dict[int, bytes]]] = [{} for _ in ranks]
        for key, block in places:
            for rank, data in enumerate(content[key]):
                planted[rank].setdefault(int.from_bytes(key[-4:], "big"), {})[block] = data
        self.llm.collective_rpc("kvtest_plant", args=(planted,))

    def fill_blocks(self, blocks: dict[int, list[int]], value: int = 0) -> None:
        """Overwrite blocks on every rank: a planted fault."""
        self.llm.collective_rpc("kvtest_fill", args=(blocks, value))

    def swap_blocks(self, group: int, first: int, second: int) -> None:
        """Exchange two blocks on every rank: a planted fault."""
        self.llm.collective_rpc("kvtest_swap", args=(group, first, second))

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(llm, *args)`` here; it must be importable, its result picklable."""
        return function(self.llm, *args)

    def close(self) -> None:
        """Shut the engine down the way vLLM does."""
        self.llm.llm_engine.engine_core.shutdown()

    @property
    def _scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler


def _is_reset(llm: Any, connector: bool) -> bool:
    return bool(llm.reset_prefix_cache(reset_connector=connector))


def _fork_ranks() -> None:
    """Let the ranks of a tensor parallel engine be forked, as vLLM does by default on other
    platforms. Its CPU platform insists on new interpreters, which take 30 s to import vLLM."""
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def _keep_prefix_caching() -> None:
    """Give MLA models vLLM's own prefix cache, as the reference for ours. The CPU platform turns it
    off on processors without AMX, although it works there too."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_keep(config: Any) -> None:
        wanted = config.cache_config.enable_prefix_caching
        check(config)
        config.cache_config.enable_prefix_caching = wanted

    CpuPlatform.check_and_update_config = staticmethod(check_and_keep)


def _sampling(max_tokens: int = 8, logprobs: int | None = 5, **others: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, logprobs=logprobs, ignore_eos=True, **others
    )


def _generation(output: Any) -> Generation:
    answer = output.outputs[0]
    logprobs = tuple(
        tuple(sorted((token, entry.logprob) for token, entry in position.items()))
        for position in answer.logprobs or ()
    )
    cached = output.num_cached_tokens or 0
    return Generation(tuple(answer.token_ids), logprobs, cached, answer.finish_reason)


def serve(connection: Connection, order: StartEngine) -> None:
    """Build the engine and answer calls until the connection or the engine is closed."""
    host = None
    try:
        host = EngineHost(order.engine_kwargs)
        connection.send(Answer(host.describe()))
        while True:
            call: Call = connection.recv()
            connection.send(_answer(host, call))
            if call.method == "close":
                return
    except EOFError:
        return  # the test process is gone
    except BaseException:  # whatever the error, the test must see it
        with contextlib.suppress(OSError):
            connection.send(Answer(None, traceback.format_exc()))
        raise


def _answer(host: EngineHost, call: Call) -> Answer:
    try:
        return Answer(getattr(host, call.method)(*call.args, **call.kwargs))
    except Exception:  # reported to the test, which decides; the engine may still be usable
        traceback.print_exc()
        return Answer(None, traceback.format_exc())


def _become_engine(order: StartEngine, connection_fd: int, log_fd: int) -> int:
    """Run in the forked child. Returns its exit status."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    os.environ.update(order.env)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # requested when a call hangs
    try:
        serve(Connection(connection_fd), order)
    except BaseException:
        # the last place that can report an error of this process: the log gets the reason
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _nothing() -> None:
    pass


def nursery(control: socket.socket) -> None:
    """Import vLLM, then fork an engine for each order until the control socket closes."""
    processor.pretend()
    model_runner.pretend()
    for module in ("vllm", *PRELOADED):
        importlib.import_module(module)
    processor.pretend_in_layers()
    # vLLM collects garbage six times while an engine starts and ends. Each collection would walk
    # everything that was imported here and copy the pages.
    gc.collect()
    gc.freeze()
    gc.unfreeze = _nothing  # vLLM calls it at the end of an engine
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended engines
    control.sendall(b"ready")
    while True:
        message, fds, _, _ = socket.recv_fds(control, MAX_ORDER_BYTES, 2)
        if not message:
            return
        order: StartEngine = pickle.loads(message)
        pid = os.fork()
        if pid == 0:
            control.close()
            os._exit(_become_engine(order, *fds))
        for fd in fds:
            os.close(fd)
        control.sendall(pid.to_bytes(8, "big"))


if __name__ == "__main__":
    nursery(socket.socket(fileno=int(sys.argv[1])))
