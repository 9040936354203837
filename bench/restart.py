"""Measures how long a disk tier takes after a restart to read its index back into memory.

Creates an index of many records (the payload file is sparse, because payloads are never read).
Opens it repeatedly in a new process, alternately after a clean close and after a crash. Wall time
depends on the machine's load; CPU time is the cost of a step.

Steps: the tier's ``open`` (walk over the index file, checks, a table of keys), ``keys``, the
message from a worker to the scheduler (packed and unpacked), and the scheduler's index with its
LRU. Bytes per record: how much the process grows until the tier is open.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from bench.arguments import AtLeastOne, DiskFolder
from bench.charts import Chart
from bench.environment import describe
from bench.report import command_line, deliver
from bench.scenario import Report, Row, median, progress_bar
from offload.index.capacity import ByteCapacity
from offload.index.recovered_chunks import recover
from offload.index.tier_index import TierIndex
from offload.layout.keys import joined
from policies.base import EntryInfo
from policies.registry import make_policy
from tiers.base import ALIGNMENT
from tiers.io.direct_io import DiskIo
from tiers.io.extents import Extent
from tiers.lmdb.files import LmdbFiles
from tiers.lmdb.index import Changes, pack_value
from tiers.lmdb.options import LmdbOptions
from tiers.lmdb.tier import LmdbTier
from tiers.record import DATED_FROM_NS, TAG_BYTES, Identity, prefix

PER_TRANSACTION = 2000
ENDS = ("closed", "killed")
RECORDS_PER_WRITE = 32
WRITE_EVERY_NS = 10 * 10**9
CHARTS = (Chart("s", "seconds"),)


@dataclass(frozen=True, slots=True)
class Config:
    """``records`` are in the index; there are ``rounds`` rounds for each way of ending."""

    records: int = 1_000_000
    rounds: int = 5
    folder: str = ""


def run(config: Config, progress: Progress) -> Report:
    """Run the benchmark and empty the folder afterwards."""
    root = Path(tempfile.mkdtemp(prefix="bench-restart-", dir=config.folder or None))
    report = Report(
        "restart",
        "How long does a tier take to restore its index after a restart?",
        dataclasses.asdict(config),
        describe(root),
        notes=[
            "Medians; keys of 36 bytes in random order, so that the index's pages are two thirds "
            "full.",
            "The index file is in the page cache, as when only the process was restarted.",
            "Times of use are as if 32 records had been written every ten seconds.",
        ],
    )
    samples: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    task = progress.add_task("restart", total=len(ENDS) * config.rounds)
    try:
        _make(root / "tier", config.records)
        for _ in range(config.rounds):
            for before, now in zip(ENDS, ENDS[1:] + ENDS[:1], strict=True):
                for step, values in _in_child(root / "tier", config.records, now).items():
                    samples[before, step].append(values)
                progress.update(task, advance=1)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for (before, step), found in sorted(samples.items(), key=lambda item: ENDS.index(item[0][0])):
        values = {name: median([one[name] for one in found]) for name in found[0]}
        report.rows.append(Row(f"{config.records:,} records, {before}", step, values))
    return report


def _options() -> tuple[int, LmdbOptions]:
    """The capacity per record in bytes, and options under which the index has space for all
    records."""
    return 2 * ALIGNMENT, LmdbOptions(record_bytes=ALIGNMENT, reserve_bytes=0)


def _make(folder: Path, records: int) -> None:
    per_record, options = _options()
    store = LmdbFiles(folder, records * per_record + (64 << 20), options, DiskIo())
    os.ftruncate(store.file.fd, (records + 2) * ALIGNMENT)
    rng = random.Random(1)
    for start in range(0, records, PER_TRANSACTION):
        edits: dict[bytes, bytes | None] = {}
        for number in range(start, min(records, start + PER_TRANSACTION)):
            key = rng.randbytes(32) + bytes(4)
            header = prefix(Identity(), key, 0, ALIGNMENT) + rng.randbytes(TAG_BYTES)
            edits[key] = pack_value(_use_of(number), header, (Extent(1 + number, 1),))
        store.index.apply(Changes(edits=edits))
    store.close()


def _use_of(number: int) -> int:
    """Realistic times of use: a nanosecond apart within a batch, seconds apart between batches."""
    batch, within = divmod(number, RECORDS_PER_WRITE)
    return DATED_FROM_NS + batch * WRITE_EVERY_NS + within


def _in_child(folder: Path, records: int, end: str) -> dict[str, dict[str, float]]:
    """Run one restart in a new process. ``end`` selects how the process ends."""
    code = f"from bench.restart import child; child({str(folder)!r}, {records}, {end!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def child(folder: str, records: int, end: str) -> None:
    """Open the tier, print the time of each step, and end the process."""
    asyncio.run(_restart(folder, records, end))


async def _restart(folder: str, records: int, end: str) -> None:
    before = _resident_bytes()
    laps = _Laps()
    per_record, options = _options()
    tier = LmdbTier(folder, records * per_record + (64 << 20), options=options)
    info = await tier.open()
    assert info.record_count == records, info
    laps.end("open")
    laps.found["open"]["bytes per record"] = (_resident_bytes() - before) / records
    batches = tier.keys()
    columns = joined([batch.column async for batch in batches])
    laps.end("keys")
    # safe to unpickle, because the benchmark has just pickled these bytes
    columns = pickle.loads(pickle.dumps(columns, pickle.HIGHEST_PROTOCOL))
    laps.end("message")
    index = TierIndex("disk", ByteCapacity(info.capacity_bytes), make_policy("lru"))
    assert not recover(index, columns, {0: EntryInfo(size_bytes=ALIGNMENT)}), "everything fits"
    laps.end("scheduler's index")
    print(json.dumps(laps.found), flush=True)
    if end == "killed":
        os._exit(0)
    await tier.aclose()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Laps:
    """Wall and CPU seconds of each step, and in total."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}
        self._first = self._last = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def end(self, step: str) -> None:
        now = self._now()
        self.found.pop("all", None)  # it stays last
        for name, since in ((step, self._last), ("all", self._first)):
            self.found[name] = {"s": now[0] - since[0], "CPU s": now[1] - since[1]}
        self._last = now


def register(app: typer.Typer) -> None:
    """Add ``python -m bench restart``."""

    @app.command("restart", help=__doc__)
    def restart(
        records: Annotated[
            int, typer.Option(min=1, help="Number of records in the index.")
        ] = 1_000_000,
        rounds: AtLeastOne = 5,
        folder: DiskFolder = "",
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
        keep: Annotated[bool, typer.Option(help="Write to bench/results.")] = False,
    ) -> None:
        with progress_bar() as progress:
            report = run(Config(records, rounds, folder), progress)
        deliver(
            report,
            CHARTS,
            command=command_line("restart"),
            as_json=as_json,
            keep=keep,
            name="index-restart-time",
        )
