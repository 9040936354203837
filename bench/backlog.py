"""Measures what look-ahead gains when requests queue.

The worlds that it compares are real vLLM engines with different tiers and options (see
``bench.backlog_worlds``). All prompts of a batch are sent at once to an engine that runs few of
them at a time. In the worlds with a disk, all of their KV cache is on that disk and nothing of it
is in the CPU tier; the kernel slows the disk (see ``bench.slow_disk``). All engines stay alive and
take turns, batch by batch in random order, and ratios are taken per round, so that noise on the
machine affects all of them.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from bench.backlog_prediction import measured_speeds, predict
from bench.backlog_worlds import (
    AHEAD,
    DEFAULTS,
    DISK,
    FORCED,
    HOST,
    ON_DISK,
    PLAIN,
    RIVAL,
    WAITS,
    WORLDS,
    Config,
    engines_of,
)
from bench.charts import Chart
from bench.environment import describe
from bench.scenario import Report, Row, median, percentile
from bench.serve_engine import Batch, Engine
from bench.serve_numbers import CONFIDENCE, interval, ratios_of
from bench.serve_systems import BLOCK_TOKENS, SYSTEMS
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
    run_and_deliver,
)
from demo.tiny_model import BYTE_TOKENS

Prompts = list[list[int]]
GOAL = 1.15
"""Goal for the mean time to first token with look-ahead, relative to all in the CPU tier."""
READ_GOAL = 1.05
"""Goal for the bytes read with look-ahead, relative to those needed."""
CHARTS = (
    Chart("TTFT mean s", "mean time to first token, s"),
    Chart("total s", "time until all prompts are answered, s", cost=True),
)


def title(config: Config) -> str:
    """The question as a sentence. Contains the size of the queue, so that kept runs differ in
    it."""
    queue = f", {config.queue} at a time" if config.queue else ""
    return (
        f"What does look-ahead gain if {config.prompts} prompts of {config.size:,} tokens"
        f" queue{queue}?"
    )


def run(config: Config, progress: Progress) -> Report:
    """Run the benchmark and empty the folder afterwards."""
    root = Path(tempfile.mkdtemp(prefix="bench-backlog-", dir=config.folder or None))
    report = Report(
        "backlog",
        title(config),
        dataclasses.asdict(config),
        describe(root),
        notes=_notes(config),
    )
    try:
        with (
            SlowDisk(root, int(config.disk_mb_s * 1e6)) as disk,
            engines_of(config, root) as engines,
        ):
            batches = _measure(config, engines, disk, progress)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    report.rows += rows(config, batches)
    report.notes += verdicts(config, batches) + waits(batches)
    report.notes += predictions(config, batches)
    return report


# -- measuring -------------------------------------------------------------------------------------


def _measure(
    config: Config, engines: Mapping[str, Engine], disk: SlowDisk, progress: Progress
) -> dict[str, list[Batch]]:
    """Store everything, then answer all prompts once per world and round. The first round warms the
    engines up and is not counted."""
    rng = random.Random(1)
    prompts = [
        [rng.randrange(BYTE_TOKENS) for _ in range(config.size)] for _ in range(config.prompts)
    ]
    task = progress.add_task("storing", total=(config.rounds + 2) * len(engines))
    for engine in engines.values():
        for prompt in prompts:  # each is written to the disk before the next one needs its space
            engine.run([prompt], 1, 1)
        disk.add(engine.process)
        progress.advance(task)
    batches = defaultdict(list)
    end = time.monotonic() + 60 * config.minutes
    for turn in range(-1, config.rounds):
        if turn > 0 and time.monotonic() > end:
            break
        for world in rng.sample(list(engines), len(engines)):
            progress.update(task, advance=1, description=f"round {turn + 1}: {world}")
            engines[world].reset()
            if world in ON_DISK:
                engines[world].empty_cpu_tier(len(prompts) * config.restorable // BLOCK_TOKENS)
            queue = config.queue or len(prompts)
            batch = engines[world].run(prompts, config.output_tokens, queue)
            if turn >= 0:
                batches[world].append(batch)
    return batches


# -- numbers -------------------------------------------------------------------------------------


def mean_ttft(batch: Batch) -> float:
    """Mean time to first token, in seconds, from the time when all prompts were sent."""
    return statistics.fmean(batch.ttft_s)


def last_ttft(batch: Batch) -> float:
    """The 99th percentile of the time to first token; with few prompts, this is the last prompt's
    time."""
    return percentile(batch.ttft_s, 0.99)


def total(batch: Batch) -> float:
    """Seconds until the last token of the last answer."""
    return batch.seconds


MEASURES: Mapping[str, Callable[[Batch], float]] = {
    "TTFT mean": mean_ttft,
    "TTFT p99": last_ttft,
    "total": total,
}


def rows(config: Config, batches: Mapping[str, Sequence[Batch]]) -> list[Row]:
    """One row per world. Times are medians of the rounds; ratios are medians of the ratios to the
    round's batch with all in the CPU tier."""
    case = f"{config.prompts} prompts of {config.size} tokens"
    needed = config.prompts * config.prompt_bytes
    found = []
    for world, mine in sorted(batches.items(), key=lambda item: (*WORLDS, RIVAL).index(item[0])):
        values, intervals = {}, {}
        for name, measure in MEASURES.items():
            column = f"{name} s"
            values[column] = median([measure(batch) for batch in mine])
            intervals[column] = interval([measure(batch) for batch in mine])
        for name, measure in MEASURES.items():
            ratios = ratios_of(measure, mine, batches[HOST])
            low, high = interval(ratios)
            values |= {f"{name} ratio": median(ratios), "low": low, "high": high}
            values[f"{name} low"], values[f"{name} high"] = values.pop("low"), values.pop("high")
        values["restored"] = median([batch.restored / batch.prompt_tokens for batch in mine])
        values["read / needed"] = median([batch.read_from("lmdb") / needed for batch in mine])
        values["read ahead"] = median([batch.ahead("read") / needed for batch in mine])
        values["wasted"] = median([batch.ahead("wasted") / needed for batch in mine])
        held = [batch.held_block_s / batch.seconds for batch in mine]
        values["blocks held"] = median(held)
        intervals["blocks held"] = interval(held)
        found.append(Row(case, world, values, intervals))
    return found


