"""The command ``kvtiers simulate``: runs policies on request traces, together with the optimum."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from policies.registry import DEFAULT_TIER_POLICY, make_admission, make_policy, policy_names
from policies.simulation.jobs import (
    INFINITE,
    OPTIMUM,
    Lower,
    PolicyFailedError,
    SimulationJob,
    TraceSource,
    list_jobs,
    list_timed_jobs,
    load,
    parse_block_bytes,
    parse_part,
    parse_spec,
    rounding_note,
    run_jobs,
)
from policies.simulation.report import (
    Outcome,
    json_text,
    table,
    timing_table,
    write_csv,
    write_plot,
)
from policies.simulation.simulator import HINT_LEVELS
from policies.simulation.timing import Speeds
from policies.simulation.trace_formats import FORMATS
from policies.simulation.two_tiers import MODES

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = f"Policies: {', '.join(policy_names())}, or module:Class."

WRONG = 2
"""Exit code for an invalid command line, as in the other commands."""
TIMING_HELP = (
    "Use the arrival times, at these speeds in tokens/s, e.g. prefill=10000,decode=50; also "
    "read=20000, in_flight=16 and rate=1 (the defaults). Needs --lower-capacity."
)
LOOK_AHEAD = 0.25
PROCESSES_MAX = 1024
PLOT_SUFFIXES = (".png", ".svg", ".pdf")

BlockTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens of a block, if not the default.")
]
BlockBytes = Annotated[
    str, typer.Option(help="Size of a block, e.g. 2MiB, for capacities in bytes.")
]
LowerPolicy = Annotated[
    str, typer.Option(help=f"Policy of the lower tier. (default: {DEFAULT_TIER_POLICY})")
]
LookAhead = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=0.5,
        help=f"With --timing: share of the upper tier to read ahead. (default: {LOOK_AHEAD})",
    ),
]
Processes = Annotated[
    int, typer.Option(min=0, max=PROCESSES_MAX, help="Processes (0: one per core).")
]


def simulate(
    traces: Annotated[list[Path], typer.Argument(help="Trace files (.jsonl or .jsonl.gz).")],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Name or module:Class, optionally with ,option=value. Repeatable."),
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(help="Capacity: 5% of the unique blocks, 800blocks or 10GiB. Repeatable."),
    ] = None,
    lower_capacity: Annotated[str, typer.Option(help="Adds a lower tier of this capacity.")] = "",
    lower_policy: LowerPolicy = "",
    mode: Annotated[str, typer.Option(help=", ".join(MODES))] = "write-through",
    admission: Annotated[str, typer.Option(help="Admission policy (of the lower tier).")] = "",
    hints: Annotated[
        str, typer.Option(help=f"Hints that policies get: {', '.join(HINT_LEVELS)}.")
    ] = "none",
    format: Annotated[
        str, typer.Option(help="Trace format: auto, kvtiers, mooncake, bailian, kv-events.")
    ] = "auto",
    block_tokens: BlockTokens = None,
    block_bytes: BlockBytes = "",
    timing: Annotated[str, typer.Option(help=TIMING_HELP)] = "",
    look_ahead: LookAhead = None,
    part: Annotated[str, typer.Option(help="Only this part of each trace, e.g. 0.5:1.")] = "0:1",
    jobs: Processes = 0,
    csv: Annotated[Path | None, typer.Option(help="Write the rows as CSV.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot hit ratios (needs matplotlib).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run eviction policies on request traces, with Belady's optimum and an infinite cache.

    With --timing, follow the arrival times, with and without look-ahead.
    """
    sys.path.append(str(Path.cwd()))  # for module:Class; last, so that it hides no other module
    below = lower_policy or DEFAULT_TIER_POLICY
    lower = Lower(lower_capacity, below, mode) if lower_capacity else None
    capacities = capacity or ["1%", "5%", "10%"]
    _refuse(
        *_wrong_words(mode, hints, format),
        *_wrong_tiers(mode, lower, admission, lower_policy),
        *_wrong_timing(timing, look_ahead, mode, lower, plot),
        *_wrong_policies([*(policy or []), below], admission),
    )
    share = LOOK_AHEAD if look_ahead is None else look_ahead
    kind = {"timing": timing, "look_ahead": share} if timing else {"admission": admission}
    try:
        size = parse_block_bytes(block_bytes)
        options: dict[str, Any] = {"block_bytes": size, "hints": hints, "lower": lower}
        sources = [TraceSource(str(one), format, block_tokens, parse_part(part)) for one in traces]
        wanted = _list(sources, policy, capacities, options | kind)
        notes = _rounded(sources, [*capacities, *filter(None, [lower_capacity])], size)
        _check_outputs(csv, plot)
        outcomes = _run(wanted, jobs or os.cpu_count() or 1)
    except PolicyFailedError as error:
        _end(str(error), 1)
    except (ValueError, OSError) as error:
        _end(f"{_text_of(error)}{_hint(traces, as_json)}", WRONG)
    _show(outcomes, notes, as_json)
    _write(outcomes, csv, plot)


