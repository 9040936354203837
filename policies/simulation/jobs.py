"""Describes simulations as jobs, and runs them in several processes.

A job refers to its trace and policies by name, so that only plain values are passed between
processes. Each process reads a trace once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.sharedctypes import Synchronized
from types import FrameType
from typing import Any

from policies.registry import make_admission, make_policy
from policies.safe_text import safe_repr
from policies.simulation.belady import next_uses
from policies.simulation.simulator import Result, SimTier, bound, simulate
from policies.simulation.timing import Speeds, simulate_timed
from policies.simulation.trace import Trace
from policies.simulation.trace_formats import read_trace
from policies.simulation.two_tiers import simulate_two

ROUNDED_SILENTLY = 0.01
"""Rounding to whole blocks may change a capacity by this share without being reported."""

OPTIMUM, INFINITE = "optimum", "infinite"
NOTHING, ALL_ABOVE = "nothing stored", "all in the upper tier"
"""The limits of runs with arrival times."""

_CAPACITY = re.compile(
    r"([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})\s*(%|blocks|(?:[KMGT]i?)?B)",
    re.ASCII | re.IGNORECASE,
)
_UNITS = {"b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS |= {f"{_prefix}ib": 1024**_power, f"{_prefix}b": 1000**_power}
_counter: Synchronized[int] | None = None


@dataclass(frozen=True, slots=True)
class TraceSource:
    """The source of a trace, and the part of it to use."""

    path: str
    format: str = "auto"
    block_tokens: int | None = None
    part: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class SimulationJob:
    """One run. ``policy`` is a text spec or the name of a limit. Capacities are in blocks.

    A run with arrival times has ``timing``, the engine's speeds, and its share for look-ahead.
    """

    source: TraceSource
    policy: str
    capacity: int
    share: float
    lower_policy: str = ""
    lower_capacity: int = 0
    mode: str = "write-through"
    admission: str = ""
    hints: str = "none"
    timing: str = ""
    look_ahead: float = 0.0


@dataclass(frozen=True, slots=True)
class Lower:
    """The lower tier of every run. Its capacity is as on the command line."""

    capacity: str
    policy: str = "lru"
    mode: str = "write-through"


def parse_spec(text: str) -> dict[str, Any]:
    """Parses ``arc`` or ``module:Class,option=3,other=x``, as ``policies.registry`` accepts it."""
    name, *pairs = text.split(",")
    spec: dict[str, Any] = {"name": name}
    for pair in pairs:
        option, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f'"{pair}" in "{text}" must be option=value')
        spec[option.strip()] = _value(value.strip())
    return spec


def _value(text: str) -> object:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def parse_part(text: str) -> tuple[float, float]:
    """Parse ``0.5:1`` into the start and end of the part, as shares of the trace."""
    found = re.fullmatch(r"(\d*\.?\d+):(\d*\.?\d+)", text)
    start, stop = (float(found[1]), float(found[2])) if found else (1.0, 0.0)
    if not start < stop <= 1:
        raise ValueError(f'part "{text}" must be like 0.5:1, from one share of a trace to another')
    return start, stop


def parse_block_bytes(text: str) -> int:
    """Bytes for ``2MiB`` or ``2097152``; 0 for an empty text. Raises ``ValueError``."""
    if not text:
        return 0
    found = _CAPACITY.fullmatch(text.strip() + ("B" if text.strip().isdigit() else ""))
    unit = found[2].lower() if found else ""
    exact = float(found[1]) * _UNITS[unit] if found and unit in _UNITS else 0.0
    if exact < 1 or exact % 1:
        raise ValueError(f'--block-bytes: must be a size like 2MiB (got "{text}")')
    return int(exact)


def parse_capacity(text: str, unique_blocks: int, block_bytes: int) -> int:
    """Blocks for ``5%`` (of the unique blocks), ``800blocks`` or ``10GiB``. At least 1."""
    return max(1, int(exact_capacity(text, unique_blocks, block_bytes)))


def rounding_note(text: str, unique_blocks: int, block_bytes: int) -> str:
    """Describe how a capacity was rounded, if that changes it by more than ``ROUNDED_SILENTLY``."""
    exact = exact_capacity(text, unique_blocks, block_bytes)
    used = parse_capacity(text, unique_blocks, block_bytes)
    if abs(used - exact) <= ROUNDED_SILENTLY * used:
        return ""
    blocks = "1 block is" if used == 1 else f"{used:,} blocks are"
    return f"capacity {text} is {exact:,.2f} blocks: {blocks} used"


def exact_capacity(text: str, unique_blocks: int, block_bytes: int) -> float:
    """The capacity in blocks, before rounding to whole blocks."""
    found = _CAPACITY.fullmatch(text.strip())
    if not found:
        raise ValueError(f'capacity "{text}" must be like 5%, 800blocks or 10GiB')
    number, unit = float(found[1]), found[2].lower()
    if unit == "%":
        return number * unique_blocks / 100
    if unit == "blocks":
        return number
    if block_bytes <= 0:
        raise ValueError(f'capacity "{text}" in bytes needs the bytes of a block (--block-bytes)')
    return number * _UNITS[unit] / block_bytes


def list_jobs(
    source: TraceSource,
    policies: Sequence[str],
    capacities: Sequence[str],
    *,
    block_bytes: int = 0,
    lower: Lower | None = None,
    admission: str = "",
    hints: str = "none",
) -> list[SimulationJob]:
    """The jobs of one trace: every policy at every capacity, the optimum and the infinite cache.

    With a lower tier, the optimum is that of a cache with the sum of both capacities.
    """
    unique = load(source).unique_blocks()
    below = parse_capacity(lower.capacity, unique, block_bytes) if lower else 0
    jobs = []
    for text in capacities:
        blocks = parse_capacity(text, unique, block_bytes)
        share = blocks / unique
        jobs.append(SimulationJob(source, OPTIMUM, blocks + below, share))
        for policy in policies:
            if lower is None:
                jobs.append(
                    SimulationJob(source, policy, blocks, share, admission=admission, hints=hints)
                )
            else:
                jobs.append(
                    SimulationJob(
                        source,
                        policy,
                        blocks,
                        share,
                        lower.policy,
                        below,
                        lower.mode,
                        admission,
                        hints,
                    )
                )
    jobs.append(SimulationJob(source, INFINITE, unique, 1.0))
    return jobs


def list_timed_jobs(
    source: TraceSource,
    policies: Sequence[str],
    capacities: Sequence[str],
    lower: Lower,
    *,
    timing: str,
    look_ahead: float,
    block_bytes: int = 0,
    hints: str = "none",
) -> list[SimulationJob]:
    """The jobs of one trace with its arrival times: every policy at every capacity of the upper
    tier, with and without look-ahead, and two limits."""
    unique = load(source).unique_blocks()
    below = parse_capacity(lower.capacity, unique, block_bytes)

    def job(policy: str, above: int, below: int, look_ahead: float = 0.0) -> SimulationJob:
        return SimulationJob(
            source, policy, above, above / unique, lower.policy, below, lower.mode,
            hints=hints, timing=timing, look_ahead=look_ahead,
        )  # fmt: skip

    jobs = [job(NOTHING, 0, 0)]
    for text in capacities:
        above = parse_capacity(text, unique, block_bytes)
        for policy in policies:
            jobs += [job(policy, above, below, share) for share in sorted({0.0, look_ahead})]
    return [*jobs, job(ALL_ABOVE, unique, 0)]


@lru_cache(maxsize=4)
def load(source: TraceSource) -> Trace:
    """Read a trace; the most recent ones are cached."""
    trace = read_trace(source.path, source.format, source.block_tokens)
    if source.part == (0.0, 1.0):
        return trace
    chosen = trace.part(*source.part)
    if not chosen.requests:
        raise ValueError(f"{chosen.name}: this part of the trace holds no request")
    return chosen


@lru_cache(maxsize=2)
def _uses(source: TraceSource) -> Any:
    return next_uses(load(source))


class PolicyFailedError(RuntimeError):
    """Raised if a policy raises an exception during a simulation. The message names the policy, the
    exception and its place."""


def run_job(job: SimulationJob, progress: Callable[[int], None] | None = None) -> Result:
    """Run one job in this process. Raises ``PolicyFailedError``."""
    trace = load(job.source)
    try:
        return _run(job, trace, progress)
    except Exception as error:  # a policy may be foreign code
        place = traceback.extract_tb(error.__traceback__)[-1]
        names = " / ".join(filter(None, [job.policy, job.lower_policy]))
        raise PolicyFailedError(
            f"policy {names} raised {safe_repr(error)} in {place.filename}, line {place.lineno}"
        ) from error


def _run(job: SimulationJob, trace: Trace, progress: Callable[[int], None] | None) -> Result:
    if job.timing:
        return _run_timed(job, trace, progress)
    if job.policy == OPTIMUM:
        return bound(trace, job.capacity, uses=_uses(job.source))
    if job.policy == INFINITE:
        return bound(trace, None)
    admission = make_admission(parse_spec(job.admission)) if job.admission else None
    policy = make_policy(parse_spec(job.policy))
    common: Mapping[str, Any] = {
        "admission": admission,
        "hints": job.hints,
        "progress": progress,
    }
    if not job.lower_capacity:
        return simulate(trace, policy, job.capacity, name=job.policy, **common)
    lower = make_policy(parse_spec(job.lower_policy))
    capacities = (job.capacity, job.lower_capacity)
    name = f"{job.policy} / {job.lower_policy}"
    return simulate_two(trace, policy, lower, capacities, job.mode, name=name, **common)


def _run_timed(job: SimulationJob, trace: Trace, progress: Callable[[int], None] | None) -> Result:
    is_limit = job.policy in (NOTHING, ALL_ABOVE)
    upper = make_policy(parse_spec("lru" if is_limit else job.policy))
    lower = make_policy(parse_spec(job.lower_policy))
    return simulate_timed(
        trace,
        SimTier(upper, job.capacity),
        SimTier(lower, job.lower_capacity),
        Speeds.parse(job.timing),
        look_ahead=job.look_ahead,
        name=job.policy if is_limit else f"{job.policy} / {job.lower_policy}",
        hints=job.hints,
        progress=progress,
    )


def run_jobs(
    jobs: Sequence[SimulationJob], processes: int, progress: Callable[[int], None]
) -> Iterator[tuple[SimulationJob, Result]]:
    """Run jobs, and yield each result when it is ready. ``progress`` is called with the number of
    requests simulated since its last call."""
    if processes <= 1:
        for job in jobs:
            yield job, run_job(job, progress)
        return
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    seen = 0
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, context, _start_worker, (counter,))
    waiting: dict[Future[Result], SimulationJob] = {}
    try:
        with _interrupts_later():
            waiting = {pool.submit(_work, job): job for job in jobs}
        while waiting:
            done, _ = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            count = counter.value
            progress(count - seen)
            seen = count
            for future in done:
                yield waiting.pop(future), future.result()
    finally:
        # If the caller stops early, end the workers first: shutting down removes the pool's
        # semaphores, and a worker that is still starting would print a traceback about that.
        if waiting:
            workers = set(multiprocessing.active_children()) - before
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.join()
        pool.shutdown(wait=not waiting, cancel_futures=True)


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Processes started in this context ignore SIGINT, because they inherit the signal mask. A
    terminal sends the signal to them as well, and each would print a traceback.

    A SIGINT that arrives in this context is handled at its end. The mask alone does not ensure
    that: the kernel would deliver the signal to another thread, such as that of a progress bar, and
    Python would still raise KeyboardInterrupt in the main thread. A worker whose start is
    interrupted prints a traceback, too.
    """
    arrived = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal arrived
        arrived = True

    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, note) if is_main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_main:
            signal.signal(signal.SIGINT, handler or signal.SIG_DFL)
        if arrived:
            signal.raise_signal(signal.SIGINT)


def _start_worker(counter: Synchronized[int]) -> None:
    global _counter
    _counter = counter


def _work(job: SimulationJob) -> Result:
    def progress(requests: int) -> None:
        if _counter is not None:
            with _counter.get_lock():
                _counter.value += requests

    return run_job(job, progress)
