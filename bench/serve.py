"""Measures what offloading gains and costs on real vLLM.

Every system serves the same model and answers the same prompts (random tokens) in a separate
engine. All engines stay alive and take turns, batch by batch in random order, so that noise on the
machine affects all of them; ratios are taken per batch. Before each batch vLLM's own prefix cache
is emptied, so that hits come from the tiers.

Each round begins with batches of new prompts: nothing hits, everything is stored. Then come batches
whose prompts share a prefix with those of an earlier batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from bench import arguments
from bench.charts import Chart
from bench.environment import describe
from bench.report import command_line, deliver
from bench.scenario import Report, Row, median, progress_bar
from bench.serve_engine import Engine, EngineError
from bench.serve_numbers import Case, Samples, throughput, verdicts
from bench.serve_systems import (
    BASELINE,
    BLOCK_TOKENS,
    MODELS,
    REAL,
    SYSTEMS,
    Model,
    TierSizes,
    find_model,
)
from demo.tiny_model import BYTE_TOKENS, make_llama

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Config:
    """``sizes``: lengths of prompts in tokens. ``hits``: shares of a prompt that were stored
    before. ``misses``: batches of new prompts per round. ``model``: a name or folder for
    ``find_model``. ``threads``: computing threads of each engine. ``engine``: settings of vLLM's
    ``LLM`` for all engines, which replace this benchmark's."""

    sizes: tuple[int, ...] = (512,)
    hits: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    rounds: int = 8
    misses: int = 4
    requests: int = 4
    in_flight: int = 2
    output_tokens: int = 8
    systems: tuple[str, ...] = tuple(SYSTEMS)
    model: str = "small"
    threads: int = os.cpu_count() or 1
    folder: str = ""
    engine: dict[str, Any] = field(default_factory=dict)


def plotted(report: Report) -> list[Row]:
    """All rows with the intervals of their ratios. Rows of old kept runs have none, so they get
    them from the columns ``low`` and ``high``."""
    return [
        dataclasses.replace(row, intervals={"ratio": (row.values["low"], row.values["high"])})
        if not row.intervals and "low" in row.values
        else row
        for row in report.rows
    ]


CHARTS = (
    Chart("ratio", "throughput, relative to no offloading", rows=plotted),
    Chart("TTFT p50 ms"),
    Chart("tokens/s"),
)


def _is_compared(config: Config) -> bool:
    return not set(config.systems) <= {"none", "cpu", "disk"}


def run(config: Config, progress: Progress) -> Report:
    """Run the benchmark and empty the folder afterwards. Raises ``ValueError`` for a model that
    cannot be measured."""
    model = find_model(config.model)
    root = Path(tempfile.mkdtemp(prefix="bench-serve-", dir=config.folder or None))
    subject = "do offloading systems" if _is_compared(config) else "does kvtiers"
    report = Report(
        "serve",
        f"What {subject} change for a real vLLM engine?",
        dataclasses.asdict(config),
        describe(root),
        notes=_notes(config, model),
    )
    try:
        with _engines(config, model, root, report, progress) as engines:
            samples = _measure(config, engines, report, progress)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    report.rows[:0] = samples.rows()
    report.notes += [*_observed(model, samples), *verdicts(samples)]
    return report


# -- engines -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _engines(
    config: Config, model: Model, root: Path, report: Report, progress: Progress
) -> Iterator[dict[str, Engine]]:
    """Yields the engines that have started, by row name. The report says why the others have not
    started."""
    weights = model.folder or make_llama(root / "model", shape=model.shape)
    with contextlib.ExitStack() as stack:
        begun = {}
        for key in config.systems:
            system = SYSTEMS[key]
            if system.missing:
                _refused(report, system.name, system.missing)
                continue
            folder = root / key
            folder.mkdir(mode=0o700)
            start = system.start(sizes_for(config, model, folder))
            if start.stop is not None:
                stack.callback(start.stop)
            arguments = engine_arguments(config, model, weights) | config.engine
            arguments["kv_transfer_config"] = start.connector
            threads = {"OMP_NUM_THREADS": str(config.threads)}
            begun[system.name] = Engine(arguments, threads | start.env, root / f"{key}.log")
            stack.callback(begun[system.name].close)
        task = progress.add_task("starting", total=len(begun))
        engines = {}
        for name, engine in begun.items():
            try:
                engine.wait()
                engines[name] = engine
            except EngineError as error:
                _refused(report, name, str(error))
            progress.advance(task)
        yield engines


