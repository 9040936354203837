"""Checks ``kvtiers simulate --timing`` against real engines, on a short trace.

The first requests of a trace are sent to a real vLLM engine at their arrival times. Each block of
the trace becomes one block of random tokens, so prompts share prefixes as in the trace. All tiers
are empty at first. The CPU tier holds all blocks, or a part of them above a disk that the kernel
slows (see ``bench.slow_disk``), without and with look-ahead. The simulator gets the same requests,
the capacities of the tiers, and the speeds that were measured on that engine before and after.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from bench.charts import Chart
from bench.environment import describe
from bench.scenario import Report, Row, median
from bench.serve_engine import Batch, Engine
from bench.serve_systems import BLOCK_TOKENS, MODELS, kvtiers
from bench.slow_disk import SlowDisk
from bench.slow_engines import (
    AsJson,
    CpuShare,
    DiskRate,
    Folder,
    InFlight,
    Keep,
    LookAhead,
    ModelName,
    Threads,
    engine_arguments,
    forced,
    run_and_deliver,
)
from demo.tiny_model import BYTE_TOKENS, make_llama
from policies.registry import make_policy
from policies.simulation.simulator import Result, SimTier
from policies.simulation.synthetic_trace import Mix, mix_trace
from policies.simulation.timing import Speeds, simulate_timed
from policies.simulation.trace import Request, Trace, TraceError, to_runs
from policies.simulation.trace_formats import read_trace

HOST = "all in the CPU tier"
DISK = "disk"
AHEAD = "disk, look-ahead"
WORLDS = (HOST, DISK, AHEAD)
MIX = Mix(users=6, turns=5, system=256, prompt=160, answer=64, gap=6, hours=0.1)
"""The requests if no trace is given: conversations with gaps that suit a small model."""
TOLERANCE = 0.2
"""The report names predictions that differ from the measurement by more than this share."""
SAMPLES = 2
"""The number of measurements of the speeds before the replay, and again after it."""
SAMPLE_ANSWER = 16
LABELS = {HOST: HOST, DISK: "disk tier", AHEAD: "disk tier, look-ahead"}
"""The worlds in pictures, by names that no other picture uses for something else."""


def plotted(report: Report) -> list[Row]:
    """Two rows per world and time: measured and predicted."""
    return [
        Row(f"{LABELS[row.series]}, {time}", series, {"TTFT s": row.values[column]})
        for time in ("mean", "p99")
        for row in report.rows
        for series, column in (
            ("measured", f"TTFT {time} s"),
            ("predicted", f"TTFT {time} s, predicted"),
        )
    ]


CHARTS = (Chart("TTFT s", "time to first token, s", rows=plotted),)


@dataclass(frozen=True, slots=True)
class Config:
    """The first ``requests`` of ``trace`` (a file, or none: ``MIX``) arrive ``rate`` times as fast
    as recorded. Each prompt is cut to ``prompt_blocks`` blocks and each answer to
    ``answer_tokens``. ``in_flight`` requests run at a time, for which the GPU has blocks. In the
    worlds with a disk, the CPU tier holds the share ``cpu_share`` of all blocks, and ``look_ahead``
    of that may be read ahead. ``disk_mb_s`` (MB/s) limits the disk's reads; 0 does not limit them.
    By default the engine does not compute on one of the cores, because in the simulation copies and
    reads slow nothing down.
    """

    trace: str = ""
    requests: int = 60
    rate: float = 1.0
    prompt_blocks: int = 48
    answer_tokens: int = 32
    in_flight: int = 2
    cpu_share: float = 0.25
    look_ahead: float = 0.5
    disk_mb_s: float = 25.0
    model: str = "small"
    threads: int = max(1, (os.cpu_count() or 1) - 1)
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One world: what was measured, and what the simulator predicted for these speeds."""

    batch: Batch
    speeds: Speeds
    predicted: Result


