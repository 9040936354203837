"""Measures how fast the shared tiers are, as a share of the speed of the components on which they
are built.

Compares the Mooncake tier, over TCP on this machine, with the same calls of Mooncake's own client
on the same memory, and the shared LMDB tier with the exclusive one. They take turns, round by
round, over the same blocks; results are medians over rounds. A lookup is one query for many keys.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from bench import arguments
from bench.arguments import AtLeastOne, DiskFolder
from bench.charts import Chart
from bench.environment import describe
from bench.report import command_line, deliver
from bench.scenario import Report, Row, median, progress_bar, size_text
from bench.shared_systems import Contestant, Store, contestants
from bench.tiers_systems import Arena
from demo.mooncake import why_not

ASKED = 512
"""Number of keys in one query: a prompt of 8,192 tokens in chunks of 16."""
QUESTIONS = 40
NEVER = 1 << 40
CHARTS = (Chart("GB/s"), Chart("keys/s"))
"""A block number that is never used."""
Samples = dict[tuple[str, str], dict[str, list[float]]]


@dataclass(frozen=True, slots=True)
class Config:
    """Each phase and round moves ``total_bytes``, with ``depth`` threads."""

    sizes: tuple[int, ...]
    total_bytes: int = 128 << 20
    depth: int = 4
    rounds: int = 7
    folder: str = ""


def run(config: Config, progress: Progress) -> Report:
    """Measure every size and empty the folder afterwards."""
    root = Path(tempfile.mkdtemp(prefix="bench-shared-", dir=config.folder or None))
    report = Report(
        "shared",
        "How fast are shared tiers, compared with their components?",
        dataclasses.asdict(config),
        describe(root),
        notes=[
            "GB/s, keys/s: medians over rounds, interleaved; share: of the limit, median by round.",
            "Limits: Mooncake's client for its tier, the exclusive LMDB tier for the shared one.",
            f"Mooncake over TCP on loopback, memory in a separate process; {config.depth} "
            "threads. CPU s/GB counts this process only.",
            f"lookup: one query for {ASKED} keys, half of which are stored. Our tiers verify "
            "checksums.",
        ],
    )
    store = None
    task = progress.add_task("shared", total=len(config.sizes) * config.rounds)
    try:
        if not why_not():
            store = Store(root, max(1 << 30, 6 * config.total_bytes))
        else:
            report.notes.append(f"Not measured: Mooncake. {why_not()}")
        for block_bytes in config.sizes:
            progress.update(task, description=size_text(block_bytes))
            step = partial(progress.update, task, advance=1)
            report.rows += _measure(config, root, block_bytes, store, step)
    finally:
        if store is not None:
            store.close()
        shutil.rmtree(root, ignore_errors=True)
    return report


def _measure(
    config: Config, root: Path, block_bytes: int, store: Store | None, step: Callable[[], object]
) -> list[Row]:
    arena = Arena(max(4, config.total_bytes // block_bytes), block_bytes)
    found = contestants(root, arena, config.depth, store)
    samples: Samples = defaultdict(lambda: defaultdict(list))
    order = random.Random(1)
    try:
        for turn in range(-1, config.rounds):
            for contestant in order.sample(found, len(found)):
                _round(contestant, arena, turn, samples if turn >= 0 else None)
            if turn >= 0:  # the first round is a warm-up
                step()
    finally:
        for contestant in found:
            contestant.system.close()
    return _rows(found, samples, size_text(block_bytes))


def _round(contestant: Contestant, arena: Arena, turn: int, samples: Samples | None) -> None:
    """Write, read cold, read again, look up, and forget the blocks. Without ``samples``, records no
    result."""
    system = contestant.system
    numbers = range((turn + 1) * arena.count, (turn + 2) * arena.count)
    gigabytes = arena.count * arena.block_bytes / 1e9

    def timed(phase: str, call: Callable[[], object]) -> None:
        cpu, began = time.process_time(), time.perf_counter()
        call()
        seconds = time.perf_counter() - began
        if samples is not None:
            noted = samples[phase, system.name]
            noted["GB/s"].append(gigabytes / seconds)
            noted["CPU s/GB"].append((time.process_time() - cpu) / gigabytes)

    timed("write", lambda: system.write(numbers))
    system.drop_caches()
    timed("read", lambda: system.read(numbers))
    if contestant.count_present is not None:
        half = min(ASKED // 2, arena.count)
        asked = [*numbers[:half], *range(NEVER, NEVER + ASKED - half)]
        began = time.perf_counter()
        for _ in range(QUESTIONS):
            there = contestant.count_present(asked)
            assert there == half, f"{system.name} has {there} of {half} blocks"
        if samples is not None:
            seconds = time.perf_counter() - began
            samples["lookup", system.name]["keys/s"].append(QUESTIONS * len(asked) / seconds)
    system.forget(numbers)


def _rows(found: list[Contestant], samples: Samples, size: str) -> list[Row]:
    rows = []
    for phase in ("write", "read", "lookup"):
        for contestant in found:
            noted = samples.get((phase, contestant.system.name))
            if noted is None:
                continue
            values = {name: median(of_rounds) for name, of_rounds in noted.items()}
            limit = samples.get((phase, contestant.limit))
            if limit is not None:
                column = next(iter(noted))
                pairs = zip(noted[column], limit[column], strict=True)
                values["share"] = median([mine / theirs for mine, theirs in pairs])
            rows.append(Row(f"{phase}, {size}", contestant.system.name, values))
    return rows


def register(app: typer.Typer) -> None:
    """Add ``python -m bench shared``."""

    @app.command("shared", help=__doc__)
    def shared(
        sizes: Annotated[str, typer.Option(help="Block sizes.")] = "2MiB,256KiB",
        total: Annotated[str, typer.Option(help="Bytes moved per phase and round.")] = "128MiB",
        depth: Annotated[int, typer.Option(min=1, help="Number of threads of each system.")] = 4,
        rounds: AtLeastOne = 7,
        folder: DiskFolder = "",
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
        keep: Annotated[bool, typer.Option(help="Write to bench/results.")] = False,
    ) -> None:
        parsed = arguments.sizes("--sizes", sizes)
        config = Config(parsed, arguments.size("--total", total), depth, rounds, folder)
        with progress_bar() as progress:
            report = run(config, progress)
        deliver(
            report,
            CHARTS,
            command=command_line("shared"),
            as_json=as_json,
            keep=keep,
            name="shared-store-speed",
        )