def _refused(report: Report, name: str, why: str) -> None:
    report.rows.append(Row("does not run here", f"{name}: {why}", {}))


def engine_arguments(config: Config, model: Model, weights: Path) -> dict[str, Any]:
    """The settings of vLLM's ``LLM`` that all engines share."""
    longest = max(config.sizes) + config.output_tokens
    blocks = -(-longest // BLOCK_TOKENS) + 1
    in_flight = config.in_flight * blocks * BLOCK_TOKENS
    return {
        "model": str(weights),
        **model.settings,
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "kv_cache_memory_bytes": 2 * in_flight * model.kv_bytes_per_token,
        "max_model_len": blocks * BLOCK_TOKENS,
        "max_num_batched_tokens": 2048,
        "disable_log_stats": False,
        "enable_prefix_caching": True,
    }


def sizes_for(config: Config, model: Model, folder: Path) -> TierSizes:
    """The sizes of the tiers.

    A CPU tier alone can hold a whole round. Above a disk tier it holds two batches, so that all but
    the latest ones are loaded from the disk.
    """
    longest = max(config.sizes) + config.output_tokens
    batch = config.requests * longest * model.kv_bytes_per_token
    everything = (config.misses + len(config.hits) + 1) * len(config.sizes) * batch
    return TierSizes(everything, 2 * batch, everything + (256 << 20), folder)


# -- the script ----------------------------------------------------------------------------------


def _measure(
    config: Config, engines: dict[str, Engine], report: Report, progress: Progress
) -> Samples:
    """Run all rounds, after a short warm-up round that is not counted. A system that restores
    nothing in the warm-up, although something was stored, is excluded from the other rounds."""
    samples, warm = Samples(), Samples()
    short = dataclasses.replace(config, misses=1, hits=config.hits[-1:])
    batches = config.rounds * (config.misses + len(config.hits)) + 1 + len(short.hits)
    task = progress.add_task("serving", total=batches * len(config.sizes))
    order = random.Random(1)
    for turn in range(-1, config.rounds):
        for case, prompts in _script(config if turn >= 0 else short, turn):
            progress.update(task, advance=1, description=f"round {turn + 1}: {case}")
            for name in order.sample(list(engines), len(engines)):
                others = [engine for other, engine in engines.items() if other != name]
                before = sum(engine.cpu_s() for engine in others)
                engines[name].reset()
                batch = engines[name].run(prompts, config.output_tokens, config.in_flight)
                waited_s = sum(engine.cpu_s() for engine in others) - before
                batch = dataclasses.replace(batch, waiting_cpu_s=waited_s)
                (samples if turn >= 0 else warm).add(case, name, batch)
        if turn < 0:
            for name in warm.restored_nothing():
                why = engines.pop(name).complaint()
                _refused(report, name, f"it starts, but restores nothing; its log: {why}")
    return samples


def _script(config: Config, turn: int) -> Iterator[tuple[Case, Prompts]]:
    """The batches of one round."""
    for size in config.sizes:
        fresh = []
        for number in range(config.misses):
            rng = random.Random(f"{size} {turn} {number}")
            fresh.append([_tokens(rng, size) for _ in range(config.requests)])
            yield Case(size, 0.0), fresh[-1]
        for number, hit in enumerate(config.hits):
            known = int(hit * size)
            rng = random.Random(f"{size} {turn} hit {hit}")
            old = fresh[number % len(fresh)]
            yield Case(size, hit), [one[:known] + _tokens(rng, size - known) for one in old]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(BYTE_TOKENS) for _ in range(count)]


# -- notes ---------------------------------------------------------------------------------------


def _notes(config: Config, model: Model) -> list[str]:
    shape, size = model.shape, model.kv_bytes_per_token
    intensity = model.flops_per_token / size
    name, real = REAL
    return [
        "ratio: tokens/s of a batch, relative to the same batch without offloading; median, with "
        "low and high as its 95 % confidence interval. TTFT ratio and CPU ratio likewise; CPU "
        "time counts the whole process tree until its transfers have ended.",
        "Pictures show intervals of 95 % for the medians of tokens/s and TTFT p50, from batch to "
        "batch.",
        f"TTFT: from passing a request to vLLM until its first token, with {config.in_flight} "
        "requests at a time. With few rounds, p99 is the maximum of fewer than 100 values.",
        "restored: prompt tokens that were loaded from outside, by vLLM's own count; from disk: "
        "tokens that kvtiers read from the disk tier.",
        "hooks: share of the time that vLLM's threads spent in kvtiers' hooks; threads: CPU time "
        "of kvtiers' threads, as a share of the same time. Together they are about the most that "
        "offloading can cost, and they hardly vary with noise.",
        f"Model: {shape.layers} layers of {shape.hidden}, {_weights(model)} weights, "
        f"{size // 1024} KiB of KV "
        f"cache per token, {intensity:,.0f} operations per byte of it ({name}: {real:,.0f}).",
        f"Each engine computes with {config.threads} threads, on {os.cpu_count()} cores: copies, "
        "disk I/O and vLLM's scheduler compete with the model for them.",
    ]