def _list(
    sources: list[TraceSource],
    policies: list[str] | None,
    capacities: list[str],
    options: dict[str, Any],
) -> list[SimulationJob]:
    jobs_of = list_timed_jobs if "timing" in options else list_jobs
    names = policies or ["lru", "adaptive"]
    return [job for each in sources for job in jobs_of(each, names, capacities, **options)]


def _show(outcomes: list[Outcome], notes: list[str], as_json: bool) -> None:
    if as_json:
        print(json_text(outcomes, notes))
        return
    screen = _screen()
    is_timed = any(job.timing for job, _ in outcomes)
    screen.print(timing_table(outcomes) if is_timed else table(outcomes))
    for note in notes:
        screen.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def _wrong_words(mode: str, hints: str, format: str) -> Iterator[str]:
    """Checks options that have a fixed set of values."""
    known = {
        "--mode": (mode, MODES),
        "--hints": (hints, HINT_LEVELS),
        "--format": (format, ("auto", *FORMATS)),
    }
    for option, (given, words) in known.items():
        if given not in words:
            near = difflib.get_close_matches(given, words, n=1)
            fix = f'Did you mean "{near[0]}"?' if near else f"Use one of: {', '.join(words)}."
            yield f'{option}: is unknown (got "{given}"). {fix}'


def _wrong_tiers(
    mode: str, lower: Lower | None, admission: str, lower_policy: str
) -> Iterator[str]:
    """Reports options that contradict each other."""
    if lower is None and lower_policy:
        yield "--lower-policy: has no effect without a lower tier. Give --lower-capacity."
    if lower is None and mode in MODES and mode != MODES[0]:
        yield f"--mode: {mode} needs a lower tier. Give --lower-capacity."
    if lower is not None and mode in MODES and (mode == "selective") != bool(admission):
        yield (
            "--admission: belongs to --mode selective, and is required there. "
            "Give both or neither, for example --mode selective --admission second-use."
        )


def _wrong_timing(
    timing: str, look_ahead: float | None, mode: str, lower: Lower | None, plot: Path | None
) -> Iterator[str]:
    if not timing:
        if look_ahead is not None:
            yield "--look-ahead: has no effect without arrival times. Give --timing."
        return
    try:
        Speeds.parse(timing)
    except ValueError as error:
        yield f"--timing: {error}"
    if lower is None:
        yield "--timing: needs a lower tier. Give --lower-capacity."
    if mode != MODES[0]:
        yield f"--mode: --timing knows only {MODES[0]} (got {mode})."
    if plot:
        yield "--plot: plots hit ratios, which --timing does not compare. Use --csv."


