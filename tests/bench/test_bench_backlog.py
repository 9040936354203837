"""``bench backlog`` on real engines with a tiny model, its verdicts on planted numbers, and the
kernel's limit on reads."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from bench import backlog, slow_disk
from bench.backlog_prediction import measured_speeds
from bench.backlog_worlds import (
    AHEAD,
    DEFAULTS,
    DISK,
    HOST,
    ON_DISK,
    PLAIN,
    RIVAL,
    WAITS,
    WORLDS,
    Config,
    worlds,
)
from bench.charts import COLOURS, Chart, system_of
from bench.report import save
from bench.serve_engine import Batch, Engine
from bench.serve_systems import MODELS
from bench.slow_disk import SlowDisk, SlowDiskError
from policies.simulation.timing import Speeds


@pytest.mark.thorough
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_real_engines_read_each_prompt_once_in_both_worlds_with_a_disk(tmp_path: Path) -> None:
    config = Config(
        prompts=6,
        size=96,
        in_flight=2,
        output_tokens=4,
        rounds=1,
        disk_mb_s=0.0,
        model="tiny",
        threads=1,
        folder=str(tmp_path),
    )
    report = backlog.run(config, Progress(disable=True))
    rows = {row.series: row.values for row in report.rows}
    assert list(rows) == list(worlds())
    assert [note for note in report.notes if note.startswith("INVALID")] == []
    for world, row in rows.items():
        if world == RIVAL:  # has other chunks and no metrics of ours
            continue
        assert row["total s"] >= row["TTFT p99 s"] >= row["TTFT mean s"] > 0.0
        if world in (DEFAULTS, WAITS):  # a tiny model computes faster than a disk is read
            continue
        assert row["restored"] == pytest.approx(0.0 if world == PLAIN else 1.0)
        assert (row["read / needed"] > 0) == (world in ON_DISK)
        assert (row["read ahead"] > 0) == (world == AHEAD)
        assert (row["blocks held"] > 0) == (world != PLAIN)
    assert rows[AHEAD]["read / needed"] == pytest.approx(rows[DISK]["read / needed"])
    assert list(tmp_path.iterdir()) == []
    save(report, "command", [Chart("TTFT mean s"), Chart("total s")], tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".png"}


def test_each_world_has_a_colour_of_its_own() -> None:
    systems = [system_of(world) for world in (*WORLDS, RIVAL)]
    assert len({COLOURS[system] for system in systems if system}) == len(systems)


SHARE = Config().restorable / Config().size


def _batches(seconds: Mapping[str, float], restored: float = SHARE) -> dict[str, list[Batch]]:
    """Eight rounds, in which each world takes this long for one prompt of 1,000 tokens."""
    found = {}
    for world, took in seconds.items():
        tokens = 0.0 if world == PLAIN else 1000 * restored
        counters = {
            'vllm:prompt_tokens_by_source{source="external_kv_transfer"}': tokens,
            'vllm:kvtiers_read_bytes{tier="lmdb"}': 3.0 * Config().prompt_bytes,
        }
        batch = Batch(took, (took / 2,), 1000, 1, counters, held_block_s=6.0 * took)
        found[world] = [batch] * 8
    return found


FAST = {PLAIN: 4.0, HOST: 1.0, DISK: 2.0, AHEAD: 1.1, DEFAULTS: 1.0, WAITS: 0.5}


def test_rows_relate_times_to_the_cpu_tier_and_bytes_to_what_was_needed() -> None:
    rows = {row.series: row for row in backlog.rows(Config(prompts=2), _batches(FAST))}
    assert rows[AHEAD].values["TTFT mean ratio"] == pytest.approx(1.1)
    assert rows[DISK].values["total s"] == 2.0
    assert rows[DISK].intervals["total s"] == (2.0, 2.0)
    assert rows[DISK].values["read / needed"] == pytest.approx(1.5)


@pytest.mark.parametrize(("took", "verdict"), [(1.1, "met"), (1.3, "MISSED")])
def test_a_goal_can_be_missed(took: float, verdict: str) -> None:
    notes = backlog.verdicts(Config(disk_mb_s=25.0), _batches(FAST | {AHEAD: took}))
    *measured, least, read = notes
    assert len(measured) == len(backlog.MEASURES)
    assert all(verdict in note for note in measured)
    assert all("lower in 8 of 8 rounds" in note for note in measured)
    assert "at most 0.250 of those needed in any round (goal 1.05: met)" in read
    # places start after 0.5 and 1.0 s (12.6 MB each at 25 MB/s), beside a TTFT of 0.5 s
    assert "below 2.510 of that" in least


def test_look_ahead_can_cost() -> None:
    notes = backlog.verdicts(Config(), _batches(FAST | {AHEAD: 3.0}))
    measured = notes[: len(backlog.MEASURES)]
    assert all("1.500 of that without" in note for note in measured)
    assert all("lower in 0 of 8 rounds" in note for note in measured)


def test_a_world_without_its_hits_is_named() -> None:
    notes = backlog.verdicts(Config(), _batches(FAST, restored=SHARE / 2))
    wrong = [note.split(":")[1].strip() for note in notes if note.startswith("INVALID")]
    assert wrong == [HOST, DISK, AHEAD]


def test_waits_are_compared_with_look_ahead_alone() -> None:
    notes = backlog.waits(_batches(FAST))
    assert len(notes) == len(backlog.MEASURES)
    assert all("0.500 of that without" in note for note in notes)
    assert all("lower in 8 of 8 rounds" in note for note in notes)


def test_the_simulation_is_given_measured_speeds() -> None:
    """Two prompts of 96 tokens run at a time: computing both takes 2 s, the other 30 tokens 3 s."""
    config = Config(4, 96, 2, 31, disk_mb_s=16.384, model="small")
    plain = Batch(10.0, (2.0, 2.0, 7.0, 7.0), 384, 124, {})
    speeds = measured_speeds(config, [plain])
    token_bytes = MODELS["small"].kv_bytes_per_token
    assert speeds == Speeds(prefill=96, decode=10, read=16.384e6 / token_bytes, in_flight=2)


def test_predictions_stand_beside_measurements() -> None:
    """The disk reads a prompt in 1 s, an answer takes 3 s, and two requests run at a time. Without
    look-ahead each of the two alternates between reading and answering; with it only the first two
    prompts wait."""
    config = Config(8, 97, 2, 31, disk_mb_s=3 * 32 * 16384 / 1e6)
    plain = Batch(20.0, (2.0,) * 2 + (7.0,) * 2 + (12.0,) * 2 + (17.0,) * 2, 776, 248, {})
    mean, total = backlog.predictions(config, _batches(FAST) | {PLAIN: [plain]})
    assert "of that without (measured 0.550)" in mean
    ratio = float(total.split("look-ahead ")[1].split(" ")[0])
    without, with_it = 1 + 4 * (1 + 3), 2 + 4 * 3
    assert ratio == pytest.approx(with_it / without, rel=0.02)
    assert backlog.predictions(dataclasses.replace(config, disk_mb_s=0), {}) == []


def test_a_kernel_that_cannot_slow_the_disk_gives_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(slow_disk, "_disk_of", lambda _folder: "8:0")
    monkeypatch.setattr(slow_disk, "CONTROLLER", tmp_path / "none")
    with pytest.raises(SlowDiskError, match="needs root and the blkio"), SlowDisk(tmp_path, 1):
        raise AssertionError("it must not begin")
    monkeypatch.setattr(slow_disk, "CONTROLLER", tmp_path)
    with SlowDisk(tmp_path, 0) as disk:
        disk.add(1)
    assert list(tmp_path.iterdir()) == [], "a rate of 0 changes nothing"


def test_a_folder_that_is_not_on_a_disk_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(slow_disk, "DEVICES", tmp_path)
    with pytest.raises(SlowDiskError, match="not on a block device"):
        SlowDisk(tmp_path, 1)


def test_the_kernel_slows_a_process_until_the_end(tmp_path: Path) -> None:
    try:
        disk = SlowDisk(tmp_path, 1 << 40)
        with disk:
            pass
    except SlowDiskError as error:
        pytest.skip(str(error))
    waits = [sys.executable, "-c", "input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE) as process, disk:
        disk.add(process.pid)
        groups = Path(f"/proc/{process.pid}/cgroup").read_text().splitlines()
        [name] = [line.rpartition("/")[2] for line in groups if ":blkio:" in line]
        group = slow_disk.CONTROLLER / name
        assert (group / "blkio.throttle.read_bps_device").read_text().split()[1] == str(1 << 40)
        process.communicate(b"\n")
    assert not group.exists()


def test_an_engine_that_is_busy_is_ended_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SIGTERM interrupts the benchmark in this way: nothing waits for the batch that the engine
    runs."""
    engine = Engine({}, {}, tmp_path / "log")
    os.kill(engine.process, signal.SIGSTOP)  # it will not answer

    def asked(self: Engine, *_: object) -> None:
        raise AssertionError("close() must not wait for an answer")

    monkeypatch.setattr(Engine, "_call", asked)
    engine.close()
    assert not Path(f"/proc/{engine.process}").exists(), "only SIGKILL ends a stopped process"


def test_rounds_end_with_the_time(tmp_path: Path) -> None:
    """One round is always measured, and rounds are never cut."""

    class Instant:
        process = 0

        def reset(self) -> None: ...

        def empty_cpu_tier(self, chunks_below: int) -> None: ...

        def run(self, prompts: object, output_tokens: int, in_flight: int) -> Batch:
            return Batch(1.0, (1.0,), 1, 1, {})

    engines: Any = {world: Instant() for world in WORLDS}
    config = Config(prompts=2, rounds=5, minutes=0.0, disk_mb_s=0.0)
    batches = backlog._measure(config, engines, SlowDisk(tmp_path, 0), Progress(disable=True))
    assert {world: len(mine) for world, mine in batches.items()} == dict.fromkeys(engines, 1)
