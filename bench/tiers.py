"""Measures how fast the disk tiers are, as a share of the disk's speed.

The systems take turns, round by round, over the same blocks, so that noise on the machine affects
all of them; results are medians over rounds. In every round each system forgets the blocks of the
previous round (not timed), then writes, reads cold, reads again, and reads and writes at the same
time.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from bench import arguments
from bench.arguments import AtLeastOne, DiskFolder
from bench.charts import Chart
from bench.environment import describe
from bench.report import command_line, deliver
from bench.scenario import (
    Report,
    Row,
    median,
    percentile,
    progress_bar,
    size_text,
    spread,
)
from bench.tiers_optional import OPTIONAL, available
from bench.tiers_systems import SYSTEMS as BUILT_IN
from bench.tiers_systems import Arena, Memory, RawDisk, System
from offload.planner.write_through import QueueSettings
from offload.worker.executor_limits import ExecutorLimits
from offload.worker.tier_monitor import CALLS_MAX

SYSTEMS = BUILT_IN | available()
PHASES = ("write", "read cold", "read hot", "mixed")
LATENCY_BLOCKS_PER_CALLER = 8
Samples = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Config:
    """``points`` are (block bytes, depth); each phase and round moves ``total_bytes``."""

    points: tuple[tuple[int, int], ...]
    total_bytes: int = 256 << 20
    rounds: int = 5
    systems: tuple[str, ...] = tuple(SYSTEMS)
    folder: str = ""


def run(config: Config, progress: Progress) -> Report:
    """Measure every point and empty the folder afterwards."""
    root = Path(tempfile.mkdtemp(prefix="bench-tiers-", dir=config.folder or None))
    report = Report(
        "tiers",
        "How fast are disk tiers, compared with "
        f"{'those of others' if _is_compared(config) else 'raw access to the disk'}?",
        dataclasses.asdict(config),
        describe(root),
        notes=[
            "GB/s and CPU s/GB: medians over rounds, systems in turn; share: of raw O_DIRECT.",
            "Checksums are on in our tiers; vLLM's fs tier has none and does not flush.",
            "p50/p99: one block per call, with as many callers as the depth.",
            "lmdb tier: all blocks of a phase in one call. Calls of a server: at most "
            f"{QueueSettings().batch} blocks per write and {ExecutorLimits().read_batch} per read, "
            f"and at most {CALLS_MAX} calls at a time.",
            *(
                f"Not measured: {name}, {package} is not installed."
                for name, (package, _) in OPTIONAL.items()
                if name not in SYSTEMS
            ),
        ],
    )
    steps = len(config.points) * config.rounds * len(config.systems)
    task = progress.add_task("tiers", total=steps)
    try:
        for block_bytes, depth in config.points:
            name = f"{size_text(block_bytes)}, depth {depth}"

            def step(text: str, name: str = name) -> None:
                progress.update(task, advance=1, description=f"{name}: {text}")

            report.rows += _point(config, root, block_bytes, depth, name, step)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return report


def _point(
    config: Config,
    root: Path,
    block_bytes: int,
    depth: int,
    name: str,
    step: Callable[[str], None],
) -> list[Row]:
    arena = Arena(max(4, config.total_bytes // block_bytes), block_bytes)
    systems = [SYSTEMS[key](root / key, arena, depth) for key in config.systems]
    samples: dict[str, dict[str, Samples]] = defaultdict(lambda: defaultdict(_no_samples))
    order = random.Random(1)
    try:
        for turn in range(-1, config.rounds):
            for system in order.sample(systems, len(systems)):
                found = _round(system, turn + 1)
                if turn >= 0:  # the first round is a warm-up
                    step(system.name)
                    for phase, values in found.items():
                        for column, value in values.items():
                            samples[phase][system.name][column] += value
    finally:
        for system in systems:
            system.close()
    return _rows(name, samples, [system.name for system in systems])


def _no_samples() -> Samples:
    return defaultdict(list)


def _round(system: System, turn: int) -> dict[str, Samples]:
    """Run all phases once. The blocks of a turn are numbered from ``2 * turn * count`` on."""
    count = system.arena.count
    first = 2 * turn * count
    mine = range(first, first + count)
    half = count // 2
    new = range(first + count, first + count + half)
    few = min(half, LATENCY_BLOCKS_PER_CALLER * system.depth)
    single = range(first + count + half, first + count + half + few)
    found: dict[str, Samples] = {}
    found["write"] = _timed(system, count, lambda: system.write(mine))
    system.drop_caches()
    found["read cold"] = _timed(system, count, lambda: system.read(mine))
    found["read hot"] = _timed(system, count, lambda: system.read(mine))
    found["mixed"] = _timed(system, 2 * half, lambda: system.mixed(new, mine[:half]))
    system.forget([*new, *mine[half:]])
    writes, reads = system.latencies_s(single, mine[:few])
    found["write"]["latency"], found["read cold"]["latency"] = writes, reads
    system.forget([*mine[:half], *single])
    return found


def _timed(system: System, blocks: int, call: Callable[[], None]) -> Samples:
    gigabytes = blocks * system.arena.block_bytes / 1e9
    cpu, began = time.process_time(), time.perf_counter()
    call()
    seconds = time.perf_counter() - began
    return {
        "GB/s": [gigabytes / seconds],
        "CPU s/GB": [(time.process_time() - cpu) / gigabytes],
    }


def _rows(name: str, samples: dict[str, dict[str, Samples]], systems: list[str]) -> list[Row]:
    rows = []
    for phase in PHASES:
        raw = median(samples[phase][RawDisk.name]["GB/s"])
        for system in systems:
            found = samples[phase][system]
            speed = median(found["GB/s"])
            ratios = [
                mine / limit
                for mine, limit in zip(
                    found["GB/s"], samples[phase][RawDisk.name]["GB/s"], strict=False
                )
            ]
            values = {"GB/s": speed, "share": speed / raw, "share by round": median(ratios)}
            if found["latency"]:
                values["p50 ms"] = 1e3 * percentile(found["latency"], 0.5)
                values["p99 ms"] = 1e3 * percentile(found["latency"], 0.99)
            values["CPU s/GB"] = median(found["CPU s/GB"])
            intervals = {"share": spread(ratios)} if len(ratios) > 1 else {}
            rows.append(Row(f"{phase}, {name}", system, values, intervals))
    return rows


PLOTTED = (256 << 10, 2 << 20)
"""The block sizes to plot, if they were measured. The table has all sizes."""


def plotted(report: Report) -> list[Row]:
    """The rows to plot: two sizes, each at its first depth, which keeps the plot readable. Memory
    is left out, because it would stretch the axis."""
    depths = dict(reversed(report.config["points"]))
    sizes = [size for size in PLOTTED if size in depths] or list(depths)[-2:]
    cases = {f"{size_text(size)}, depth {depths[size]}" for size in sizes}
    return [
        row
        for row in report.rows
        if row.series != Memory.name and row.case.partition(", ")[2] in cases
    ]


CHARTS = (Chart("share", "speed as a share of raw O_DIRECT", rows=plotted),)


def _is_compared(config: Config) -> bool:
    return {"lmcache", "files"} <= set(config.systems)


def default_points(sizes: Sequence[int], depths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The points to measure: every size at the first depth, and every depth at 2 MiB (or at the
    only size)."""
    pivot = 2 << 20 if 2 << 20 in sizes else sizes[0]
    points = [(size, depths[0]) for size in sizes] + [(pivot, depth) for depth in depths[1:]]
    return tuple(points)


