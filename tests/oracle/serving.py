"""vLLM's real scheduler with this project's connector in both roles, over memory whose correct
content is known, in one thread, under one seed and on a simulated clock.

The model runner is simulated here: a step's forward pass checks every byte that the computation
would read and writes bytes that follow from the prefix. Kernels and copies run late and in any
order that streams allow (``tiers.testing.simulated_copy``), so a missing wait, a missing fence or a
wrong block id shows as a mismatch. The lower tier is memory that fails from time to time.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from offload.connector.connector import OffloadConnector
from offload.connector.worker import worker_side
from offload.worker import rank_memory
from tests.oracle.clock import pass_time_by_steps
from tests.oracle.conditions import HASH, Conditions, make_config
from tests.oracle.forward import VOCABULARY, ForwardPass, Running
from tests.oracle.memory import KvMemory, Prefix
from tests.oracle.models import OracleModel, in_short_steps
from tests.oracle.restored import RestoredTokens
from tests.oracle.runner import RunnerV1, RunnerV2
from tests.patience import turns
from tiers.base import ReadOutcome, Tier
from tiers.testing.memory_tier import MemoryTier
from tiers.testing.simulated_copy import SimulatedCopyEngine

PROMPT_MAX = 120


class PumpedLoop:
    """An ``EventLoopThread`` without a thread: it runs only when the world lets it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(self.loop.run_until_complete(coroutine))
        return done

    def call(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        return self.start(coroutine).result()

    def turn(self, times: int) -> None:
        """Let the loop run once."""
        self.loop.run_until_complete(turns(times))

    def stop(self, timeout_s: float = 0.0) -> bool:
        self.loop.close()
        return True


class UnreliableTier(MemoryTier):
    """Reads fail from time to time, in all the ways that a tier may fail."""

    def __init__(self, rng: random.Random, rate: float, **options: Any) -> None:
        super().__init__(1 << 20, **options)
        self._random = rng
        self._rate = rate

    async def read(self, keys: Any, into: Any) -> list[ReadOutcome]:
        await turns(self._random.randrange(8))
        outcomes = await super().read(keys, into)
        bad = [ReadOutcome.MISS, ReadOutcome.CORRUPT, ReadOutcome.BUSY]
        return [
            self._random.choice(bad) if self._random.random() < self._rate else outcome
            for outcome in outcomes
        ]


@dataclass
class Step:
    """A step that was submitted and whose output the scheduler has not processed yet."""

    scheduled: SchedulerOutput
    output: ModelRunnerOutput
    drafts: DraftTokenIds | None
    done: list[bool] = field(default_factory=list)


class OracleEngine:
    """One engine under one seed. ``mismatches`` are wrong bytes that a forward pass has read.
    ``excused`` requests may read them, because they held KV of old weights when the caches were
    reset, or hit it in the step that added it."""

    def __init__(self, model: OracleModel, conditions: Conditions, folder: Path, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.mismatches: list[str] = []
        self.excused: set[str] = set()
        self.finished = 0
        self.weights = 0
        self._preempted = self._fenced = self._copied = self._ahead = self._stale = 0
        self._model = model
        self._conditions = conditions
        self._runs: dict[str, Running] = {}
        self._prompts: list[list[int]] = []
        self._salts: dict[str, str | None] = {}
        self._queue: deque[Step] = deque()
        self._is_abort_due = False
        self._names = 0
        config, self.kv_cache_config = make_config(model, conditions, folder)
        self._config = config
        self._memory = KvMemory(
            self.kv_cache_config,
            config.cache_config.get_resolved_kv_cache_layout(),
            model.kernel_blocks,
            rank=0,
            draft_head=model.draft_head,
            drafts=model.drafts,
        )
        self._forward = ForwardPass(model, self._memory, self.random, self._runs, self.mismatches)
        self._forward.vllm_errs = conditions.vllm_errs
        self._forward.forgets_accepted = conditions.vllm_errs and conditions.runner == 1
        self._clock = pytest.MonkeyPatch()
        pass_time_by_steps(self._clock)
        self._start()

    def _start(self) -> None:
        config = self._config
        sizes = resolve_kv_cache_block_sizes(self.kv_cache_config, config)
        self.kv_cache_config.hash_block_size = sizes[1]
        hash_function = get_hash_fn_by_name(HASH)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(sizes[1], hash_function)
        with self._patched():  # the scheduler's output depends on the runner
            self.scheduler = config.scheduler_config.get_scheduler_cls()(
                vllm_config=config,
                kv_cache_config=generate_scheduler_kv_cache_config([self.kv_cache_config]),
                structured_output_manager=StructuredOutputManager(config),
                block_size=sizes[0],
                hash_block_size=sizes[1],
                log_stats=True,
            )
            assert isinstance(self.scheduler, AsyncScheduler) == self._conditions.asynchronous
            assert self.scheduler.use_v2_model_runner == (self._conditions.runner == 2)
            self.connector: OffloadConnector = self.scheduler.connector
            self.worker = OffloadConnector(config, KVConnectorRole.WORKER, self.kv_cache_config)
            runner = RunnerV2 if self._conditions.runner == 2 else RunnerV1
            self._runner = runner(config, self.worker, self._memory.caches)
        self._restored = RestoredTokens(self.connector)
        self.executor: Any = self.worker._worker._executor
        self.engine: SimulatedCopyEngine = self.executor._engine
        self._loop: PumpedLoop = self.worker._worker._loop
        drain, self._fence = self.executor.drain, self.executor.fence
        self.executor.drain = lambda _wait_s: drain()  # the loop does not run while it waits
        self.executor.fence = self._fence_and_turn
        self.connector.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})
        self.planner: Any = in_short_steps(self.connector.serving.side, self.seed)
        self.free_at_start = self._free_blocks()

    @contextmanager
    def _patched(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker_side, "EventLoopThread", PumpedLoop)
            patch.setattr(rank_memory, "make_engine", self._make_engine)
            patch.setattr(worker_side, "make_tier", lambda spec, *_: self._make_tier(spec))
            patch.setattr(VllmConfig, "use_v2_model_runner", self._conditions.runner == 2)
            yield

    def _make_engine(self, found: Any, slab: Any, _: object) -> Any:
        return SimulatedCopyEngine(found.groups, slab, num_blocks=found.num_blocks, seed=self.seed)

    def _make_tier(self, spec: Any) -> Tier:
        options = {"namespace": spec.namespace, "rank": spec.rank, "epoch": spec.epoch}
        return UnreliableTier(self.random, self._conditions.fault_rate, **options)

    # -- actions of clients -----------------------------------------------------------------------

    def add(self) -> None:
        """Add a request that often begins like an earlier one."""
        rng = self.random
        prompt: list[int] = []
        if self._prompts and rng.random() < 0.85:
            earlier = rng.choice(self._prompts)
            prompt = earlier[: rng.choice([len(earlier), rng.randint(1, len(earlier))])]
        prompt = prompt + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))]
        prompt = prompt[:PROMPT_MAX]
        self._names += 1
        self.send(f"r{self._names}", prompt)

    def send(self, name: str, prompt: list[int]) -> Request:
        """Send a request with this prompt."""
        rng = self.random
        self._salts[name] = rng.choice([None, None, None, "other"])
        request = self.make_request(name, prompt, rng.randint(1, 24))
        # The answer is added as it arrives: a later request may continue the conversation.
        chat = request._all_token_ids if self._conditions.asynchronous else prompt
        self._prompts = [*self._prompts[-7:], chat]
        self.scheduler.add_request(request)
        return request

    def make_request(
        self, name: str, prompt: list[int], answer_tokens: int, **options: Any
    ) -> Request:
        """Make a request with the salt of its name and these sampling ``options``."""
        sampling = {"ignore_eos": True, "temperature": 0.0} | options
        return Request(
            name,
            prompt,
            SamplingParams(max_tokens=answer_tokens, **sampling),
            None,
            cache_salt=self._salts[name],
            block_hasher=self._hasher,
            **self._features_of(name),
        )

    def _features_of(self, name: str) -> dict[str, Any]:
        """More arguments of vLLM's request with this name."""
        return {}

    def abort(self) -> None:
        """Abort a request. With asynchronous scheduling, vLLM may take notice of that only when two
        steps are in flight (``EngineCore._process_aborts_queue``)."""
        if self._conditions.asynchronous and self.random.random() < 0.5:
            self._is_abort_due = True
        else:
            self._abort_one()

    def _abort_one(self) -> None:
        if self.scheduler.requests:
            name = self.random.choice(sorted(self.scheduler.requests))
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def forget_locally(self) -> bool:
        """Empty vLLM's own cache and restart running requests, so that the next hits come from our
        tiers. While loads or steps are under way, vLLM restarts requests but keeps its cache, and
        this returns False."""
        if self._queue and self.random.random() < 0.7:
            self.settle()
        with suppress(RuntimeError):
            return bool(self.scheduler.reset_prefix_cache(reset_running_requests=True))
        return False

    def settle(self) -> None:
        """Process the outputs of all steps in flight, as vLLM does before a pause."""
        while self._queue:
            self._take_output()

    def change_weights(self) -> None:
        """Invalidate every byte computed so far. Loads under way make vLLM refuse that, and so do
        steps in flight if they compute."""
        if self._queue and self.random.random() < 0.7:
            self.settle()
        try:
            done = self.scheduler.reset_prefix_cache(
                reset_running_requests=True, reset_connector=True
            )
        except RuntimeError:
            return
        if done:
            self.weights += 1

    def act(self) -> None:
        """Let operators act, in worlds that have some."""

    def resume(self) -> None:
        """End a pause, in worlds that have some."""

    # -- a step ------------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule and submit a step, and process the output of this step or an earlier one.

        With asynchronous scheduling, vLLM schedules a step before it has the output of the previous
        one, even if one of them computes nothing (``EngineCore.step_with_batch_queue``). It
        processes all outputs only when there is nothing to schedule."""
        self._ahead += bool(self._queue)
        scheduled = self.scheduler.schedule()
        self.excused |= self.connector.serving.side.old_kv._holders
        self._queue.append(self._submit(scheduled))
        self._turn()
        is_ahead = self._conditions.asynchronous and self.random.random() < 0.9
        while len(self._queue) > is_ahead:
            self._take_output()

    def drain(self, most: int = 1000) -> None:
        """Step until every request has ended and the connector is idle."""
        for _ in range(most):
            self.step()
            if not self.scheduler.has_requests() and not self.planner.busy and not self._queue:
                return
        raise AssertionError(f"seed {self.seed}: not at rest: {self._stuck()}")

    def check(self) -> None:
        """Check the invariants; raises ``AssertionError``."""
        where = f"seed {self.seed}"
        wrong = [each for each in self.mismatches if each.split()[1] not in self.excused]
        assert wrong == [], f"{where}: {wrong[:5]}"
        assert self.engine.hazards == [], f"{where}: {self.engine.hazards[:5]}"
        faults = self.connector.faults.by_hook | self.worker.faults.by_hook
        assert faults == {}, f"{where}: {faults}"

    def check_idle(self) -> None:
        """Check the accounts at rest; raises ``AssertionError``."""
        self.engine.run_all()
        self._loop.turn(20)
        self.check()
        where = f"seed {self.seed}"
        assert not self._memory.null_block_touched(), f"{where}: the null block was written"
        assert self._free_blocks() == self.free_at_start, f"{where}: blocks were not freed"
        assert self.executor.degraded == "", f"{where}: {self.executor.degraded}"
        self.planner.check()
        assert not self.planner.cpu._pins, f"{where}: pins are left"
        assert self.planner.totals()["late_answers"] == 0, where

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()
        self._clock.undo()

    def events(self) -> dict[str, float]:
        """The counted events so far."""
        return self.loaded() | {
            "preempted": self._preempted,
            "fenced": self._fenced,
            "copied": self._copied,
            "ahead": self._ahead,
            "stale": self._stale,
            "weights": self.weights,
            "vllm_errors": self._forward.errors,
            "load_failures": self.planner.totals()["load_failures"],
            "read_ahead": self.planner.look_ahead.counts.chunks["used"],
        }

    def loaded(self) -> dict[str, float]:
        """Tokens loaded so far, by tier."""
        totals = self.planner.totals()
        return {k.split(":")[1]: v for k, v in totals.items() if k.startswith("loaded_tokens:")}

    # -- the model runner --------------------------------------------------------------------

    def _submit(self, scheduled: SchedulerOutput) -> Step:
        self._preempted += len(scheduled.preempted_req_ids or ())
        self._fenced += len(scheduled.kv_connector_metadata.plan.fence)
        self._runner.begin(scheduled)
        self._update_tables(scheduled)
        launch = self.engine.compute.launch
        if scheduled.new_block_ids_to_zero:
            launch(partial(self._memory.zero, list(scheduled.new_block_ids_to_zero)))
        for copy in scheduled.kv_cache_block_copies or ():
            launch(partial(self._memory.copy, copy.src_block_id, copy.dst_block_id))
            self._copied += 1
        forward = self._forward
        forward.begin(scheduled, launch)
        if self._conditions.runner == 2:
            self._turn()  # the GPU may have reached this point by now
        output = self._runner.run(scheduled, forward.run, partial(self._draft, scheduled))
        sampled = forward.sampled
        index = {name: at for at, name in enumerate(sampled)}
        made = ModelRunnerOutput([*sampled], index, [*sampled.values()], kv_connector_output=output)
        step = Step(scheduled, made, forward.drafts)
        launch(partial(step.done.append, True))
        return step

    def _draft(self, scheduled: SchedulerOutput) -> None:
        """Run the drafter, as the model runner does after the forward pass."""
        self._forward.draft()

    def _begin_run(self, name: str, tokens: Sequence[int]) -> tuple[list[int], Prefix]:
        """The tokens that a request begins or resumes with, as the model sees them, and the prefix
        on which their KV depends."""
        return list(tokens), Prefix(f"{self.weights}/{self._salts[name]}")

    def _update_tables(self, scheduled: SchedulerOutput) -> None:
        cached = scheduled.scheduled_cached_reqs
        for name in (
            scheduled.finished_req_ids
            | (scheduled.preempted_req_ids or set())
            | cached.resumed_req_ids
        ):
            if name in self._runs:  # the guesses stay, here as in vLLM's own cache
                self._forward.known |= self._runs[name].guesses
        for name in scheduled.finished_req_ids:
            self._runs.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            tables = [list(table) for table in new.block_ids]
            known = new.prefill_token_ids or new.prompt_token_ids  # V2: also resumed requests
            tokens, prefix = self._begin_run(new.req_id, known)
            run = Running(tokens, tables, prefix, new.num_computed_tokens)
            run.restored = self._restored.take(new.req_id)
            before = self._runs.get(new.req_id)  # of a session that continues
            if before is not None and self._forward.forgets_accepted:
                run.state_column = before.state_column
            self._runs[new.req_id] = run
        for position, name in enumerate(cached.req_ids):
            run, new_blocks = self._runs[name], cached.new_block_ids[position]
            if name in cached.resumed_req_ids:
                run.tables = [list(table) for table in new_blocks]
                known = self.scheduler.requests[name].all_token_ids
                run.tokens, run.prefix = self._begin_run(name, known)
                run.computed_at_start = cached.num_computed_tokens[position]
                run.state_column, run.accepted, run.proposed = None, 1, []
                run.restored = self._restored.take(name)
            elif new_blocks is not None:
                for table, more in zip(run.tables, new_blocks, strict=True):
                    table.extend(more)

    # -- time --------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Give copies and the loop only a few turns, so that much work stays in progress."""
        self._loop.turn(self.random.randrange(self._conditions.late + 1))
        self.engine.advance(self.random.randrange(self._conditions.late + 1))

    def _take_output(self) -> None:
        step = self._queue.popleft()
        self._await_kernels(step)
        if self._is_abort_due:
            self._is_abort_due = False
            self._abort_one()
        self._stale += sum(
            request.num_stale_output_tokens > 0 for request in self.scheduler.requests.values()
        )
        self.finished += sum(
            output.finish_reason is not None
            for outputs in self.scheduler.update_from_output(step.scheduled, step.output).values()
            for output in outputs.outputs
        )
        if step.drafts is not None and not self._conditions.asynchronous:
            self.scheduler.update_draft_token_ids(step.drafts)

    def _await_kernels(self, step: Step) -> None:
        """The sampled tokens are known once the step's kernels have run. With asynchronous
        scheduling, copies often make no progress meanwhile: otherwise few of them would still be
        under way when vLLM reuses their blocks, which takes a step longer."""
        is_slow = self._conditions.asynchronous and self.random.random() < 0.5
        while not step.done:
            if not (is_slow and self.engine.compute.advance()):
                self.engine.advance()

    def _fence_and_turn(self, jobs: Any) -> None:
        """Run the loop until the fenced stores are submitted, as its own thread would."""
        for _ in range(10_000):
            fenced = filter(None, map(self.executor._fences.reading.get, jobs))
            if all(reading._end.done() for reading in fenced):
                break
            self._loop.turn(1)
            self.engine.advance()
        self._fence(jobs)

    def _free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _stuck(self) -> str:
        states = {name: r.status.name for name, r in self.scheduler.requests.items()}
        return f"{states}, open jobs {self.planner.jobs.jobs()}"
