"""Measures how fast KV blocks are copied between the model's caches and the slab, as a share of the
rate of one large copy.

Every round runs every way of copying, with new random blocks and slots in each job. The limit is
one contiguous copy of 256 MiB in the same round (pinned, on a GPU).
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.progress import Progress

from bench import arguments
from bench.arguments import AtLeastOne
from bench.charts import Chart
from bench.copy_beds import LARGE_COPY_BYTES, LAYOUTS, Bed, CpuBed, CudaBed, Layout, Load, layout
from bench.environment import describe
from bench.report import command_line, deliver
from bench.scenario import Report, Row, median, progress_bar, size_text, spread
from tiers.copy.base import CopyEngine

DIRECTIONS = ("store", "load", "both")
LIMIT = "one large copy"
CHARTS = (Chart("share", f"speed as a share of {LIMIT}"),)
Samples = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes in bytes. Each job moves ``job_bytes``, from and to caches of ``cache_bytes``."""

    device: str = "cpu"
    chunk_bytes: tuple[int, ...] = (1 << 16, 1 << 19, 1 << 21, 1 << 24)
    layouts: tuple[str, ...] = LAYOUTS
    job_bytes: int = 64 << 20
    cache_bytes: int = 512 << 20
    rounds: int = 9
    beside_s: float = 0.5


def run(config: Config, progress: Progress) -> Report:
    """Measure every layout and chunk size in every direction."""
    bed: Bed = (
        CudaBed(config.cache_bytes) if config.device == "cuda" else CpuBed(config.cache_bytes)
    )
    report = Report(
        "copy" if config.device == "cpu" else f"copy-{config.device}",
        f"How fast are copies between KV caches and the slab ({config.device})?",
        dataclasses.asdict(config),
        {**describe(), "gpu": bed.gpu_name()},
        notes=[
            "share: of the rate of one contiguous copy of 256 MiB in the same round; 'both': of "
            "the combined rate of one in each direction, one after the other.",
            "GB/s: medians over rounds, from submission until the ticket has completed.",
            "CPU: CPU time of all threads of the process. alone us: time of a job with a single "
            "chunk.",
            "products: rate of 4096 x 4096 bfloat16 matrix products during the copies, as a "
            "share of their rate alone (GPU only).",
        ],
    )
    found = [layout(name, size) for name in config.layouts for size in config.chunk_bytes]
    layouts = [one for one in found if one is not None]
    task = progress.add_task("copy", total=len(layouts) * config.rounds)
    try:
        for one in layouts:
            text = f"{one.name}, {size_text(one.chunk_bytes)}"

            def step(text: str = text) -> None:
                progress.update(task, advance=1, description=text)

            report.rows += asyncio.run(_measure(config, bed, one, text, step))
    finally:
        bed.close()
    return report


async def _measure(
    config: Config, bed: Bed, one: Layout, text: str, step: Callable[[], None]
) -> list[Row]:
    """Measure all directions and engines for one layout, interleaved."""
    load = Load(one, bed, config.job_bytes, seed=1)
    slab = bed.slab(one.chunk_bytes)
    regions = one.regions(bed.cache_address(), load.num_blocks)
    engines = bed.engines(regions, slab, load.num_blocks)
    samples: dict[tuple[str, str], Samples] = defaultdict(lambda: defaultdict(list))
    order = random.Random(1)
    cases = [(direction, name) for direction in DIRECTIONS for name in engines]
    try:
        for turn in range(-1, config.rounds):
            limits = _limits(bed)
            found = {(direction, LIMIT): limits[direction] for direction in DIRECTIONS}
            for direction, name in order.sample(cases, len(cases)):
                limit = limits[direction]["GB/s"]
                found[direction, name] = await _once(engines[name], load, direction, limit)
            if turn >= 0:  # the first round is a warm-up
                step()
                for case, values in found.items():
                    for column, value in values.items():
                        samples[case][column].append(value)
        for name, engine in engines.items():
            samples["both", name]["products"] = [await _beside(engine, load, bed, config.beside_s)]
    finally:
        for engine in engines.values():
            engine.close()
        slab.close()
    return list(_rows(text, samples, cases))


def _limits(bed: Bed) -> dict[str, dict[str, float]]:
    """The rates of large copies. "both" is the rate of two copies, one after the other."""
    found = {}
    gigabytes = LARGE_COPY_BYTES / 1e9
    for direction in ("store", "load"):
        cpu = time.process_time()
        seconds = bed.large_copy_s(direction == "store")
        cpu = time.process_time() - cpu
        found[direction] = {"GB/s": gigabytes / seconds, "CPU s/GB": cpu / gigabytes}
    store, load = found["store"], found["load"]
    found["both"] = {
        "GB/s": 2 / (1 / store["GB/s"] + 1 / load["GB/s"]),
        "CPU s/GB": (store["CPU s/GB"] + load["CPU s/GB"]) / 2,
    }
    return found