def run(config: Config, progress: Progress) -> Report:
    """Run the benchmark and empty the folder afterwards."""
    trace = requests_of(config)
    root = Path(tempfile.mkdtemp(prefix="bench-replay-", dir=config.folder or None))
    report = Report(
        "replay",
        "Does the simulator predict the times of real engines?",
        dataclasses.asdict(config),
        describe(root),
    )
    try:
        with (
            SlowDisk(root, int(config.disk_mb_s * 1e6)) as disk,
            _engines(config, trace, root) as engines,
        ):
            outcomes = _measure(config, trace, engines, disk, progress)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    report.rows += rows(trace, outcomes)
    report.notes += verdicts(outcomes) + facts(config, outcomes)
    return report


# -- requests --------------------------------------------------------------------------------------


def requests_of(config: Config) -> Trace:
    """The requests to replay: shortened, arriving from 0 on, in blocks of the engine. Each prompt
    ends with one more token, so at most all of its blocks are hits."""
    source = read_trace(config.trace) if config.trace else mix_trace(MIX, BLOCK_TOKENS)
    chosen = source.requests[: config.requests]
    requests = []
    for request in chosen:
        blocks = request.blocks()[: config.prompt_blocks]
        requests.append(
            Request(
                (request.time_s - chosen[0].time_s) / config.rate,
                len(blocks) * BLOCK_TOKENS + 1,
                to_runs(blocks),
                min(max(1, request.output_tokens), config.answer_tokens),
            )
        )
    return Trace(source.name, BLOCK_TOKENS, requests)


def tokens_of(request: Request, number: int) -> list[int]:
    """The prompt of the request with this number. Equal blocks have equal tokens."""
    tokens = []
    for block in request.blocks():
        draw = random.Random(block)
        tokens += [draw.randrange(BYTE_TOKENS) for _ in range(BLOCK_TOKENS)]
    return [*tokens, number % BYTE_TOKENS]


def cpu_blocks(config: Config, trace: Trace, world: str) -> int:
    """The capacity of a world's CPU tier in blocks."""
    unique = trace.unique_blocks()
    return unique if world == HOST else max(1, int(config.cpu_share * unique))


# -- measuring -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _engines(config: Config, trace: Trace, root: Path) -> Iterator[dict[str, Engine]]:
    """Yields the engines by world, once all have started."""
    folder = make_llama(root / "model", shape=MODELS[config.model].shape)
    longest = max(request.prompt_tokens for request in trace.requests)
    longest += max(config.answer_tokens, SAMPLE_ANSWER)
    common = engine_arguments(config.model, folder, longest, config.in_flight)
    threads = {"OMP_NUM_THREADS": str(config.threads)}
    with contextlib.ExitStack() as stack:
        engines = {}
        for number, world in enumerate(WORLDS):
            disk = root / f"disk{number}"
            disk.mkdir(mode=0o700)
            start = kvtiers(_tiers(config, trace, world, disk))
            arguments = common | {"kv_transfer_config": start.connector}
            engine = Engine(arguments, threads, root / f"engine{number}.log")
            stack.callback(engine.close)
            engines[world] = engine
        for engine in engines.values():
            engine.wait()
        yield engines


def _tiers(config: Config, trace: Trace, world: str, folder: Path) -> dict[str, Any]:
    """The options of a world. All tiers evict by LRU, as in the simulation."""
    block_bytes = BLOCK_TOKENS * MODELS[config.model].kv_bytes_per_token
    above = cpu_blocks(config, trace, world)
    if world == HOST:
        samples = 1 + SAMPLES * (1 + config.in_flight)
        above += samples * _sample_tokens(trace) // BLOCK_TOKENS
    cpu = {"capacity": above * block_bytes, "policy": "lru"}
    below = 2 * trace.unique_blocks() * block_bytes + (256 << 20)
    disk = {"type": "lmdb", "path": str(folder), "capacity": below, "reserve": 0, "policy": "lru"}
    tiers = [] if world == HOST else [disk]
    look_ahead = config.look_ahead if world == AHEAD else 0.0
    return {"cpu": cpu, "tiers": tiers} | forced(look_ahead)


