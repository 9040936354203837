"""Checks that the default policy hits at least as much as LRU, and measures how much of the gap
between LRU and the optimum it closes.

Replays whole traces and parts of them at several capacities, without hints and with the ends of
sessions, if the trace has them. Compares the results with LRU and Belady's optimum.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from bench.charts import Chart, trace_label
from bench.environment import describe
from bench.report import command_line, deliver
from bench.scenario import Report, Row, progress_bar
from policies.registry import DEFAULT_CPU_POLICY
from policies.simulation.jobs import OPTIMUM, SimulationJob, TraceSource, load, parse_part, run_jobs
from policies.simulation.simulator import Result

ALLOWANCE = 0.005
"""The default policy's token hit ratio may be this much lower than that of LRU."""
FLOORS = {("mooncake_conversation", 0.01): 0.068, ("cc_agentic", 0.01): 0.642}
"""Minimum token hit ratio of the default policy on whole traces, by prefix of the file name."""
END = " + ends"


def _labelled(report: Report) -> list[Row]:
    return [dataclasses.replace(row, case=trace_label(row.case)) for row in report.rows]


CHARTS = (Chart("gap closed", "share of LRU's gap to the optimum that is closed", rows=_labelled),)


@dataclass(frozen=True, slots=True)
class Config:
    """``traces`` are files; ``shares`` are capacities, as shares of the unique blocks of each part;
    ``parts`` are ranges of the requests, as shares."""

    traces: tuple[str, ...]
    shares: tuple[float, ...] = (0.005, 0.01, 0.05, 0.1, 0.25)
    parts: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    processes: int = 1


def run(config: Config, progress: Progress) -> Report:
    """Run all simulations. The notes state which gates are met."""
    report = Report(
        "gates",
        f"How much does the default policy ({DEFAULT_CPU_POLICY}) gain over LRU?",
        dataclasses.asdict(config),
        dict(describe()),
        notes=[
            "token hits: prompt tokens in the longest leading run of resident blocks.",
            "over lru: token hits minus those of LRU.",
            "gap closed: the same, as a share of the optimum's lead over LRU.",
            '"+ ends": the policy is notified of the end of each session; - if a trace has none.',
        ],
    )
    jobs = [
        job
        for path in config.traces
        for part in config.parts
        for share in config.shares
        for job in _jobs(TraceSource(path, part=part), share)
    ]
    task = progress.add_task("runs", total=len(jobs))
    found: dict[SimulationJob, Result] = {}
    for job, result in run_jobs(jobs, config.processes, lambda _: None):
        found[job] = result
        progress.advance(task)
    report.rows = _rows(jobs, found)
    report.notes += _verdicts(report, config)
    return report


def _jobs(source: TraceSource, share: float) -> list[SimulationJob]:
    trace = load(source)
    capacity = max(1, int(share * trace.unique_blocks()))
    names = [(OPTIMUM, "none"), ("lru", "none"), (DEFAULT_CPU_POLICY, "none")]
    if any(request.last for request in trace.requests):
        names.append((DEFAULT_CPU_POLICY, "end"))
    return [SimulationJob(source, name, capacity, share, hints=hints) for name, hints in names]


def _case(job: SimulationJob) -> str:
    name = Path(job.source.path).name.partition(".")[0]
    part = (
        "" if job.source.part == (0.0, 1.0) else f" [{job.source.part[0]:g}:{job.source.part[1]:g}]"
    )
    return f"{name}{part}, {job.share:.1%}"


def _rows(jobs: list[SimulationJob], found: dict[SimulationJob, Result]) -> list[Row]:
    rows = []
    limits: dict[tuple[str, str], float] = {}
    for job in jobs:
        case, hits = _case(job), found[job].token_hit_ratio
        values = {"token hits": hits}
        if job.policy in (OPTIMUM, "lru"):
            limits[case, job.policy] = hits
        else:
            over, gap = hits - limits[case, "lru"], limits[case, OPTIMUM] - limits[case, "lru"]
            values["over lru"] = over
            values["gap closed"] = over / gap if gap > 0 else float("nan")
        rows.append(Row(case, job.policy + (END if job.hints == "end" else ""), values))
    return rows


def _verdicts(report: Report, config: Config) -> list[str]:
    ours = [row for row in report.rows if row.series == DEFAULT_CPU_POLICY]
    behind = [row.case for row in ours if row.values["over lru"] < -ALLOWANCE]
    notes = [
        f"gate, at least LRU - {ALLOWANCE}: met in {len(ours) - len(behind)} of {len(ours)} cases"
        + "".join(f"; not in {case}" for case in behind)
        + "."
    ]
    for (name, share), floor in FLOORS.items():
        for row in ours:
            if row.case.startswith(name) and row.case.endswith(f"512, {share:.1%}"):
                hits = row.values["token hits"]
                verdict = "met" if hits >= floor else "not met"
                notes.append(f"gate, {row.case}, at least {floor}: {verdict} ({hits:.4f}).")
    return notes


def register(app: typer.Typer) -> None:
    """Add ``python -m bench gates``."""

    @app.command("gates", help=__doc__)
    def gates(
        traces: Annotated[
            list[Path], typer.Argument(exists=True, dir_okay=False, help="Trace files.")
        ],
        share: Annotated[list[float] | None, typer.Option(help="Capacities, 0.01 for 1 %.")] = None,
        part: Annotated[
            list[str] | None, typer.Option(help="Part of each trace, e.g. 0.5:1. Repeatable.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
        keep: Annotated[bool, typer.Option(help="Keep the result in bench/results.")] = False,
    ) -> None:
        try:
            spans = tuple(parse_part(text) for text in part or ["0:1"])
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--part") from None
        config = Config(
            tuple(str(path) for path in traces),
            tuple(share or Config(()).shares),
            spans,
            os.cpu_count() or 1,
        )
        with progress_bar() as progress:
            report = run(config, progress)
        report.config = {**report.config, "traces": [Path(p).name for p in config.traces]}
        deliver(
            report,
            CHARTS,
            command=command_line("gates"),
            as_json=as_json,
            keep=keep,
            name="adaptive-against-lru",
        )
