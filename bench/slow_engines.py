"""Engines over a disk that the kernel slows, for ``bench backlog`` and ``bench replay``.

This module has what the two commands share: the arguments of the engines, the options, and the
delivery of the report.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.progress import Progress

from bench.charts import Chart
from bench.report import command_line, deliver
from bench.scenario import Report, progress_bar
from bench.serve_systems import BLOCK_TOKENS, MODELS
from bench.slow_disk import SlowDiskError

C = TypeVar("C")


def _known(name: str) -> str:
    if name not in MODELS:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(MODELS)}")
    return name


InFlight = Annotated[int, typer.Option(min=1)]
CpuShare = Annotated[
    float, typer.Option(min=0, help="Share of all blocks in the CPU tier above the disk.")
]
LookAhead = Annotated[float, typer.Option(min=0, max=0.5)]
DiskRate = Annotated[float, typer.Option(min=0, help="Limit of the disk's reads in MB/s; 0: none.")]
ModelName = Annotated[str, typer.Option(help=", ".join(MODELS), callback=_known)]
Threads = Annotated[int, typer.Option(min=1, help="Computing threads per engine.")]
Folder = Annotated[str, typer.Option(help="Folder on the disk to use.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
Keep = Annotated[bool, typer.Option(help="Write to bench/results.")]


def forced(look_ahead: float) -> dict[str, Any]:
    """The options of a world that compares reading early with reading late: nothing is computed
    that could be read."""
    return {"look_ahead": look_ahead, "break_even": False, "max_load_gpu_share": 1.0}


def engine_arguments(model: str, folder: Path, longest: int, in_flight: int) -> dict[str, Any]:
    """The arguments of a real engine that runs ``in_flight`` requests at a time. The GPU has blocks
    for that many requests of ``longest`` tokens, with their answers."""
    blocks = -(-longest // BLOCK_TOKENS) + 1
    gpu_blocks = in_flight * blocks + 1  # vLLM keeps one for itself
    block_bytes = BLOCK_TOKENS * MODELS[model].kv_bytes_per_token
    return {
        "model": str(folder),
        **MODELS[model].settings,
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "kv_cache_memory_bytes": gpu_blocks * block_bytes,
        "num_gpu_blocks_override": gpu_blocks,
        "max_num_seqs": in_flight,
        "max_model_len": blocks * BLOCK_TOKENS,
        "max_num_batched_tokens": 2048,
        "disable_log_stats": False,
        "enable_prefix_caching": True,
    }


def run_and_deliver(
    run: Callable[[C, Progress], Report],
    config: C,
    charts: Sequence[Chart],
    *,
    as_json: bool,
    keep: bool,
    name: str,
) -> None:
    """Run the benchmark and finish the command. SIGTERM ends the engines, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        with progress_bar() as progress:
            report = run(config, progress)
    except SlowDiskError as error:
        raise typer.BadParameter(str(error), param_hint="--disk-mb-s") from error
    deliver(
        report,
        charts,
        command=command_line(report.question),
        as_json=as_json,
        keep=keep,
        name=name,
    )