def _measure(
    config: Config,
    trace: Trace,
    engines: Mapping[str, Engine],
    disk: SlowDisk,
    progress: Progress,
) -> dict[str, Outcome]:
    """Replay the trace on each world's engine, measure its speeds, and predict the replay."""
    prompts = [tokens_of(request, number) for number, request in enumerate(trace.requests)]
    answers = [request.output_tokens for request in trace.requests]
    arrivals_s = [request.time_s for request in trace.requests]
    outcomes = {}
    size, draw = _sample_tokens(trace), random.Random(-1)
    task = progress.add_task("", total=len(engines))
    for world, engine in engines.items():
        progress.update(task, description=f"{world}: {len(prompts)} requests")
        disk.add(engine.process)
        before = _sample(engine, config.in_flight, size, draw)
        engine.reset()
        if world != HOST:
            engine.empty_cpu_tier(0)
        batch = engine.replay(prompts, answers, arrivals_s)
        after = _sample(engine, config.in_flight, size, draw)
        speeds = speeds_from(config, before + after)
        outcomes[world] = Outcome(batch, speeds, predict(config, trace, world, speeds))
        progress.advance(task)
    return outcomes


def _sample_tokens(trace: Trace) -> int:
    """Length of the prompts that measure the speeds: as long as those of the trace."""
    return round(statistics.fmean(request.prompt_tokens for request in trace.requests))


def _sample(
    engine: Engine, in_flight: int, size: int, draw: random.Random
) -> list[tuple[Batch, Batch]]:
    """Pairs of batches of new prompts: one prompt, and as many as the engine runs at a time."""

    def answer(count: int) -> Batch:
        prompts = [[draw.randrange(BYTE_TOKENS) for _ in range(size)] for _ in range(count)]
        return engine.run(prompts, SAMPLE_ANSWER, count)

    answer(1)  # warms the engine up
    return [(answer(1), answer(in_flight)) for _ in range(SAMPLES)]


def speeds_from(config: Config, samples: Sequence[tuple[Batch, Batch]]) -> Speeds:
    """The simulator's speeds. Batches of one prompt show how fast prompts are computed; batches
    that fill the engine show how fast each answer is. A disk without a limit takes no time."""
    return Speeds(
        prefill=median([single.prompt_tokens / single.ttft_s[0] for single, _ in samples]),
        decode=median(
            [
                (full.output_tokens / len(full.ttft_s) - 1) / (full.seconds - max(full.ttft_s))
                for _, full in samples
            ]
        ),
        read=config.disk_mb_s * 1e6 / MODELS[config.model].kv_bytes_per_token or math.inf,
        in_flight=config.in_flight,
    )


def predict(config: Config, trace: Trace, world: str, speeds: Speeds) -> Result:
    """Simulate one world."""
    upper = SimTier(make_policy("lru"), cpu_blocks(config, trace, world))
    lower = SimTier(make_policy("lru"), 0 if world == HOST else trace.unique_blocks())
    look_ahead = config.look_ahead if world == AHEAD else 0.0
    return simulate_timed(trace, upper, lower, speeds, look_ahead=look_ahead)


# -- numbers ---------------------------------------------------------------------------------------


def mean_ttft(batch: Batch) -> float:
    """Mean time to first token, in seconds."""
    return statistics.fmean(batch.ttft_s)


def p99_ttft(batch: Batch) -> float:
    """The 99th percentile of the time to first token, as the simulator computes it."""
    return sorted(batch.ttft_s)[math.ceil(0.99 * len(batch.ttft_s)) - 1]


MEASURES: Mapping[str, tuple[Callable[[Batch], float], Callable[[Result], float]]] = {
    "TTFT mean s": (mean_ttft, lambda result: result.extra["ttft_mean_s"]),
    "TTFT p99 s": (p99_ttft, lambda result: result.extra["ttft_p99_s"]),
    "hits": (
        lambda batch: (batch.restored + batch.gpu_hits) / batch.prompt_tokens,
        lambda result: result.token_hit_ratio,
    ),
}
"""How each number is measured and predicted. Hits include those in vLLM's own cache."""


def values_of(outcome: Outcome) -> dict[str, float]:
    """Each number as measured and as predicted, and the ratio of both."""
    values = {}
    for name, (measured, predicted) in MEASURES.items():
        values[name] = measured(outcome.batch)
        values[f"{name}, predicted"] = predicted(outcome.predicted)
        values[f"{name}, ratio"] = (
            values[f"{name}, predicted"] / values[name] if values[name] else math.nan
        )
    return values


