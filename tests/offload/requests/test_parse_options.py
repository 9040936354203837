"""The planner obeys clients' controls in ``kv_transfer_params``; invalid values are described."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.index.capacity import ByteCapacity, SlotCapacity
from offload.index.chunk_batch import UNKNOWN, ChunkBatch, GroupInfo, RequestOrigin
from offload.index.request_options import NO_CONTROLS, Controls
from offload.index.tier_index import TierIndex
from offload.layout.keys import CPU
from offload.messages.plan import IN_SLAB, STAGED
from offload.messages.report import JobResult, StepReport
from offload.planner.planner import Planner, PlannerSettings
from offload.planner.work_limits import WorkLimits
from offload.planner.write_through import QueueSettings
from offload.requests import parse_options
from offload.requests.parse_options import (
    CONTROL_NAMES,
    INVALID_MAX,
    KNOWN_NAMES,
    NAMES_MAX,
    parse_controls,
    parse_hints,
)
from policies.admission import SecondUse, WriteBudget
from policies.eviction.lru import LruPolicy

TIERS = ("lmdb", "file")
GROUP = 0
KEYS = [bytes([n]) * 32 + bytes(4) for n in range(16)]


def read(**options: Any) -> tuple[Controls, list[str]]:
    return parse_controls({"kvtiers": options}, TIERS)


def test_all_controls_are_read() -> None:
    controls, rejected = read(
        no_store=True, no_load=True, max_load_tokens=64, tiers=["cpu", "file"], pin_s=3
    )
    assert rejected == []
    both = frozenset({CPU, 1})
    assert controls == Controls(True, True, 64, both, both, 3.0)


def test_reading_and_writing_are_separate() -> None:
    controls, rejected = read(tiers={"read": ["lmdb"], "write": ["cpu"]})
    assert not rejected
    assert (controls.read, controls.write) == (frozenset({0}), frozenset({CPU}))
    assert not controls.no_store
    assert not controls.no_load


def test_an_empty_list_of_tiers_means_neither_stored_nor_loaded() -> None:
    controls, _ = read(tiers=[])
    assert controls.no_store
    assert controls.no_load
    controls, _ = read(tiers={"write": []})
    assert controls.no_store
    assert not controls.no_load


OF_OTHERS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_block_ids": [1, 2],
    "remote_host": "h",
    "remote_port": 1,
    "tp_size": 8,
    "lmcache.skip_save": True,
    "priority": 3,
    "session": "s",
    "kvtiers_report": {"ignored": ["no_store"]},
    "kv_transfer_id": 1,
    "store": True,
    "cache": {"no_store": True},
}
"""Parameters of other connectors and routers beside our object, and our own report sent with the
next request."""


@pytest.mark.parametrize(
    "params", [None, {}, {"kvtiers": None}, {"kvtiers": {}}, 3, [], OF_OTHERS, {3: True, "": 1}]
)
def test_no_controls(params: object) -> None:
    assert parse_controls(params, TIERS) == (NO_CONTROLS, [])


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"kvtier": {"no_store": True}}, "'kvtier' is not read: did you mean \"kvtiers\"?"),
        ({"kv_tiers": {"tiers": ["cpu"]}}, "'kv_tiers' is not read: did you mean \"kvtiers\"?"),
        ({"KVTIERS": {"no_stor": True}}, "'KVTIERS' is not read"),
        ({"kvtires": "no_store"}, "'kvtires' is not read"),
        (
            {"no_store": True},
            '\'no_store\' is not read there: write {"kvtiers": {"no_store": ...}}',
        ),
        ({"no-store": "yes"}, "'no-store' is not read there"),
        ({"noStore": 1}, "'noStore' is not read there"),
        ({"no_stores": []}, "'no_stores' is not read there"),
        ({"tiers": ["cpu"]}, "'tiers' is not read there"),
        ({"kvtiers": {"session": "s"}, "no_store": True}, "'no_store' is not read there"),
    ],
)
def test_possible_privacy_controls_keep_the_prompt_off_the_tiers(
    params: dict[str, Any], said: str
) -> None:
    controls, [rejected] = parse_controls({**OF_OTHERS, **params}, TIERS)
    assert said in rejected
    assert controls == Controls(no_store=True, is_doubtful=True)


@pytest.mark.parametrize(
    "params",
    [
        {"kvtier": {"session": "s", "no_load": True}},
        {"kvtier": None},
        {"kvtier": {"no_store": False}},
        {"no_store": False},
        {"tiers": None},
        {"no_load": True},
        {"max_load_token": 4},
    ],
)
def test_similar_names_without_a_privacy_meaning_are_only_reported(params: dict[str, Any]) -> None:
    controls, rejected = parse_controls(params, TIERS)
    assert (controls, len(rejected)) == (NO_CONTROLS, 1)


@pytest.mark.parametrize(
    "options",
    [{"no_stor": True}, {"foo": False}, {"pin_s": 3, "x": 1}, {3: 1}, 3, "no_store", [], True],
)
def test_an_unknown_name_in_our_object_stores_nothing(options: Any) -> None:
    """The client may have intended the unknown name to prevent storing."""
    controls, rejected = parse_controls({"kvtiers": options}, TIERS)
    assert controls.no_store
    assert controls.is_doubtful
    assert controls.pin_s == (3 if isinstance(options, dict) and "pin_s" in options else 0)
    assert rejected == [], "the parser of hints describes it"
    assert len(parse_hints({"kvtiers": options})[1]) == 1


def test_the_nearest_name_is_reported() -> None:
    for name, meant in (("no_stor", "no_store"), ("tier", "tiers"), ("sesion", "session")):
        assert f'did you mean "{meant}"?' in parse_hints({"kvtiers": {name: True}})[1][0]
    [text] = parse_hints({"kvtiers": {"colour": 1}})[1]
    assert "known: session, " in text
    assert "no_store" in text


def test_many_names_of_a_client_are_compared_within_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names are compared on vLLM's scheduler thread, so the number of comparisons is limited,
    whatever a client sends."""
    asked: list[str] = []
    monkeypatch.setattr(parse_options, "nearest", lambda name, *_: asked.append(name))
    many = {f"no_storage_at_all_{number}": 1 for number in range(10_000)}
    assert parse_controls({**many, "kvtiers": many}, TIERS)[0].is_doubtful
    parse_hints({"kvtiers": many})
    assert len(asked) <= NAMES_MAX + INVALID_MAX


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"no_store": "yes"}, "no_store must be true or false (got 'yes')"),
        ({"no_load": 1}, "no_load must be true or false"),
        ({"max_load_tokens": -1}, "number of tokens"),
        ({"max_load_tokens": 1.5}, "number of tokens"),
        ({"max_load_tokens": True}, "number of tokens"),
        ({"pin_s": -1}, "seconds from 0 to 86400"),
        ({"pin_s": float("nan")}, "seconds from 0"),
        ({"pin_s": 1e9}, "seconds from 0"),
        ({"pin_s": 10**5000}, "got a int"),
        ({"tiers": "cpu"}, "must be a list of tiers"),
        ({"tiers": ["disk"]}, "no tier 'disk' (tiers: cpu, lmdb, file)"),
        ({"tiers": [["cpu"]]}, "no tier ['cpu']"),
        ({"tiers": {"reed": ["cpu"]}}, "no part 'reed'"),
    ],
)
def test_a_wrong_control_is_described(options: dict[str, Any], part: str) -> None:
    _, rejected = read(**options)
    assert len(rejected) == 1
    assert part in rejected[0]


