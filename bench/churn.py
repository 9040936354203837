"""Measures whether disk tiers stay fast when they are full and their blocks are constantly
replaced.

Ten times as many blocks as fit are written in order; before each batch, the oldest blocks are
deleted. The systems take turns, a tenth of the work at a time, so that noise on the machine affects
all of them. The limit is raw ``O_DIRECT`` writes to a file of the same size, used as a ring.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Sequence
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
from bench.scenario import Report, Row, median, progress_bar, size_text
from bench.tiers_optional import OPTIONAL, available
from bench.tiers_systems import SYSTEMS as BUILT_IN
from bench.tiers_systems import Arena, RawDisk, System

SYSTEMS = BUILT_IN | available()
DEFAULT = ("raw", "lmdb", "files", "vllm", "lmcache")
TENTHS = 10
BATCH = 50
CHARTS = (Chart("share", "speed as a share of raw O_DIRECT"),)


@dataclass(frozen=True, slots=True)
class Config:
    """``cap`` is the number of blocks that fit; ``TENTHS * cap`` blocks are written."""

    block_bytes: int = 256 << 10
    cap: int = 1000
    depth: int = 4
    systems: tuple[str, ...] = DEFAULT
    folder: str = ""


def run(config: Config, progress: Progress) -> Report:
    """Run the benchmark and empty the folder afterwards."""
    root = Path(tempfile.mkdtemp(prefix="bench-churn-", dir=config.folder or None))
    names = [name for name in config.systems if name in SYSTEMS]
    report = Report(
        "churn",
        "How fast do full disk tiers write while they evict?",
        dataclasses.asdict(config),
        describe(root),
        notes=[
            f"GB/s: median of {TENTHS} parts; last / first: speed of the last part divided by "
            "that of the first.",
            "worst / first: speed of the slowest part divided by that of the first; the value of "
            "raw shows how noisy the disk was.",
            "bytes on disk: size of the system's files at the end, relative to the blocks that "
            "fit.",
            *(f"Not measured: {name}." for name in config.systems if name not in names),
        ],
    )
    # systems reserve memory for twice this number
    arena = Arena(config.cap // 2, config.block_bytes)
    task = progress.add_task("churn", total=TENTHS * len(names))
    systems = [_Churned(SYSTEMS[n](root / n, arena, config.depth)) for n in names]
    try:
        for tenth in range(TENTHS):
            for system in systems:
                system.run(range(tenth * config.cap, (tenth + 1) * config.cap), config.cap)
                progress.update(task, advance=1, description=system.inner.name)
        raw = next((s.median for s in systems if s.inner.name == RawDisk.name), float("nan"))
        live = config.cap * config.block_bytes
        case = f"{size_text(config.block_bytes)}, {config.cap} fit"
        report.rows = [Row(case, s.inner.name, s.values(raw, live)) for s in systems]
    finally:
        for system in systems:
            system.inner.close()
        shutil.rmtree(root, ignore_errors=True)
    return report


class _Churned:
    """One system and the speed of its parts."""

    def __init__(self, inner: System) -> None:
        self.inner = inner
        self.parts: list[float] = []

    @property
    def median(self) -> float:
        return median(self.parts)

    def run(self, numbers: Sequence[int], cap: int) -> None:
        """Delete as many old blocks as will be written, then write the new blocks."""
        began = time.perf_counter()
        for start in range(0, len(numbers), BATCH):
            batch = numbers[start : start + BATCH]
            self.inner.forget([number - cap for number in batch if number >= cap])
            self.inner.write(batch)
        moved = len(numbers) * self.inner.arena.block_bytes
        self.parts.append(moved / 1e9 / (time.perf_counter() - began))

    def values(self, raw: float, live_bytes: int) -> dict[str, float]:
        files = [path for path in self.inner.folder.rglob("*") if path.is_file()]
        return {
            "GB/s": self.median,
            "share": self.median / raw,
            "last / first": self.parts[-1] / self.parts[0],
            "worst / first": min(self.parts) / self.parts[0],
            "bytes on disk": sum(path.stat().st_blocks * 512 for path in files) / live_bytes,
        }


def register(app: typer.Typer) -> None:
    """Add ``python -m bench churn``."""

    @app.command("churn", help=__doc__)
    def churn(
        size: Annotated[str, typer.Option(help="Size of a block in bytes.")] = "256KiB",
        cap: Annotated[int, typer.Option(min=2, help="Number of blocks that fit.")] = 1000,
        depth: AtLeastOne = 4,
        systems: str = ",".join(DEFAULT),
        folder: DiskFolder = "",
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
        keep: Annotated[bool, typer.Option(help="Write to bench/results.")] = False,
    ) -> None:
        block_bytes = arguments.size("--size", size)
        names = arguments.words("--systems", systems, BUILT_IN | OPTIONAL)
        config = Config(block_bytes, cap, depth, names, folder)
        with progress_bar() as progress:
            report = run(config, progress)
        deliver(
            report,
            CHARTS,
            command=command_line("churn"),
            as_json=as_json,
            keep=keep,
            name="disk-tiers-under-churn",
        )
