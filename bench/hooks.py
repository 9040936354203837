"""Measures the time of the connector's hooks on vLLM's threads, and the index's memory per key.

One long request at a time passes through the real scheduler side (with vLLM's own ``Request`` and
``SchedulerOutput``), over an index with up to ten million chunks in a lower tier. No engine runs.
Times are CPU times of the calling thread, which other work on the machine hardly affects.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import pickle
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import Progress

from bench.arguments import known_policy
from bench.charts import Chart
from bench.environment import describe
from bench.report import command_line, deliver
from bench.scenario import Report, Row, progress_bar
from offload.messages.plan import LoadJob, StepPlan

BLOCK = 16
GOAL_CHUNKS = 8192
POLICY = "adaptive"
CHECKED_MAX = 200_000
"""Up to this number of keys, the planner's invariants are checked after each request. With a
million keys the checks would take longer than everything else."""
SCHEDULER_GOAL_US = 2000.0
RUNNER_GOAL_US = 100.0
GOAL_BYTES_PER_KEY = 200.0
WAITERS, WAITING_CHUNKS = 8, 500
"""``WAITERS`` requests wait while another one stores. Each has ``WAITING_CHUNKS`` chunks, or fewer
if half of the CPU tier cannot hold those of all of them."""
CHUNKS_PER_STEP = 128
"""Number of chunks of waiting requests that a step looks at."""
DECODES = 256
"""Number of requests in the step that only decodes."""
HOOKS = "all hooks of a step"
MESSAGES = ("pickle plan", "runner, unpickle plan")


def plotted(report: Report) -> list[Row]:
    """The sums of all hooks, by kind of step."""
    suffix = f": {HOOKS}"
    return [
        dataclasses.replace(row, series=row.series.removesuffix(suffix))
        for row in report.rows
        if row.series.endswith(suffix)
    ]


CHARTS = (Chart("us", f"microseconds for {HOOKS}", rows=plotted),)


@dataclass(frozen=True, slots=True)
class Config:
    """``chunks`` of one request (16 tokens each), ``keys`` in the index of the lower tier, and the
    CPU tier's ``policy``; the lower tier uses ``lru``, its default."""

    chunks: tuple[int, ...] = (512, GOAL_CHUNKS, 65_536)
    keys: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    repeats: int = 5
    policy: str = POLICY


