"""Measures the hits of eviction policies, and their cost per operation relative to our LRU.

The policies take turns replaying the same requests several times. The time of a request is its
minimum over all rounds, because noise on the machine can only increase it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from bench.arguments import known_policies
from bench.charts import Chart, trace_label
from bench.environment import describe
from bench.policies_rivals import VllmPolicy, libcachesim_run
from bench.report import command_line, deliver
from bench.scenario import Report, Row, progress_bar
from policies.base import EvictionPolicy
from policies.registry import make_policy, policy_names
from policies.simulation.simulator import bound, simulate
from policies.simulation.trace import Trace
from policies.simulation.trace_formats import read_trace
from policies.testing import synthetic_trace

LIMIT = "optimum"
LIBCACHESIM = ("LRU", "FIFO", "ARC")


def plotted(report: Report) -> list[Row]:
    """The rows of the middle capacity, which keeps the pictures readable."""
    shares = report.config["shares"]
    suffix = f", {shares[len(shares) // 2]:.1%}"
    return [
        dataclasses.replace(row, case=trace_label(row.case))
        for row in report.rows
        if row.case.endswith(suffix)
    ]


CHARTS = (
    Chart(
        "ratio",
        "time per operation, relative to LRU",
        "What do eviction policies cost per operation?",
        plotted,
        cost=True,
    ),
    Chart(
        "token hits",
        "prompt tokens in the longest leading run of resident blocks, as a share",
        "How much do eviction policies hit?",
        plotted,
    ),
)


@dataclass(frozen=True, slots=True)
class Config:
    """``traces`` are files (none: a synthetic trace). ``shares`` are capacities, as shares of the
    unique blocks. ``part`` is the share of each trace that is replayed, from its start."""

    traces: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    shares: tuple[float, ...] = (0.01, 0.05)
    rounds: int = 5
    part: float = 1.0


def run(config: Config, progress: Progress) -> Report:
    """Replay every trace at every capacity."""
    report = Report(
        "policies",
        "What do eviction policies cost per operation, and how much do they hit?",
        dataclasses.asdict(config),
        dict(describe()),
        notes=[
            "ns/op: per key stored, touched or evicted; ratio: to our LRU in the same run.",
            "token hits: prompt tokens in the longest leading run of resident blocks.",
            "libcachesim: one access per block from Python; a request may evict its own blocks.",
        ],
    )
    traces = [read_trace(path).part(0, config.part) for path in config.traces]
    for trace in traces or [synthetic_trace(1, requests=1000)]:
        for share in config.shares:
            _measure(config, trace, share, report, progress)
    return report


def _measure(
    config: Config, trace: Trace, share: float, report: Report, progress: Progress
) -> None:
    capacity = max(1, int(share * trace.unique_blocks()))
    case = f"{trace.name}, {share:.1%}"
    makers = _makers(config, capacity)
    times: dict[str, list[int]] = {}
    values: dict[str, dict[str, float]] = {}
    task = progress.add_task(case, total=config.rounds * len(makers))
    for _ in range(config.rounds):
        for name, make in makers.items():
            log: list[int] = []
            result = simulate(trace, make(), capacity, name=name, ns_log=log)
            times[name] = [min(pair) for pair in zip(times.get(name, log), log, strict=True)]
            values[name] = {
                "token hits": result.token_hit_ratio,
                "ns/op": sum(times[name]) / max(1, result.policy_ops),
            }
            progress.advance(task)
    best = bound(trace, capacity).token_hit_ratio
    report.rows.append(Row(case, LIMIT, {"token hits": best}))
    for name, found in values.items():
        found["ratio"] = found["ns/op"] / values["lru"]["ns/op"]
        report.rows.append(Row(case, name, found))
    report.rows += _libcachesim_rows(trace, capacity, case, values["lru"]["ns/op"])


def _makers(config: Config, capacity: int) -> dict[str, Callable[[], EvictionPolicy]]:
    """LRU comes first, because the others are compared with it."""
    names = dict.fromkeys(("lru", *(config.policies or policy_names())))
    makers: dict[str, Callable[[], EvictionPolicy]] = {
        name: lambda name=name: make_policy(name)  # type: ignore[misc]  # a default binds the name
        for name in names
    }
    for name in ("lru", "arc"):
        try:
            VllmPolicy(name, capacity)
        except ImportError:
            continue
        makers[f"vllm {name}"] = lambda name=name: VllmPolicy(name, capacity)  # type: ignore[misc]  # as above
    return makers


def _libcachesim_rows(trace: Trace, capacity: int, case: str, lru_ns: float) -> list[Row]:
    rows = []
    for name in LIBCACHESIM:
        try:
            hits, cost = libcachesim_run(trace, name, capacity)
        except ImportError:
            return []
        values = {"token hits": hits, "ns/op": cost, "ratio": cost / lru_ns}
        rows.append(Row(case, f"libcachesim {name}", values))
    return rows


def register(app: typer.Typer) -> None:
    """Add ``python -m bench policies``."""

    @app.command("policies", help=__doc__)
    def policies(
        traces: Annotated[
            list[Path] | None, typer.Argument(exists=True, dir_okay=False, help="Trace files.")
        ] = None,
        policy: Annotated[
            list[str] | None,
            typer.Option(help="Only these policies. Repeatable.", callback=known_policies),
        ] = None,
        share: Annotated[list[float] | None, typer.Option(help="Capacities, 0.01 for 1 %.")] = None,
        rounds: Annotated[int, typer.Option(min=1, help="Number of replays of each policy.")] = 5,
        part: Annotated[
            float, typer.Option(min=0, max=1, help="Share of each trace, from its start.")
        ] = 1.0,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
        keep: Annotated[bool, typer.Option(help="Keep the result in bench/results.")] = False,
    ) -> None:
        config = Config(
            tuple(str(path) for path in traces or ()),
            tuple(policy or ()),
            tuple(share or Config().shares),
            rounds,
            part,
        )
        with progress_bar() as progress:
            report = run(config, progress)
        report.config = {**report.config, "traces": [Path(p).name for p in config.traces]}
        deliver(
            report,
            CHARTS,
            command=command_line("policies"),
            as_json=as_json,
            keep=keep,
            name="policy-cost-and-hits",
        )
