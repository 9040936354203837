"""``bench replay`` on real engines with a tiny model, its requests and numbers, and the arrivals of
requests."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from rich.progress import Progress
from typer.testing import CliRunner

from bench import backlog_worlds, replay
from bench.__main__ import build
from bench.charts import bars_of, colour_of
from bench.replay import AHEAD, DISK, HOST, WORLDS, Config, Outcome
from bench.report import save
from bench.scenario import Report
from bench.serve_engine import Arrivals, Batch
from bench.serve_systems import BLOCK_TOKENS, MODELS
from policies.simulation.timing import Speeds
from policies.simulation.trace import Request, Trace

TRACE = [
    {"meta": {"name": "turns", "block_tokens": 512, "licence": "none"}},
    *({"t": 7 + n / 2, "in": 512 * n + 700, "out": 9 * n, "r": [[0, 1 + n]]} for n in range(4)),
    {"t": 9, "in": 2048, "out": 9, "r": [[100, 4]]},
    {"t": 10, "in": 2048, "out": 9, "r": [[0, 4]]},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "turns.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in TRACE), encoding="utf-8")
    return path


@pytest.mark.thorough
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_real_engines_hit_what_the_simulator_predicts(trace: Path, tmp_path: Path) -> None:
    """One request at a time, so that each finds what the ones before it have stored."""
    folder = tmp_path / "disk"
    folder.mkdir()
    config = Config(
        trace=str(trace),
        requests=6,
        prompt_blocks=4,
        answer_tokens=4,
        in_flight=1,
        cpu_share=0.6,
        disk_mb_s=0.0,
        model="tiny",
        threads=1,
        folder=str(folder),
    )
    report = replay.run(config, Progress(disable=True))
    rows = {row.series: row.values for row in report.rows}
    assert tuple(rows) == WORLDS
    tokens = [1, 2, 3, 4, 4, 4]
    hits = BLOCK_TOKENS * (0 + 1 + 2 + 3 + 0 + 4)
    for row in rows.values():
        assert row["TTFT p99 s"] >= row["TTFT mean s"] > 0.0
        assert row["TTFT p99 s, predicted"] >= row["TTFT mean s, predicted"] > 0.0
        assert row["hits"] == pytest.approx(hits / sum(BLOCK_TOKENS * n + 1 for n in tokens))
        assert row["hits, predicted"] == pytest.approx(row["hits"])
    assert list(folder.iterdir()) == []
    save(report, "command", replay.CHARTS, folder)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".md", ".png"}


# -- requests --------------------------------------------------------------------------------------


def test_requests_are_shortened_and_arrive_from_time_zero(trace: Path) -> None:
    config = Config(trace=str(trace), requests=4, rate=2, prompt_blocks=3, answer_tokens=10)
    found = replay.requests_of(config)
    assert found.block_tokens == BLOCK_TOKENS
    assert [request.time_s for request in found.requests] == [0.0, 0.25, 0.5, 0.75]
    assert [request.blocks() for request in found.requests] == [[0], [0, 1], [0, 1, 2], [0, 1, 2]]
    assert [request.output_tokens for request in found.requests] == [1, 9, 10, 10]
    assert [request.prompt_tokens for request in found.requests] == [
        BLOCK_TOKENS * blocks + 1 for blocks in (1, 2, 3, 3)
    ]


def test_equal_blocks_have_equal_tokens_and_no_others_do(trace: Path) -> None:
    found = replay.requests_of(Config(trace=str(trace), prompt_blocks=4)).requests
    prompts = [replay.tokens_of(request, number) for number, request in enumerate(found)]
    assert [len(prompt) for prompt in prompts] == [request.prompt_tokens for request in found]
    blocks: dict[tuple[int, ...], int] = {}
    for request, prompt in zip(found, prompts, strict=True):
        for place, block in enumerate(request.blocks()):
            tokens = tuple(prompt[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS])
            assert blocks.setdefault(tokens, block) == block
    assert len(blocks) == 8


def test_without_a_trace_there_are_requests_that_share_prefixes() -> None:
    config = Config()
    found = replay.requests_of(config)
    assert len(found.requests) == config.requests
    assert found.unique_blocks() < sum(request.block_count for request in found.requests) / 2
    assert max(request.block_count for request in found.requests) <= config.prompt_blocks


def test_a_file_that_is_not_a_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    path.write_text("{}\n")
    done = CliRunner().invoke(build(), ["replay", str(path)])
    assert done.exit_code == 2
    assert "TRACE" in done.output


# -- arrivals --------------------------------------------------------------------------------------


def test_requests_are_sent_at_their_times_however_many_are_being_answered() -> None:
    arrivals = Arrivals(3, times_s=[0.0, 1.0, 1.0])
    assert arrivals.due(0.5, flying=0) == (0, 0.0), "late by a step, but it arrived at 0"
    assert arrivals.due(0.9, flying=1) is None
    assert arrivals.due(1.2, flying=1) == (1, 1.0)
    assert arrivals
    assert arrivals.due(1.2, flying=2) == (2, 1.0)
    assert not arrivals
    assert arrivals.due(9.9, flying=0) is None


def test_without_times_a_request_follows_another_one() -> None:
    arrivals = Arrivals(3, in_flight=2)
    assert arrivals.due(0.0, flying=0) == (0, 0.0)
    assert arrivals.due(0.1, flying=1) == (1, 0.1)
    assert arrivals.due(0.2, flying=2) is None
    assert arrivals.due(5.0, flying=1) == (2, 5.0)
    assert not arrivals


# -- numbers ---------------------------------------------------------------------------------------


def test_speeds_come_from_single_prompts_a_full_engine_and_the_limit_of_the_disk() -> None:
    """100 tokens in 2 s; two answers together generate 15 more tokens each in 3 s. Noise does not
    change the median."""
    samples = [
        (Batch(9.0, (ttft,), 100, 16, {}), Batch(seconds, (2.0, 4.0), 200, 32, {}))
        for ttft, seconds in [(2.0, 70.0), (2.0, 7.0), (20.0, 7.0)]
    ]
    config = Config(in_flight=2, disk_mb_s=16.384)
    read = 16.384e6 / MODELS["small"].kv_bytes_per_token
    assert replay.speeds_from(config, samples) == Speeds(50, 5, read, in_flight=2)
    unlimited = dataclasses.replace(config, disk_mb_s=0)
    assert replay.speeds_from(unlimited, samples).read == math.inf


SPEEDS = Speeds(prefill=33, decode=1, read=BLOCK_TOKENS / 4, in_flight=1)
CONFIG = Config(cpu_share=0.5, in_flight=1)


def _outcome(world: str, ttft_s: tuple[float, ...], hits: float) -> Outcome:
    """Three requests of one block, of which the third repeats the first: it takes 1 s to compute a
    prompt, 4 s to read its block, and 1/33 s to compute its last token."""
    requests = [Request(10.0 * n, 33, ((n % 2, 1),), 1) for n in range(3)]
    predicted = replay.predict(CONFIG, Trace("t", BLOCK_TOKENS, requests), world, SPEEDS)
    counters = {
        'vllm:prompt_tokens_by_source{source="external_kv_transfer"}': hits - 2,
        'vllm:prompt_tokens_by_source{source="local_cache_hit"}': 2.0,
    }
    return Outcome(Batch(30.0, ttft_s, 99, 3, counters, other_cpu_s=9.0), SPEEDS, predicted)


def _outcomes(**other: tuple[float, ...]) -> dict[str, Outcome]:
    late = other.get("late", (1.0, 1.0, 4.1))
    return {
        HOST: _outcome(HOST, (1.0, 1.0, 0.04), 32),
        DISK: _outcome(DISK, late, 32),
        AHEAD: _outcome(AHEAD, (1.0, 1.0, 4.1), 32),
    }


def test_rows_relate_the_prediction_to_the_measurement() -> None:
    trace = Trace("t", BLOCK_TOKENS, [])
    found = {row.series: row.values for row in replay.rows(trace, _outcomes())}
    assert found[HOST]["TTFT mean s, predicted"] == pytest.approx((2 + 1 / 33) / 3)
    assert found[DISK]["TTFT p99 s, predicted"] == pytest.approx(4 + 1 / 33)
    assert found[DISK]["TTFT p99 s"] == 4.1
    assert found[DISK]["TTFT p99 s, ratio"] == pytest.approx((4 + 1 / 33) / 4.1)
    assert found[DISK]["hits"] == found[DISK]["hits, predicted"] == pytest.approx(32 / 99)


def test_the_picture_shows_each_prediction_beside_its_measurement() -> None:
    found = replay.rows(Trace("t", BLOCK_TOKENS, []), _outcomes())
    [chart] = replay.CHARTS
    bars = bars_of(Report("replay", "T", {}, {}, found), chart)
    assert bars.series == ["measured", "predicted"]
    assert len(bars.groups) == 2 * len(WORLDS)
    assert bars.values["disk tier, p99", "measured"] == 4.1
    assert bars.values["disk tier, p99", "predicted"] == pytest.approx(4 + 1 / 33)
    assert bars.values[f"{HOST}, mean", "predicted"] == pytest.approx((2 + 1 / 33) / 3)
    assert "lower is better" in chart.axis
    same = [colour_of(world, 0) for world in (backlog_worlds.HOST, *backlog_worlds.ON_DISK[:2])]
    assert bars.colours(0) == bars.colours(1) == same * 2, "those of bench backlog"


def test_a_prediction_that_is_wrong_is_named() -> None:
    *worlds, mean, p99, _ = replay.verdicts(_outcomes())
    assert [note.split(": ")[1] for note in worlds] == [
        "all predictions are within 20% of the measurements"
    ] * 3
    assert "1.000 of that without, predicted 1.000" in mean
    assert "1.000 of that without, predicted 1.000" in p99
    host, disk, ahead, mean, *_ = replay.verdicts(_outcomes(late=(1.0, 1.0, 6.0)))
    assert "DIFFERS by more than 20%: predicted/measured TTFT mean s 0.75, TTFT p99 s 0.67" in disk
    assert "DIFFERS" not in host + ahead
    assert "0.762 of that without, predicted 1.000" in mean
    nothing = _outcomes() | {HOST: _outcome(HOST, (1.0, 1.0, 1.0), 0)}
    assert "hits nan" in replay.verdicts(nothing)[0]


def test_load_of_others_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay.os, "cpu_count", lambda: 3)
    *worlds, read = replay.facts(CONFIG, _outcomes())
    assert [note.split(":")[0] for note in worlds] == list(WORLDS)
    assert all("used 10% of the machine's processor time" in note for note in worlds)
    assert "25 MB/s" in read
    *_, read = replay.facts(dataclasses.replace(CONFIG, disk_mb_s=0.0), _outcomes())
    assert "not slowed" in read