def register(app: typer.Typer) -> None:
    """Add ``python -m bench tiers``."""

    @app.command("tiers", help=__doc__)
    def tiers(
        sizes: Annotated[
            str, typer.Option(help="Block sizes.")
        ] = "64KiB,256KiB,1MiB,2MiB,4MiB,16MiB",
        depths: Annotated[
            str, typer.Option(help=("Queue depths; the first one is used for all sizes."))
        ] = "4,1,8,32",
        total: Annotated[str, typer.Option(help="Bytes moved per phase and round.")] = "256MiB",
        rounds: AtLeastOne = 5,
        systems: str = ",".join(SYSTEMS),
        folder: DiskFolder = "",
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
        keep: Annotated[bool, typer.Option(help="Write to bench/results.")] = False,
    ) -> None:
        config = Config(
            default_points(
                arguments.sizes("--sizes", sizes),
                arguments.values("--depths", depths, arguments.count),
            ),
            arguments.size("--total", total),
            rounds,
            arguments.words("--systems", systems, SYSTEMS),
            folder,
        )
        with progress_bar() as progress:
            report = run(config, progress)
        deliver(
            report,
            CHARTS,
            command=command_line("tiers"),
            as_json=as_json,
            keep=keep,
            name=f"disk-tiers-against-{'others' if _is_compared(config) else 'raw-disk'}",
        )