def rows(trace: Trace, outcomes: Mapping[str, Outcome]) -> list[Row]:
    """One row per world."""
    case = f"{len(trace.requests)} requests of {trace.name}"
    return [Row(case, world, values_of(outcome)) for world, outcome in outcomes.items()]


def verdicts(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Name the predictions that differ from the measurements, and compare what look-ahead gains."""
    notes = []
    for world, outcome in outcomes.items():
        values = values_of(outcome)
        ratios = {name: values[f"{name}, ratio"] for name in MEASURES}
        # a missing ratio (NaN) counts as wrong
        wrong = [f"{name} {ratio:.2f}" for name, ratio in ratios.items() if not _is_close(ratio)]
        notes.append(
            f"{world}: DIFFERS by more than {TOLERANCE:.0%}: predicted/measured {', '.join(wrong)}"
            if wrong
            else f"{world}: all predictions are within {TOLERANCE:.0%} of the measurements"
        )
    for name, (measured, predicted) in MEASURES.items():
        on, off = outcomes[AHEAD], outcomes[DISK]
        notes.append(
            f"{name}: with look-ahead {_ratio(measured(on.batch), measured(off.batch))} of that "
            f"without, predicted {_ratio(predicted(on.predicted), predicted(off.predicted))}"
        )
    return notes


def _is_close(ratio: float) -> bool:
    return abs(ratio - 1) <= TOLERANCE


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.3f}" if base else "-"


def facts(config: Config, outcomes: Mapping[str, Outcome]) -> list[str]:
    """The speeds that were measured, and the load of other processes during each replay."""
    notes = []
    for world, outcome in outcomes.items():
        batch, speeds = outcome.batch, outcome.speeds
        others = batch.other_cpu_s / batch.seconds / (os.cpu_count() or 1)
        notes.append(
            f"{world}: measured prefill {speeds.prefill:,.0f} and decode {speeds.decode:.1f} "
            f"tokens/s; during the replay of {batch.seconds:.1f} s, other processes used "
            f"{others:.0%} of the machine's processor time"
        )
    read = next(iter(outcomes.values())).speeds.read
    notes.append(
        f"the disk reads at most {config.disk_mb_s:g} MB/s: {read:,.0f} tokens/s"
        if config.disk_mb_s
        else "the disk is not slowed; in the predictions its reads take no time"
    )
    return notes


# -- command line ----------------------------------------------------------------------------------


def register(app: typer.Typer) -> None:
    """Add ``python -m bench replay``."""
    plain = Config()

    @app.command("replay", help=__doc__)
    def replay(
        trace: Annotated[
            str, typer.Argument(help="File, in any format of kvtiers simulate.")
        ] = plain.trace,
        requests: Annotated[
            int, typer.Option(min=2, help="Number of requests, from the first on.")
        ] = plain.requests,
        rate: Annotated[
            float, typer.Option(min=1e-6, help="Divides the arrival times.")
        ] = plain.rate,
        prompt_blocks: Annotated[
            int, typer.Option(min=1, help="Maximum number of blocks per prompt.")
        ] = plain.prompt_blocks,
        answer_tokens: Annotated[
            int, typer.Option(min=1, help="Maximum number of tokens per answer.")
        ] = plain.answer_tokens,
        in_flight: InFlight = plain.in_flight,
        cpu_share: CpuShare = plain.cpu_share,
        look_ahead: LookAhead = plain.look_ahead,
        disk_mb_s: DiskRate = plain.disk_mb_s,
        model: ModelName = plain.model,
        threads: Threads = plain.threads,
        folder: Folder = "",
        as_json: AsJson = False,
        keep: Keep = False,
    ) -> None:
        config = Config(
            trace,
            requests,
            rate,
            prompt_blocks,
            answer_tokens,
            in_flight,
            cpu_share,
            look_ahead,
            disk_mb_s,
            model,
            threads,
            folder,
        )
        run_and_deliver(
            _run,
            config,
            CHARTS,
            as_json=as_json,
            keep=keep,
            name="predicted-and-measured-times",
        )


def _run(config: Config, progress: Progress) -> Report:
    try:
        return run(config, progress)
    except (TraceError, OSError) as error:
        raise typer.BadParameter(str(error), param_hint="TRACE") from error
