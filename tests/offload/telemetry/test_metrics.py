"""The table of metrics: its reference is current, its names follow Prometheus, and it contains
everything that is counted."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from offload.messages.report import Observed
from offload.planner.tier_health import TierHealths
from offload.requests.miss_reasons import Reason
from offload.requests.request_log import RequestLog
from offload.telemetry.counters import PlannerStats, WorkerStats
from offload.telemetry.metrics import METRICS, SECTIONS, reference
from offload.telemetry.removed_chunks import Cause, Removed

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
MARK = "<!-- generated: everything below -->\n\n"


def test_the_reference_is_current() -> None:
    head, _, tables = REFERENCE.read_text().partition(MARK)
    if os.environ.get("KVTIERS_REWRITE") == "1":
        REFERENCE.write_text(head + MARK + reference())
        return
    assert tables == reference(), "run it again with KVTIERS_REWRITE=1"


def test_no_name_is_in_two_sections() -> None:
    assert sum(map(len, SECTIONS.values())) == len(METRICS)


@pytest.mark.parametrize("name", METRICS)
def test_names_follow_prometheus(name: str) -> None:
    assert re.fullmatch(r"[a-z][a-z_]*", name)
    assert not name.endswith("_total")
    words = name.split("_")
    for short in ("s", "ms", "us", "mib", "gib", "kb", "time"):
        assert short not in words, "base units, written out"
    assert METRICS[name].text.endswith(".")


class Grows(dict[int, int]):
    """Another thread adds an entry while this dict is iterated."""

    def items(self) -> Any:
        for pair in super().items():
            self[len(self)] = 1
            yield pair


def test_counters_are_read_while_another_thread_counts() -> None:
    worker = WorkerStats()
    worker.read_bytes = Grows({0: 5})
    assert worker.totals()["read_bytes:0"] == 5


def test_every_counter_is_in_the_table() -> None:
    stats = PlannerStats(["lmdb"])
    stats.evicted(0, [b"k"])
    stats.dropped(0, [b"k", b"l"], {b"k"})
    stats.reset([], {0: 1})
    worker = WorkerStats()
    worker.read(0, 1, 1.0)
    worker.wrote(0, 1, 1.0)
    worker.corrupt(0)
    health = TierHealths(["lmdb"])
    health[0].observe(0, Observed(reads_failed=9), 0.0)
    counted = stats.totals() | worker.totals() | health.totals() | RequestLog().totals()
    for flat in counted:
        name, *labels = flat.split(":")
        assert name in METRICS, flat
        assert len(labels) == len(METRICS[name].labels), flat
    assert f"misses:{Reason.EVICTED.value}" in counted


def test_causes_of_removed_chunks_are_counted_and_remembered() -> None:
    stats = PlannerStats(["lmdb"], now=7.0)
    stats.evicted(-1, [b"a", b"b"])
    stats.dropped(0, [b"c", b"d", b"e"], corrupt={b"d"})
    stats.refused(-1, [b"f"], Cause.NO_SPACE)
    stats.stored(0, [b"g"], [b"h"])
    assert stats.removed == {"cpu:evicted": 2, "lmdb:corrupt": 1, "lmdb:lost": 2}
    found = {key: stats.causes.find(key) for key in (b"a", b"c", b"d", b"f", b"h")}
    assert found == {
        b"a": Removed(Cause.EVICTED, -1, 7.0),
        b"c": Removed(Cause.LOST, 0, 7.0),
        b"d": Removed(Cause.CORRUPT, 0, 7.0),
        b"f": Removed(Cause.NO_SPACE, -1, 7.0),
        b"h": Removed(Cause.FAILED, 0, 7.0),
    }
    assert stats.causes.find(b"g") is None
    stats.reset([b"a"], {-1: 3, 0: 0})
    assert stats.removed["cpu:reset"] == 3
    assert stats.causes.find(b"c") is None, "a reset forgets everything"
    assert stats.causes.find(b"a") == Removed(Cause.RESET, -1, 7.0)


def test_hits_and_misses_of_tiers_add_up_to_the_wanted_tokens() -> None:
    stats = PlannerStats(["lmdb", "file"])
    stats.planned({-1: 10, 0: 20, 1: 30})
    stats.missed(40)
    found = {name: (c.hit_tokens, c.missed_tokens) for name, c in stats.tiers.items()}
    assert found == {"cpu": (10, 90), "lmdb": (20, 70), "file": (30, 40)}