def _wrong_policies(specs: list[str], admission: str) -> Iterator[str]:
    for text in specs:
        if problem := _problem_of(text, make_policy):
            yield f"policy {text}: {problem}"
    if admission and (problem := _problem_of(admission, make_admission)):
        yield f"--admission: {problem}"


def _problem_of(text: str, make: Callable[[Any], object]) -> str:
    try:
        make(parse_spec(text))
    except ValueError as error:
        return str(error)
    return ""


def _rounded(sources: list[TraceSource], capacities: list[str], block_bytes: int) -> list[str]:
    """Report capacities that differ from the requested ones."""
    found = []
    for source in sources:
        trace = load(source)
        unique = trace.unique_blocks()
        notes = [rounding_note(text, unique, block_bytes) for text in dict.fromkeys(capacities)]
        found += [f"{trace.name}: {note}" for note in notes if note]
    return found


def _refuse(*problems: str) -> None:
    """Report all problems and end; continue if there are none."""
    if not problems:
        return
    if len(problems) == 1:
        _end(problems[0], WRONG)
    lines = "".join(f"\n  {problem}" for problem in problems)
    _end(f"{len(problems)} problems:{lines}", WRONG)


def _write(outcomes: list[Outcome], csv: Path | None, plot: Path | None) -> None:
    """Write the requested files; end the program if one cannot be written."""
    for path, write in ((csv, write_csv), (plot, write_plot)):
        if path is None:
            continue
        try:
            write(outcomes, path)
        except ImportError as error:
            _end(f"--plot needs matplotlib ({error}). Run: pip install matplotlib", 1)
        except OSError as error:
            reason = error.strerror or error
            _end(f"{path}: cannot be written: {reason}. Name another file", 1)


def _end(text: str, code: int) -> NoReturn:
    """Report on stderr what is wrong, and end."""
    print(f"kvtiers simulate: {text}", file=sys.stderr)
    raise typer.Exit(code)


def _text_of(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{error.filename}: does not exist. Name a trace (.jsonl or .jsonl.gz)"
    if isinstance(error, IsADirectoryError):
        return f"{error.filename}: is a folder. Name a trace in it (.jsonl or .jsonl.gz)"
    return str(error)


def _hint(traces: list[Path], as_json: bool) -> str:
    """A hint for a user who wrote a file name after ``--json``, which takes none."""
    names = [path.name for path in traces if path.suffix == ".json" or path == Path("-")]
    if not as_json or not names:
        return ""
    return (
        f". --json takes no file name, because it prints to stdout: {names[0]} was read as a trace"
    )


def _check_outputs(csv: Path | None, plot: Path | None) -> None:
    """Check before the runs that the outputs can be written."""
    for path in (csv, plot):
        if path and not path.parent.is_dir():
            raise ValueError(f"no folder {path.parent} to write {path.name} in")
    if plot and plot.suffix not in PLOT_SUFFIXES:
        raise ValueError(f"a plot ends in {', '.join(PLOT_SUFFIXES)} (got {plot.name})")


def _screen() -> Console:
    from rich.console import Console

    screen = Console()
    # do not truncate lines in files and pipes
    return screen if screen.is_terminal else Console(width=150)


def _run(jobs: list[SimulationJob], processes: int) -> list[Outcome]:
    """Run all jobs, with a progress bar for the policies' requests if stderr is a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    counted = [job for job in jobs if job.policy not in (OPTIMUM, INFINITE)]
    total = sum(len(load(job.source).requests) // 256 * 256 for job in counted)
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(f"{len(jobs)} runs", total=total)
        outcomes = list(run_jobs(jobs, min(processes, len(jobs)), lambda n: bar.advance(task, n)))
        bar.update(task, total=1, completed=1)
    order = {job: number for number, job in enumerate(jobs)}
    return sorted(outcomes, key=lambda outcome: order[outcome[0]])


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(epilog=EPILOG)(simulate)


if __name__ == "__main__":
    app()