def verdicts(config: Config, batches: Mapping[str, Sequence[Batch]]) -> list[str]:
    """Compare look-ahead with no look-ahead, and with the goal; name batches whose hits are
    missing."""
    notes = []
    for name, measure in MEASURES.items():
        off = ratios_of(measure, batches[AHEAD], batches[DISK])
        host = median(ratios_of(measure, batches[AHEAD], batches[HOST]))
        low, high = interval(off)
        better = sum(ratio < 1 for ratio in off)
        notes.append(
            f"{name}: with look-ahead {median(off):.3f} of that without ({CONFIDENCE:.0%} interval "
            f"{low:.3f} to {high:.3f}), lower in {better} of {len(off)} rounds; {host:.3f} of that "
            f"with everything in the CPU tier (goal {GOAL}: {'met' if host <= GOAL else 'MISSED'})"
        )
    if config.disk_mb_s and not config.queue:
        notes.append(
            f"No order of reads gets the mean TTFT much below {least_ttft(config, batches):.3f} of "
            "that with everything in the CPU tier: the prompts that run first wait until they are "
            "read, one after the other, and all others queue behind them."
        )
    notes.append(_reads(config, batches[AHEAD]))
    for world in (PLAIN, *FORCED):
        mine = batches[world]
        wanted = 0.0 if world == PLAIN else config.restorable / config.size
        shares = [batch.restored / batch.prompt_tokens for batch in mine]
        if wrong := [share for share in shares if abs(share - wanted) > 0.01]:
            notes.append(
                f"INVALID: {world}: {len(wrong)} of {len(mine)} batches restored a share of "
                f"{median(wrong):.2f} instead of {wanted:.2f}"
            )
    return notes


def _reads(config: Config, ahead: Sequence[Batch]) -> str:
    """Compare what was read with look-ahead with what was needed, in the worst round."""
    needed = config.prompts * config.prompt_bytes
    read = max(batch.read_from("lmdb") / needed for batch in ahead)
    wasted = max(batch.ahead("wasted") / needed for batch in ahead)
    return (
        f"bytes read with look-ahead: at most {read:.3f} of those needed in any round (goal "
        f"{READ_GOAL}: {'met' if read <= READ_GOAL else 'MISSED'}); at most {wasted:.3f} were read "
        "for nothing"
    )


def least_ttft(config: Config, batches: Mapping[str, Sequence[Batch]]) -> float:
    """The mean TTFT if requests wait only for the first reads, divided by the mean TTFT with
    everything in the CPU tier.

    Up to ``in_flight`` prompts run at a time. The first place is filled when one prompt has been
    read, the second when two have been read, and so on; later requests in a place are delayed as
    much as the first one there.
    """
    seconds = config.prompt_bytes / (config.disk_mb_s * 1e6)
    places = min(config.in_flight, config.prompts)
    delay = seconds * (places + 1) / 2
    return 1 + delay / median([mean_ttft(batch) for batch in batches[HOST]])