class Clock:
    """CPU time of this thread in microseconds: for each hook, and for all hooks of a step together
    (``HOOKS``), the maximum over the steps of a request."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = defaultdict(list)
        self._step: dict[str, float] = defaultdict(float)
        self._worst: dict[str, float] = {}

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        """Run ``work``, add its time to a hook, and return its result."""
        began = time.thread_time_ns()
        result = work()
        self._step[name] += (time.thread_time_ns() - began) / 1000
        return result

    def next_step(self) -> None:
        """Record the end of a step."""
        hooks = [us for name, us in self._step.items() if name not in MESSAGES]
        for name, us in [*self._step.items(), (HOOKS, sum(hooks))]:
            self._worst[name] = max(self._worst.get(name, 0.0), us)
        self._step.clear()

    def end(self, case: str) -> None:
        """Record the end of a request."""
        self.next_step()
        for name, us in self._worst.items():
            runner, _, hook = name.rpartition("runner, ")
            self.found[f"{'runner, ' if runner or name != hook else ''}{case}: {hook}"].append(us)
        self._worst.clear()

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.found.items()}


class Bed:
    """A scheduler side over an index of ``keys`` chunks in a lower tier, and a worker's executor.
    ``bytes_per_key`` is the memory that the index takes per key. If ``look_ahead``
    is ``None``, the default of a server applies."""

    def __init__(
        self, keys: int, chunks_max: int, policy: str, look_ahead: float | None = None
    ) -> None:
        from offload.config.schema import CpuConfig, OffloadConfig
        from offload.connector.guard import Faults
        from offload.connector.model.adapters import AdapterBook
        from offload.connector.scheduler.live_requests import LiveRequests
        from offload.connector.scheduler.scheduler_side import SchedulerSide
        from offload.index.capacity import ByteCapacity, SlotCapacity
        from offload.index.chunk_batch import GroupInfo
        from offload.index.recovered_chunks import recover
        from offload.index.tier_index import TierIndex
        from offload.layout.groups import FULL, GroupLayout, ModelLayout
        from offload.planner.planner import Planner, PlannerSettings
        from policies.base import EntryInfo
        from policies.registry import make_policy

        group = GroupLayout(0, FULL, BLOCK, 1, ("layer",), 4096)
        layout = ModelLayout(1 << 20, BLOCK, BLOCK, (group,))
        cpu = TierIndex("cpu", SlotCapacity(2 * chunks_max), make_policy(policy))
        lower = TierIndex("lmdb", ByteCapacity(1 << 62), make_policy({"name": "lru"}))
        groups = {0: GroupInfo(FULL, BLOCK, (4096,))}
        if look_ahead is None:
            look_ahead = OffloadConfig(CpuConfig(1 << 30)).look_ahead
        settings = PlannerSettings(look_ahead=look_ahead)
        self.planner = Planner(groups, cpu, [lower], settings)
        requests = LiveRequests(layout, AdapterBook(), tiers=["lmdb"])
        self.side = SchedulerSide(layout, self.planner, requests, Faults())
        before = _resident_bytes()
        found = np.frombuffer(os.urandom(32 * keys), np.uint8).reshape(keys, 32)
        found = np.concatenate([found, np.zeros((keys, 4), np.uint8)], axis=1)
        recover(lower, [found.view("V36")[:, 0]], {0: EntryInfo(0, size_bytes=4096)})
        del found
        self.bytes_per_key = (_resident_bytes() - before) / keys
        self._names = 0

    def request(self, hashes: Sequence[bytes], prompt: list[int]) -> Any:
        """Make a request whose blocks have these hashes."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._names += 1
        hashed = [h[:32] for h in hashes]
        return Request(
            f"r{self._names}",
            prompt,
            SamplingParams(max_tokens=4),
            None,
            block_hasher=lambda request: hashed[len(request.block_hashes) :],
        )

    def fill(self) -> None:
        """Fill the CPU tier with chunks that no request uses."""
        from policies.base import EntryInfo

        keys = [os.urandom(36) for _ in range(self.planner.cpu.space.capacity)]
        self.planner.cpu.recover(keys, [EntryInfo()] * len(keys))

    def fill_and_wait(self, clock: Clock) -> list[Any]:
        """Fill the CPU tier, and let requests wait whose chunks are the oldest in it. Returns the
        requests; the clock gets the time of each arrival, with the step's plan."""
        from offload.planner.look_ahead.wanted_soon import WANTED_CHUNKS_MAX
        from policies.base import EntryInfo

        capacity = self.planner.cpu.space.capacity
        chunks = min(WAITING_CHUNKS, capacity // 2 // WAITERS)
        hashes = [[os.urandom(32) for _ in range(chunks)] for _ in range(WAITERS)]
        oldest = [h + bytes(4) for mine in hashes for h in mine]
        keys = oldest + [os.urandom(36) for _ in range(capacity - len(oldest))]
        self.planner.cpu.recover(keys, [EntryInfo()] * len(keys))
        prompt = list(range(chunks * BLOCK + 1))
        requests = [self.request(mine, prompt) for mine in hashes]
        for request in requests:
            clock.time("arrived", partial(self.side.admit, request))
            clock.time("build plan", lambda: self.side.build_plan(_output()))
            clock.next_step()
        for _ in range(WAITERS + 2 * len(oldest) // CHUNKS_PER_STEP):
            clock.time("build plan", lambda: self.side.build_plan(_output()))
            clock.next_step()
        wanted = len(self.planner.cpu.retention.wanted)
        fitting = WANTED_CHUNKS_MAX // chunks  # requests whose chunks are all wanted
        assert wanted == chunks * min(WAITERS, fitting) > 0, (wanted, chunks)
        clock.end("wait")
        return requests

    def life(self, clock: Clock, case: str, keys: Sequence[bytes], prompt: list[int]) -> None:
        """Run one request whose chunks are in a tier: lookup, load, end."""
        from offload.messages.report import JobResult, StepReport

        side = self.side
        request = self.request(keys, prompt)
        tables = (list(range(1, 2 + len(keys))),)
        clock.time("arrived", lambda: side.admit(request))
        while (found := clock.time("first lookup", lambda: side.lookup(request, 0))) is None:
            self._step(clock, None, ((),))
        self._step(clock, None, ((),))
        found = clock.time("lookup", lambda: side.lookup(request, 0))
        assert found == BLOCK * len(keys), (found, len(keys))
        clock.time("allocated", lambda: side.allocated(request, tables, found))
        parts: list[LoadJob] = []
        while not parts or not parts[-1].is_last:
            plan = self._step(clock, request, tables)
            parts += [load for load in plan.loads if not load.is_ahead]
        report = StepReport({parts[0].job: JobResult()})
        clock.time("take in", lambda: side.update(report, [request.request_id], ()))
        self._rest(clock)
        request.num_computed_tokens = found
        self._plan(clock, request, tables)
        clock.next_step()
        clock.time("ended", lambda: side.finished(request, tables))
        self._rest(clock)
        clock.end(case)

    def store(self, clock: Clock, case: str, keys: Sequence[bytes], prompt: list[int]) -> None:
        """Run one request that computes all of its chunks in one step and further tokens in later
        steps."""
        request = self.request(keys, prompt)
        tables = (list(range(1, 2 + len(keys))),)
        clock.time("arrived", lambda: self.side.admit(request))
        found = clock.time("first lookup", lambda: self.side.lookup(request, 0))
        assert found == 0, found
        plan = self._plan(clock, request, tables, scheduled=len(prompt))
        stored = 0
        request.num_computed_tokens = len(prompt)
        while True:
            stored += sum(len(store.slots) for store in plan.stores)
            clock.next_step()
            self._answer(clock, plan)
            if stored == len(keys):
                break
            plan = self._plan(clock, request, tables)
        clock.time("ended", lambda: self.side.finished(request, tables))
        self._rest(clock)
        clock.end(case)

    def _plan(self, clock: Clock, request: Any, tables: Any, scheduled: int = 1) -> StepPlan:
        output = _output(request, tables, scheduled)
        plan = clock.time("build plan", lambda: self.side.build_plan(output))
        packed = clock.time("pickle plan", lambda: pickle.dumps(plan, 5))
        clock.time("runner, unpickle plan", lambda: pickle.loads(packed))
        assert isinstance(plan, StepPlan)
        return plan

    def _step(self, clock: Clock, request: Any, tables: Any) -> StepPlan:
        plan = self._plan(clock, request, tables)
        clock.next_step()
        self._answer(clock, plan)
        return plan

    def _answer(self, clock: Clock, plan: StepPlan) -> None:
        """Answer all jobs of a plan except loads of requests."""
        from offload.messages.report import JobResult, StepReport

        jobs = [store.job for store in plan.stores]
        jobs += [write_through.job for write_through in plan.write_throughs]
        jobs += [load.job for load in plan.loads if load.is_ahead]
        if jobs:
            report = StepReport({job: JobResult() for job in jobs})
            clock.time("take in", lambda: self.side.update(report, (), ()))

    def _rest(self, clock: Clock) -> None:
        """Run steps until no work is left, while other requests compute."""
        while self.planner.busy:
            clock.next_step()
            plan = clock.time("build plan", lambda: self.side.build_plan(_output()))
            self._answer(clock, plan)
        clock.next_step()
        if len(self.planner.lower[0]) <= CHECKED_MAX:
            self.planner.check()

    def decode(self, clock: Clock, prompt: list[int]) -> None:
        """Run a step that begins many requests of half a block, and a step in which they decode."""
        requests = [self.request([], prompt[: BLOCK // 2]) for _ in range(DECODES)]
        for request in requests:
            self.side.lookup(request, 0)
        output = _output()
        output.num_scheduled_tokens = {r.request_id: 1 for r in requests}
        output.total_num_scheduled_tokens = len(requests)
        clock.time("build plan", lambda: self.side.build_plan(output))
        clock.end("begin")
        for request in requests:
            request.append_output_token_ids(1)
            request.num_computed_tokens = len(prompt[: BLOCK // 2])
        self.side.build_plan(output)  # the first tokens have been produced
        clock.time("build plan", lambda: self.side.build_plan(output))
        clock.end("decode")
        for request in requests:
            self.side.finished(request, ([],))


def _output(request: Any = None, tables: Any = ((),), scheduled: int = 1) -> Any:
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput

    output = SchedulerOutput.make_empty()
    if request is not None:
        name = request.request_id
        output.num_scheduled_tokens = {name: scheduled}
        output.total_num_scheduled_tokens = scheduled
        output.kv_connector_block_state = KVConnectorBlockState({name}, lambda _: tables, {})
    return output


def _resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _measure(bed: Bed, chunks: int, repeats: int) -> dict[str, float]:
    clock = Clock()
    prompt = list(range(chunks * BLOCK + 1))
    planner = bed.planner
    keys = list(planner.lower[0].some(chunks))
    for _ in range(repeats):
        planner.cpu.clear()
        bed.life(clock, "disk", keys, prompt)  # the load promotes the chunks
        bed.life(clock, "cpu", keys, prompt)
        planner.cpu.clear()
        bed.fill()
        bed.life(clock, "disk, cpu full", keys, prompt)
        planner.cpu.clear()
        new = [os.urandom(32) for _ in range(chunks)]
        bed.store(clock, "store", new, prompt)
        planner.forget([key + bytes(4) for key in new])
        planner.cpu.clear()
        bed.fill()
        new = [os.urandom(32) for _ in range(chunks)]
        bed.store(clock, "store, cpu full", new, prompt)
        planner.forget([key + bytes(4) for key in new])
        planner.cpu.clear()
        waiting = bed.fill_and_wait(clock)
        new = [os.urandom(32) for _ in range(chunks)]
        bed.store(clock, "store, cpu full, others wait", new, prompt)
        for request in waiting:
            bed.side.finished(request, ([],))
        assert not planner.cpu.retention.wanted
        assert not getattr(planner.cpu.policy, "faults", [])
        planner.forget([key + bytes(4) for key in new])
        bed._rest(Clock())
        bed.decode(clock, prompt)
    return clock.medians()


def run(config: Config, progress: Progress) -> Report:
    """Run all measurements. The notes state which goals are met."""
    report = Report(
        "hooks",
        f"How long do the connector's hooks occupy vLLM's threads, with policy {config.policy}?",
        dataclasses.asdict(config),
        dict(describe()),
        notes=[
            "CPU time of the calling thread: the maximum over the steps of a request, as the "
            "median over requests. Chunks of one request, with 16 tokens each.",
            "disk, cpu: the request's chunks are in that tier. store: they are computed in one "
            "step. full: storing them requires evicting as many other chunks from the CPU tier. "
            f"wait: {WAITERS} requests of up to {WAITING_CHUNKS:,} chunks arrive whose chunks are "
            "the oldest in the CPU tier; others wait: they wait during the store. "
            "begin, decode: a step that begins 256 requests without a whole chunk, and a step in "
            "which these decode.",
            "all hooks of a step: the sum of arrival, lookup, allocation and the step's plan. "
            "pickle and unpickle are excluded, because they run only with several ranks. first "
            "lookup: the sum of all its steps; lookup: one that is repeated for a waiting request.",
        ],
    )
    gc.disable()  # vLLM freezes its heap and collects rarely
    task = progress.add_task("indexes", total=len(config.keys) * len(config.chunks))
    try:
        for keys in config.keys:
            bed = Bed(keys, max(config.chunks), config.policy)
            for chunks in config.chunks:
                case = f"{chunks:,} chunks, {keys:,} keys"
                found = _measure(bed, min(chunks, keys), config.repeats)
                for name, micros in found.items():
                    report.rows.append(Row(case, name, {"us": micros}))
                report.rows.append(Row(case, "memory", {"bytes per key": bed.bytes_per_key}))
                progress.advance(task)
            del bed
            gc.collect()
    finally:
        gc.enable()
    report.notes += _verdicts(report)
    return report


def _verdicts(report: Report) -> list[str]:
    """Compare each hook for a request of ``GOAL_CHUNKS`` chunks with the goals."""
    notes = []
    for row in report.rows:
        if not row.case.startswith(f"{GOAL_CHUNKS:,} chunks"):
            continue
        goal = RUNNER_GOAL_US if row.series.startswith("runner") else SCHEDULER_GOAL_US
        if row.values.get("us", 0.0) > goal:
            notes.append(f"MISSED, {row.case}, {row.series}: {row.values['us']:.0f} > {goal:.0f}")
    sizes = [row.values["bytes per key"] for row in report.rows if row.series == "memory"]
    if sizes and sizes[-1] > GOAL_BYTES_PER_KEY:
        notes.append(f"MISSED: {sizes[-1]:.0f} bytes per key (goal {GOAL_BYTES_PER_KEY:.0f})")
    return notes or ["all goals are met"]


def register(app: typer.Typer) -> None:
    """``python -m bench hooks``."""

    @app.command("hooks", help=__doc__)
    def hooks(
        chunks: Annotated[
            list[int] | None, typer.Option(min=1, help="Number of chunks of one request.")
        ] = None,
        keys: Annotated[
            list[int] | None, typer.Option(min=1, help="Number of keys in the lower tier.")
        ] = None,
        repeats: Annotated[int, typer.Option(min=1)] = 5,
        policy: Annotated[
            str, typer.Option(help="Policy of the CPU tier.", callback=known_policy)
        ] = POLICY,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
        keep: Annotated[bool, typer.Option(help="Write into bench/results.")] = False,
    ) -> None:
        defaults = Config()
        sizes = tuple(chunks or defaults.chunks), tuple(keys or defaults.keys)
        config = Config(*sizes, repeats, policy)
        with progress_bar() as progress:
            report = run(config, progress)
        deliver(
            report,
            CHARTS,
            command=command_line("hooks"),
            as_json=as_json,
            keep=keep,
            name=f"hook-time-{policy}",
        )