def _weights(model: Model) -> str:
    is_random = model.folder is None or "load_format" in model.settings
    return "random" if is_random else "real"


def _observed(model: Model, samples: Samples) -> list[str]:
    """Describe how fast KV cache was produced, and how busy the machine was."""
    kv = model.kv_bytes_per_token
    plain = [
        batch
        for case, systems in samples.batches.items()
        for batch in systems.get(BASELINE, ())
        if case.hit == 0.0
    ]
    everything = [
        batch
        for systems in samples.batches.values()
        for found in systems.values()
        for batch in found
    ]
    notes = []
    if plain:
        speed = median([throughput(batch) for batch in plain])
        notes.append(
            f"Computing took {1e6 / speed:.0f} us per token and produced {kv * speed / 1e6:.0f} "
            "MB/s of KV cache."
        )
    others = [(batch.other_cpu_s - batch.waiting_cpu_s) / batch.seconds for batch in everything]
    waiting = [batch.waiting_cpu_s / batch.seconds for batch in everything]
    notes.append(
        f"During a batch, other processes used {median(others):.1%} of a core (median; maximum "
        f"{max(others):.1%}), and the waiting engines together {median(waiting):.1%} (vLLM's "
        f"polling threads)."
    )
    return notes


# -- command line --------------------------------------------------------------------------------


def _share(text: str) -> float:
    found = float(text)
    if not 0 <= found <= 1:
        raise ValueError("must be from 0 to 1")
    return found


def _known_model(name: str) -> str:
    try:
        find_model(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from None
    return name


def _settings(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"no JSON: {error}", param_hint="--engine") from None
    if not isinstance(found, dict):
        raise typer.BadParameter("a JSON object is expected", param_hint="--engine")
    return found


def register(app: typer.Typer) -> None:
    """Add ``python -m bench serve``."""
    plain = Config()

    @app.command("serve", help=__doc__)
    def serve(
        sizes: Annotated[str, typer.Option(help="Prompt lengths, in tokens.")] = "512",
        hits: Annotated[
            str, typer.Option(help=("Shares of the prompts that were stored before."))
        ] = "0.25,0.5,0.75,1",
        rounds: Annotated[int, typer.Option(min=1)] = plain.rounds,
        misses: Annotated[
            int, typer.Option(min=1, help=("Batches of new prompts per round."))
        ] = plain.misses,
        requests: Annotated[int, typer.Option(min=1, help="Requests per batch.")] = plain.requests,
        in_flight: Annotated[int, typer.Option(min=1)] = plain.in_flight,
        output_tokens: Annotated[int, typer.Option(min=1)] = plain.output_tokens,
        systems: str = ",".join(SYSTEMS),
        model: Annotated[
            str, typer.Option(help=f"{', '.join(MODELS)}, or a folder with a config.json.")
        ] = plain.model,
        threads: Annotated[
            int, typer.Option(min=1, help="Computing threads per engine.")
        ] = plain.threads,
        folder: Annotated[str, typer.Option(help="Folder on the disk to use.")] = "",
        engine: Annotated[
            str, typer.Option(help="Settings of vLLM's LLM for all engines, as JSON.")
        ] = "{}",
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
        keep: Annotated[bool, typer.Option(help="Write to bench/results.")] = False,
    ) -> None:
        config = Config(
            arguments.values("--sizes", sizes, arguments.count),
            arguments.values("--hits", hits, _share) if hits else (),
            rounds,
            misses,
            requests,
            in_flight,
            output_tokens,
            arguments.words("--systems", systems, SYSTEMS),
            _known_model(model),
            threads,
            folder,
            _settings(engine),
        )
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the engines end, too
        with progress_bar() as progress:
            report = run(config, progress)
        deliver(
            report,
            CHARTS,
            command=command_line("serve"),
            as_json=as_json,
            keep=keep,
            name="serving-against-others" if _is_compared(config) else "serving-with-and-without",
        )


if __name__ == "__main__":
    # this module can be imported without the packages that other benchmarks need
    alone = typer.Typer()
    register(alone)
    alone()