def predictions(config: Config, batches: Mapping[str, Sequence[Batch]]) -> list[str]:
    """Predict the ratios that ``verdicts`` measured, as ``kvtiers simulate --timing`` does.

    Its speeds are those of the world with nothing stored and the disk's limit. Without a limit, or
    without a backlog, nothing is predicted.
    """
    if not config.disk_mb_s or config.queue:
        return []
    speeds = measured_speeds(config, batches[PLAIN])
    host = predict(config, speeds, cpu_share=1.0, look_ahead=0.0)
    disk = predict(config, speeds, config.cpu_share, look_ahead=0.0)
    ahead = predict(config, speeds, config.cpu_share, config.look_ahead)
    found = []
    for name, key in (("TTFT mean", "ttft_mean_s"), ("total", "total_s")):
        measure = MEASURES[name]
        off = median(ratios_of(measure, batches[AHEAD], batches[DISK]))
        near = median(ratios_of(measure, batches[AHEAD], batches[HOST]))
        found.append(
            f"simulate --timing predicts for {name} with look-ahead {ahead[key] / disk[key]:.3f} "
            f"of that without (measured {off:.3f}) and {ahead[key] / host[key]:.3f} of that with "
            f"everything in the CPU tier (measured {near:.3f})"
        )
    return found


def waits(batches: Mapping[str, Sequence[Batch]]) -> list[str]:
    """Compare the default options with and without waits for reads."""
    notes = []
    for name, measure in MEASURES.items():
        found = ratios_of(measure, batches[WAITS], batches[DEFAULTS])
        low, high = interval(found)
        better = sum(ratio < 1 for ratio in found)
        notes.append(
            f"{name}: with waits for reads {median(found):.3f} of that without ({CONFIDENCE:.0%} "
            f"interval {low:.3f} to {high:.3f}), lower in {better} of {len(found)} rounds"
        )
    return notes


def _notes(config: Config) -> list[str]:
    rate = f"{config.disk_mb_s:g} MB/s by the kernel" if config.disk_mb_s else "nothing"
    return [
        "TTFT: from the sending of all prompts until a request's first token; total: until the "
        "last token of all. Medians of the rounds. With fewer than 100 prompts, the p99 is the "
        "slowest one.",
        "ratio: relative to the same round with everything in the CPU tier; median, with low and "
        f"high as its {CONFIDENCE:.0%} confidence interval.",
        "read / needed: bytes read from the disk, divided by the bytes of the prompts' KV cache; "
        "read ahead: the bytes read while their request waited; wasted: the bytes read ahead and "
        "not used.",
        "blocks held: GPU blocks of requests that wait for a load; mean over the whole time.",
        "default options: those of a server. kvtiers may compute what would be slower to load, and "
        "refuses loads beyond its bounds. waits: wait_for_reads is auto.",
        f"LMCache's server: {SYSTEMS['lmcache-server'].missing or 'all in its memory'}.",
        f"{config.in_flight} requests run at a time; the GPU's cache holds no more. Computing "
        f"threads per engine: {config.threads}. A prompt has "
        f"{config.prompt_bytes / 1e6:.1f} MB of KV cache; reads of the disk are limited to {rate}; "
        f"the CPU tier above the disk holds {config.cpu_share:g} of all prompts, and "
        f"{config.look_ahead:g} of it may be read ahead.",
        f"In {', '.join(FORCED)}: break_even is off and max_load_gpu_share is 1, so that "
        "everything that is stored is loaded.",
    ]


# -- command line --------------------------------------------------------------------------------


def register(app: typer.Typer) -> None:
    """Add ``python -m bench backlog``."""
    plain = Config()

    @app.command("backlog", help=__doc__)
    def backlog(
        prompts: Annotated[int, typer.Option(min=2, help="Number of prompts.")] = plain.prompts,
        size: Annotated[int, typer.Option(min=64, help="Tokens per prompt.")] = plain.size,
        in_flight: InFlight = plain.in_flight,
        queue: Annotated[
            int, typer.Option(min=0, help="Prompts sent at a time; 0: all at once.")
        ] = plain.queue,
        output_tokens: Annotated[int, typer.Option(min=1)] = plain.output_tokens,
        rounds: Annotated[int, typer.Option(min=1)] = plain.rounds,
        minutes: Annotated[
            float, typer.Option(min=0, help="No round begins after this time.")
        ] = plain.minutes,
        disk_mb_s: DiskRate = plain.disk_mb_s,
        cpu_share: CpuShare = plain.cpu_share,
        look_ahead: LookAhead = plain.look_ahead,
        model: ModelName = plain.model,
        threads: Threads = plain.threads,
        folder: Folder = "",
        as_json: AsJson = False,
        keep: Keep = False,
    ) -> None:
        config = Config(
            prompts,
            size,
            in_flight,
            output_tokens,
            rounds,
            minutes,
            disk_mb_s,
            cpu_share,
            look_ahead,
            model,
            threads,
            folder,
            queue,
        )
        name = f"backlog-of-{prompts}-prompts-of-{size}-tokens"
        name += f"-{queue}-at-a-time" if queue else ""
        run_and_deliver(run, config, CHARTS, as_json=as_json, keep=keep, name=name)