def test_a_wrong_list_of_tiers_allows_none() -> None:
    """A client wanted to keep a prompt off some tier: no tier may get it by mistake."""
    for value in ("cpu", ["dsk"], 7, {"wirte": ["cpu"]}, {"cpu": True}):
        controls, _ = read(tiers=value)
        assert controls.no_store
        assert controls.no_load
    controls, _ = read(tiers={"read": ["cpu"], "writes": ["cpu"]})
    assert controls.no_store
    assert controls.read == {CPU}


def test_an_unreadable_no_store_stores_nothing() -> None:
    for value in ("yes", 1, "false", [], {}):
        assert read(no_store=value)[0].no_store, value
        assert not read(no_load=value)[0].no_load, value
    for value in (None, False):
        assert not read(no_store=value)[0].no_store, value


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from((*CONTROL_NAMES, "read", "write")) | st.text(), inner)
    ),
)


@given(_json)
def test_no_json_raises_and_what_is_described_is_short(options: Any) -> None:
    controls, rejected = parse_controls({"kvtiers": options}, TIERS)
    _, more = parse_hints({"kvtiers": options})
    assert all(len(text) < 250 for text in (*rejected, *more))
    assert len(more) <= INVALID_MAX
    assert 0 <= controls.pin_s <= 86_400