async def _once(engine: CopyEngine, load: Load, direction: str, limit: float) -> dict[str, float]:
    """Measure one job (two concurrent ones for "both"), and one job with a single chunk."""
    out_job, in_job = load.pair()
    jobs = 2 if direction == "both" else 1
    cpu, began = time.process_time(), time.perf_counter()
    tickets = []
    if direction != "load":
        tickets.append(engine.submit_store(out_job))
    if direction != "store":
        tickets.append(engine.submit_load(in_job))
    for ticket in tickets:
        await ticket.completed()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    gigabytes = jobs * load.nbytes / 1e9
    values = {
        "GB/s": gigabytes / seconds,
        "share": gigabytes / seconds / limit,
        "CPU s/GB": cpu / gigabytes,
        "CPU us/block": 1e6 * cpu / (jobs * load.chunks * load.layout.chunk_blocks),
    }
    if direction != "both":
        values["alone us"] = 1e6 * await _alone(engine, load, direction)
    return values


async def _alone(engine: CopyEngine, load: Load, direction: str) -> float:
    """Time in seconds of a job with a single chunk."""
    job = [
        dataclasses.replace(batch, blocks=batch.blocks[:1], slots=batch.slots[:1])
        for batch in load.pair()[0]
    ]
    submit = engine.submit_store if direction == "store" else engine.submit_load
    began = time.perf_counter()
    await submit(job).completed()
    return time.perf_counter() - began


async def _beside(engine: CopyEngine, load: Load, bed: Bed, seconds: float) -> float:
    """Rate of matrix products while both lanes copy continuously, as a share of their rate alone.
    NaN without a GPU."""
    alone = bed.products_per_s(seconds)
    if alone != alone:
        return alone
    rates: list[float] = []
    thread = threading.Thread(target=lambda: rates.append(bed.products_per_s(seconds)))
    thread.start()
    while thread.is_alive():
        out_job, in_job = load.pair()
        tickets = [engine.submit_store(out_job), engine.submit_load(in_job)]
        for ticket in tickets:
            await ticket.completed()
    thread.join()
    return rates[0] / alone


def _rows(
    text: str, samples: dict[tuple[str, str], Samples], cases: list[tuple[str, str]]
) -> Iterator[Row]:
    names = list(dict.fromkeys(name for _, name in cases))
    for direction in DIRECTIONS:
        for name in (*names, LIMIT):
            found = samples[direction, name]
            values = {column: median(values) for column, values in found.items()}
            shares = found.get("share", [])
            intervals = {"share": spread(shares)} if len(shares) > 1 else {}
            yield Row(f"{text}, {direction}", name, values, intervals)


def _usable_device(name: str) -> str:
    import torch

    problem = ""
    if name not in ("cpu", "cuda"):
        problem = f"{name!r} is neither cpu nor cuda"
    elif name == "cuda" and not torch.cuda.is_available():
        problem = "PyTorch finds no GPU here"
    if problem:
        raise typer.BadParameter(problem, param_hint="--device")
    return name


def register(app: typer.Typer) -> None:
    """Add ``python -m bench copy``."""

    @app.command("copy", help=__doc__)
    def copy(
        device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
        sizes: Annotated[str, typer.Option(help="Chunk sizes.")] = "64KiB,512KiB,1MiB,2MiB,16MiB",
        layouts: str = ",".join(LAYOUTS),
        job: Annotated[str, typer.Option(help="Bytes that one job moves.")] = "64MiB",
        cache: Annotated[str, typer.Option(help="Size of the cache and of the slab.")] = "512MiB",
        rounds: AtLeastOne = 9,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
        keep: Annotated[bool, typer.Option(help="Write to bench/results.")] = False,
    ) -> None:
        config = Config(
            _usable_device(device),
            arguments.sizes("--sizes", sizes),
            arguments.words("--layouts", layouts, LAYOUTS),
            arguments.size("--job", job),
            arguments.size("--cache", cache),
            rounds,
        )
        with progress_bar() as progress:
            report = run(config, progress)
        deliver(
            report,
            CHARTS,
            command=command_line("copy"),
            as_json=as_json,
            keep=keep,
            name=f"copy-speed-{device}",
        )


if __name__ == "__main__":
    # this module can be imported without the packages that other benchmarks need
    alone = typer.Typer()
    register(alone)
    alone()