@pytest.mark.parametrize("inside", [list, lambda values: dict(enumerate(values)), lambda v: [[v]]])
def test_few_of_many_values_are_looked_at(inside: Any) -> None:
    """To describe all of them would stop every request of the server for seconds."""
    shown: list[int] = []

    class Value:
        def __repr__(self) -> str:
            shown.append(1)
            return "0"

    values = inside([Value() for _ in range(10_000)])
    options: dict[str, Any] = dict.fromkeys(KNOWN_NAMES, values)
    _, rejected = parse_controls({"kvtiers": options}, TIERS)
    _, more = parse_hints({"kvtiers": options})
    assert len(rejected) + len(more) >= len(KNOWN_NAMES) - 1
    assert len(shown) < 1000


def test_thousands_of_names_are_described_briefly() -> None:
    _, rejected = parse_hints({"kvtiers": {f"n{number}": 1 for number in range(10_000)}})
    assert len(rejected) == INVALID_MAX


# -- obeyed by the planner -----------------------------------------------------------------------


def batch(numbers: range, origin: RequestOrigin = UNKNOWN) -> ChunkBatch:
    depths = [16 * (n + 1) for n in numbers]
    return ChunkBatch([KEYS[n] for n in numbers], GROUP, list(numbers), depths, origin)


class Bed:
    """A planner with a disk on which every job succeeds."""

    def __init__(
        self,
        slots: int = 8,
        disk_chunks: int = 100,
        admission: Any = None,
        cpu_admission: Any = None,
    ) -> None:
        cpu = TierIndex("cpu", SlotCapacity(slots), LruPolicy())
        self.disk = TierIndex("lmdb", ByteCapacity(disk_chunks * 10), LruPolicy())
        groups = {GROUP: GroupInfo("full", 16, (10,))}
        self.planner = Planner(
            groups,
            cpu,
            [self.disk],
            PlannerSettings(
                WorkLimits(load_chunks=4, load_blocks=4),
                queue_settings=[QueueSettings(admission or (), flying_max=8)],
                admission=cpu_admission,
            ),
        )
        (self.queue,) = self.planner.write_through.queues

    def store(self, numbers: range, **options: Any) -> None:
        origin = self.origin(**options)
        self.planner.stores.plan(batch(numbers, origin))
        self.finish()

    @staticmethod
    def origin(**options: Any) -> RequestOrigin:
        params = {"kvtiers": options}
        return RequestOrigin(b"", parse_hints(params)[0], parse_controls(params, TIERS)[0])

    def finish(self) -> None:
        for _ in range(3):
            plan = self.planner.step()
            jobs = [*plan.stores, *plan.write_throughs, *plan.loads]
            self.planner.complete(StepReport({job.job: JobResult() for job in jobs}))
        self.planner.check()


def test_a_prompt_can_be_kept_off_the_disk() -> None:
    bed = Bed()
    bed.store(range(2), tiers=["cpu"])
    assert KEYS[0] in bed.planner.cpu
    assert not len(bed.disk)
    bed.store(range(2, 4), tiers=["cpu", "lmdb"])
    assert KEYS[2] in bed.disk


def test_only_allowed_tiers_are_read() -> None:
    bed = Bed()
    bed.store(range(2))
    bed.store(range(2, 3), tiers=["cpu"])
    disk_only, cpu_only = bed.origin(tiers=["lmdb"]), bed.origin(tiers=["cpu"])
    assert not any(
        KEYS[2] in holder for holder in bed.planner.sources.holders(disk_only.controls.read)
    )
    assert bed.planner.loads.plan("r", [batch(range(2), disk_only)]).by_tier == {0: 32}
    items = bed.planner.step().loads[0].items
    assert {(item.tier, item.slot) for item in items} == {(0, STAGED)}
    bed = Bed()
    bed.store(range(2))
    bed.planner.cpu.drop(KEYS[:1])
    assert not any(
        KEYS[0] in holder for holder in bed.planner.sources.holders(cpu_only.controls.read)
    )
    # Whatever a caller requests, nothing is read from a tier that is not allowed.
    bed.planner.loads.plan("r", [batch(range(1), cpu_only)])
    assert bed.planner.step().loads[0].items[0].tier == IN_SLAB


def test_low_priority_uses_only_free_space() -> None:
    bed = Bed(slots=2, disk_chunks=2)
    bed.store(range(2), priority="low")
    assert KEYS[1] in bed.planner.cpu, "free space must be used"
    bed.store(range(2, 4), priority="low")
    assert KEYS[2] not in bed.planner.cpu
    assert KEYS[2] not in bed.disk
    bed.store(range(2, 4))
    assert KEYS[2] in bed.planner.cpu
    assert KEYS[2] in bed.disk


def test_low_priority_does_not_displace_on_the_disk() -> None:
    bed = Bed(slots=8, disk_chunks=2)
    bed.store(range(4), priority="low")
    assert len(bed.planner.cpu) == 4
    assert len(bed.disk) == 2
    assert bed.disk.evictions == 0
    bed.store(range(4, 6))
    assert KEYS[4] in bed.disk
    bed.store(range(6, 8), priority="low")
    assert KEYS[6] in bed.planner.cpu
    assert KEYS[4] in bed.disk, "chunks of other requests filled the disk"
    assert KEYS[6] not in bed.disk


def test_low_priority_may_use_half_of_the_load_budget() -> None:
    bed = Bed()
    bed.store(range(4))
    low = bed.origin(priority="low")
    bed.planner.loads.plan("r", [batch(range(1))])
    assert bed.planner.loads.can_load(1, 1, low)
    assert not bed.planner.loads.can_load(2, 2, low)
    assert bed.planner.loads.can_load(2, 2)
    assert bed.planner.loads.can_load(0, 1, low)
    assert not bed.planner.loads.can_load(0, 2, low), "at most half of the GPU blocks as well"
    assert not bed.planner.loads.can_load(2, 0, low)
    assert bed.planner.loads.can_load(0, 2)


def test_high_priority_passes_admission_but_not_the_write_budget() -> None:
    bed = Bed(admission=[SecondUse()])
    bed.store(range(2))
    assert not len(bed.disk)
    assert bed.queue.refused == 2
    bed.store(range(2, 4), priority="high")
    assert KEYS[2] in bed.disk
    bed = Bed(cpu_admission=SecondUse())
    bed.store(range(1))
    assert KEYS[0] not in bed.planner.cpu
    bed.store(range(1, 2), priority="high")
    assert KEYS[1] in bed.planner.cpu
    bed = Bed(admission=[WriteBudget(1e-9, burst_bytes=15)])
    bed.store(range(2), priority="high")
    assert len(bed.disk) == 1
    assert bed.queue.refused == 1
