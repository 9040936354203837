"""Parsing configurations: the documented form, the defaults, the arithmetic, and the text of every
refusal.

The texts are in ``tests/data/messages``. To accept changed ones, run ``KVTIERS_REWRITE=1 python -m
pytest tests/offload/config/test_schema.py`` and review the result.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.config.fields import REQUIRED, Field, PolicyConfig, choice
from offload.config.memory_limits import MemoryLimit
from offload.config.options import CPU_FIELDS, TIER_FIELDS, TOP_FIELDS
from offload.config.schema import (
    CPU_CAPACITY_MAX,
    CPU_CAPACITY_MIN,
    CpuConfig,
    OffloadConfig,
    TierConfig,
    default_config,
    default_cpu_capacity,
    parse_config,
    slot_counts,
)
from offload.config.tier_capacity import check_capacity
from offload.config.tier_types import TIER_TYPES, TierType, register_tier_type
from offload.errors import ConfigError
from offload.sizes import GIB, MIB
from tests.scripts import load_script
from tiers.lmdb.options import LmdbOptions

MESSAGES = Path(__file__).parent.parent.parent / "data" / "messages"
REFERENCE = Path(__file__).parent.parent.parent.parent / "docs" / "reference" / "configuration.md"
REWRITE = os.environ.get("KVTIERS_REWRITE") == "1"

CONTRACT = json.loads(
    """{"cpu": {"capacity": "8GiB", "policy": "lru"},
        "tiers": [{"type": "lmdb", "path": "/var/cache/kv", "capacity": "200GiB",
                   "policy": "lru"}]}"""
)


def tier(**changes: Any) -> dict[str, Any]:
    return {"type": "lmdb", "path": "/kv", "capacity": "1GiB", **changes}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in tier().items() if key != name}


def cpu(capacity: Any = "1GiB", **more: Any) -> dict[str, Any]:
    return {"cpu": {"capacity": capacity, **more}}


REFUSED: dict[str, Any] = {
    "not-an-object": ["cpu"],
    "unknown-top": {**cpu(), "chunk_block": 2},
    "unknown-far": {**cpu(), "zzz": 2},
    "unknown-cpu": cpu(capcity="1GiB"),
    "unknown-tier": {**cpu(), "tiers": [tier(pth="/x")]},
    "unknown-tier-option-of-another-type": {**cpu(), "tiers": [tier(type="file", direct_io="off")]},
    "misplaced": {**cpu(load_timeout_s=1), "capacity": 1, "path": "/x", "tiers": [tier(pin="off")]},
    "cpu-not-an-object": {"cpu": "8GiB"},
    "tiers-not-a-list": {**cpu(), "tiers": tier()},
    "tier-not-an-object": {**cpu(), "tiers": ["lmdb"]},
    "size-word": cpu("forty"),
    "size-ambiguous": cpu("8G"),
    "size-unit": cpu("8GiX"),
    "size-zero": cpu(0),
    "size-negative": cpu(-1),
    "size-bool": cpu(True),
    "size-float": cpu(8e9),
    "size-null": cpu(None),
    "size-huge": cpu("9EiB"),
    "tier-type-missing": {**cpu(), "tiers": [without("type")]},
    "tier-type-unknown": {**cpu(), "tiers": [tier(type="lmbd")]},
    "tier-type-wrong": {**cpu(), "tiers": [tier(type=["lmdb"])]},
    "path-missing": {**cpu(), "tiers": [without("path")]},
    "path-relative": {**cpu(), "tiers": [tier(path="kv")]},
    "path-dots": {**cpu(), "tiers": [tier(path="/var/../kv")]},
    "path-empty": {**cpu(), "tiers": [tier(path="")]},
    "path-nul": {**cpu(), "tiers": [tier(path="/k\0v")]},
    "path-half-character": {**cpu(), "tiers": [tier(path="/k\ud800v")]},
    "path-number": {**cpu(), "tiers": [tier(path=7)]},
    "path-twice": {**cpu(), "tiers": [tier(), tier(path="/kv/")]},
    "path-nested": {**cpu(), "tiers": [tier(), tier(path="/kv/inner")]},
    "capacity-missing": {**cpu(), "tiers": [without("capacity")]},
    "policy-number": cpu(policy=3),
    "policy-without-name": cpu(policy={"size": 3}),
    "policy-strange-name": cpu(policy="a b"),
    "io-threads": {**cpu(), "tiers": [tier(io_threads=0), tier(path="/b", io_threads=10_000)]},
    "watermarks-order": {**cpu(), "tiers": [tier(high_watermark=0.7, low_watermark=0.8)]},
    "watermarks-range": {**cpu(), "tiers": [tier(high_watermark=1.5, low_watermark=0)]},
    "recovery": {**cpu(), "tiers": [tier(recovery="quite")]},
    "compression": {**cpu(), "tiers": [tier(compression="gzip")]},
    "encryption": {**cpu(), "tiers": [tier(encryption="/key"), tier(path="/b", encryption={})]},
    "encryption-key-file": {**cpu(), "tiers": [tier(encryption={"key_file": "key", "iv": 1})]},
    "timeouts": {**cpu(), "load_timeout_s": "2s", "fence_timeout_s": 0},
    "timeouts-not-finite": {
        **cpu(),
        "load_timeout_s": float("nan"),
        "fence_timeout_s": float("inf"),
    },
    "numbers-larger-than-any-float": {**cpu(), "load_timeout_s": 10**400, "chunk_blocks": 10**400},
    "address-with-a-huge-port": {
        **cpu(),
        "tiers": [{"type": "mooncake", "master": "h:" + "9" * 5000}],
    },
    "chunk-blocks": {**cpu(), "chunk_blocks": 1.5},
    "numbers-not-booleans": {**cpu(), "chunk_blocks": True, "load_timeout_s": True},
    "require-salt": {**cpu(), "require_salt": "yes"},
    "budgets": {
        **cpu(),
        "max_inflight_load": "2GiB",
        "max_inflight_store": "3GiB",
        "staging": "600MiB",
    },
    "all-at-once": {
        "cpu": {"capacity": "8G", "polcy": "lru"},
        "tiers": [
            {"type": "lmdb", "path": "kv", "capacity": "200GiB", "recovery": "off!"},
            {"type": "tape", "capacity": -1},
        ],
        "chunks": 3,
    },
}


def compare(name: str, text: str) -> None:
    path = MESSAGES / f"{name}.txt"
    if REWRITE:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert path.read_text() == text + "\n"


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_configuration_is_refused_with_this_text(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(REFUSED[name])
    compare(f"config-{name}", str(caught.value))


def test_no_text_file_is_unused() -> None:
    names = {path.stem.removeprefix("config-") for path in MESSAGES.glob("config-*.txt")}
    assert {name for name in names if not name.startswith(("check-", "machine-"))} == set(REFUSED)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(REFUSED["all-at-once"])
    assert [problem.where for problem in caught.value.problems] == [
        "$.chunks",
        "$.cpu.polcy",
        "$.cpu.capacity",
        "$.tiers[0].path",
        "$.tiers[0].recovery",
        "$.tiers[1].type",
        "$.tiers[1].path",
        "$.tiers[1].capacity",
    ]


def test_the_documented_form_is_parsed() -> None:
    config = parse_config(CONTRACT)
    assert config.cpu.capacity == 8 * GIB
    assert config.cpu.policy == PolicyConfig("lru")
    (disk,) = config.tiers
    assert (disk.type, disk.path, disk.capacity) == ("lmdb", "/var/cache/kv", 200 * GIB)
    assert disk.policy.spec == "lru"
    assert disk.options == {
        "direct_io": "auto",
        "scrub": "idle",
        "scrub_rate": 8 * MIB,
        "scrub_period_s": 604_800.0,
        "shared": False,
    }


def test_the_cpu_tier_adapts_and_lower_tiers_are_lru_by_default() -> None:
    config = parse_config({"cpu": {"capacity": "8GiB"}, "tiers": [tier()]})
    assert config.cpu.policy.spec == "adaptive"
    assert config.tiers[0].policy.spec == "lru"


def test_a_policy_has_three_forms() -> None:
    for raw, spec in (
        ("lru", "lru"),
        ("my_pkg.policy:Mine", "my_pkg.policy:Mine"),
        ({"name": "lru"}, "lru"),
        ({"name": "arc", "ghosts": 3}, {"name": "arc", "ghosts": 3}),
    ):
        assert parse_config(cpu(policy=raw)).cpu.policy.spec == spec


def test_a_configuration_can_be_sent_to_workers() -> None:
    config = parse_config(CONTRACT)
    assert pickle.loads(pickle.dumps(config)) == config


def test_paths_are_normalized() -> None:
    config = parse_config({**cpu(), "tiers": [tier(path="//var//cache/./kv/")]})
    assert config.tiers[0].path == "/var/cache/kv"


def test_neighbouring_folders_are_not_duplicates() -> None:
    parse_config({**cpu(), "tiers": [tier(path="/kv"), tier(path="/kv2")]})


def test_every_option_is_accepted_with_its_default() -> None:
    """The parser accepts every default, so the reference can be copied."""
    for fields in (CPU_FIELDS, TIER_FIELDS, TOP_FIELDS, *(t.fields for t in TIER_TYPES.values())):
        for field in fields:
            plain = isinstance(field.default, bool | int | float | str)
            if plain:
                problems: list[Any] = []
                assert field.kind.read(field.default, "$", problems) == field.default
                assert problems == []


def test_the_tables_and_the_parsed_configuration_have_the_same_defaults() -> None:
    for struct, table in (
        (CpuConfig, CPU_FIELDS),
        (TierConfig, TIER_FIELDS),
        (OffloadConfig, TOP_FIELDS),
    ):
        defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
        for field in table:
            if (
                isinstance(field.default, bool | int | float | str)
                and field.default is not REQUIRED
            ):
                assert defaults[field.name] == field.default, field.name


def test_each_type_of_tier_has_its_own_number_of_io_threads() -> None:
    mooncake = {"type": "mooncake", "master": "10.0.0.1:50051"}
    config = parse_config({**cpu(), "tiers": [tier(), tier(path="/b", type="file"), mooncake]})
    assert [each.io_threads for each in config.tiers] == [8, 8, 4]
    assert LmdbOptions().io_threads == TierConfig("lmdb", "/kv", 0).io_threads == 8
    config = parse_config({**cpu(), "tiers": [tier(io_threads=3), mooncake | {"io_threads": 5}]})
    assert [each.io_threads for each in config.tiers] == [3, 5]


def test_without_configuration_the_machine_decides_the_cpu_tier() -> None:
    config, lines = default_config(MemoryLimit(24 * GIB, 20 * GIB, "cgroup"))
    assert config.cpu.capacity == 6 * GIB
    assert config.tiers == ()
    assert config.staging <= config.cpu.capacity // 2
    compare("config-check-default", "\n".join(lines))
    assert parse_config({}) == parse_config(None) == default_config()[0]


@given(st.integers(0, 1 << 46))
def test_the_default_capacity_is_a_quarter_within_bounds(memory: int) -> None:
    capacity = default_cpu_capacity(memory)
    assert CPU_CAPACITY_MIN <= capacity <= CPU_CAPACITY_MAX
    assert capacity <= max(CPU_CAPACITY_MIN, memory // 4)
    assert capacity in (CPU_CAPACITY_MIN, CPU_CAPACITY_MAX) or memory // 4 - capacity < 256 * MIB


SIZES = st.integers(1, 4 * GIB)


def sized(capacity: int, tiers: int, staging: int | None) -> OffloadConfig:
    raw = cpu(capacity)
    raw["tiers"] = [tier(path=f"/{index}", capacity=capacity) for index in range(tiers)]
    if staging is not None:
        raw["staging"] = max(1, min(staging, capacity // 2))
    return parse_config(raw)


@settings(deadline=None)
@given(st.integers(2, 64 * GIB), st.integers(0, 2), st.none() | SIZES, SIZES, st.integers(1, 16))
def test_slots_and_staging_stay_inside_the_capacity(
    capacity: int, tiers: int, staging: int | None, slot: int, ranks: int
) -> None:
    config = sized(capacity, tiers, staging)
    counts = slot_counts(config, slot, ranks)
    if counts.slots:
        assert (counts.slots + counts.staging) * slot * ranks <= capacity
    assert counts.staging >= (1 if tiers else 0)
    bad = {problem.where for problem in check_capacity(config, slot, ranks)}
    assert ("$.cpu.capacity" in bad) == (counts.slots == 0)


@settings(deadline=None)
@given(st.integers(2, GIB), st.integers(0, 1), st.none() | SIZES, SIZES, st.integers(1, 8))
def test_following_a_capacity_hint_works(
    capacity: int, tiers: int, staging: int | None, slot: int, ranks: int
) -> None:
    """No problem is left after a user has followed the hints."""
    config = sized(capacity, tiers, staging)
    problems = check_capacity(config, slot, ranks)
    raw = cpu(capacity)
    raw["tiers"] = [tier(capacity=capacity) for _ in range(tiers)]
    for problem in problems:
        hint = problem.fix.removeprefix("Give at least ").removesuffix(".")
        if problem.where == "$.cpu.capacity":
            raw["cpu"]["capacity"] = hint
        else:
            raw["tiers"][0]["capacity"] = hint
    if staging is not None:
        raw["staging"] = config.staging
    assert check_capacity(parse_config(raw), slot, ranks) == []


def test_a_size_too_small_for_one_chunk_is_refused_with_this_text() -> None:
    raw = {**cpu("1MiB"), "tiers": [tier(capacity="1MB")]}
    problems = check_capacity(parse_config(raw), 2 * MIB, 2)
    compare("config-check-too-small", str(ConfigError(problems)))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_json_is_a_configuration_or_a_config_error(data: st.DataObject) -> None:
    """No JSON value makes the parser fail in another way."""

    def section(fields: tuple[Field, ...], extra: tuple[str, ...] = ()) -> Any:
        names = st.sampled_from([field.name for field in fields] + [*extra, "other"])
        return st.dictionaries(names, JSON_VALUES, max_size=4)

    raw = data.draw(section(TOP_FIELDS) | JSON_VALUES)
    if isinstance(raw, dict):
        raw["cpu"] = data.draw(section(CPU_FIELDS))
        entry = section(TIER_FIELDS).map(lambda found: {"type": "lmdb", **found})
        raw["tiers"] = data.draw(st.lists(entry | JSON_VALUES, max_size=2))
    problems = []
    try:
        parse_config(raw)
    except ConfigError as error:
        problems = list(error.problems)
        assert problems, "the error names no problem"  # either outcome is right
    for problem in problems:
        assert problem.where.startswith("$")
        assert str(problem).isprintable()


def test_other_packages_can_add_types_of_tiers() -> None:
    option = Field("colour", choice("red", "blue"), "red", "Of the tape.")
    register_tier_type(TierType("tape", "For this test.", (option,)))
    try:
        raw = {**cpu(), "tiers": [tier(type="tape", colour="blue")]}
        assert parse_config(raw).tiers[0].options == {"colour": "blue"}
        raw["tiers"][0]["colour"] = "green"
        with pytest.raises(ConfigError, match=r"colour: must be"):
            parse_config(raw)
        with pytest.raises(ValueError, match="already"):
            register_tier_type(TierType("tape", "Again."))
    finally:
        del TIER_TYPES["tape"]


def test_the_reference_is_the_one_generated_from_the_code() -> None:
    marker = "<!-- generated: everything below -->\n"
    text = REFERENCE.read_text()
    head, found, _ = text.partition(marker)
    assert found, "the marker is missing"
    tables = load_script("config_reference").tables()
    if REWRITE:
        REFERENCE.write_text(head + marker + "\n" + tables)
    assert REFERENCE.read_text() == head + marker + "\n" + tables


STORE = {"type": "mooncake", "master": "10.0.0.1:50051"}


def test_a_store_needs_only_its_master() -> None:
    [tier] = parse_config({"cpu": {"capacity": "1GiB"}, "tiers": [STORE]}).tiers
    assert (tier.path, tier.capacity, tier.shared) == ("", 1 << 30, True)
    assert (tier.options["protocol"], tier.options["metadata"]) == ("tcp", "")
    none = parse_config({"cpu": {"capacity": "1GiB"}, "tiers": [STORE | {"segment": 0}]})
    assert none.tiers[0].capacity == 0


def test_every_problem_of_a_store_is_found() -> None:
    wrong = {
        "type": "mooncake",
        "path": "/x",
        "protocol": "udp",
        "segment": "some",
        "device": "a b",
        "recovery": "off",
    }
    with pytest.raises(ConfigError) as caught:
        parse_config({"cpu": {"capacity": "1GiB"}, "tiers": [wrong, STORE | {"master": "here"}]})
    text = str(caught.value)
    for place in ("path", "protocol", "segment", "device", "recovery", "master"):
        assert f"$.tiers[0].{place}" in text, text
    assert "$.tiers[1].master: must be host:port" in text


@pytest.mark.parametrize(
    "table",
    [tier(shared=True), tier(type="file", shared=True), STORE],
    ids=["lmdb", "file", "mooncake"],
)
def test_a_shared_tier_takes_no_policy(table: dict[str, Any]) -> None:
    """The option used to be ignored silently."""
    parse_config({"cpu": {"capacity": "1GiB"}, "tiers": [table]})
    given = table | {"policy": {"name": "slru"}, "high_watermark": 0.99}
    with pytest.raises(ConfigError) as caught:
        parse_config({"cpu": {"capacity": "1GiB"}, "tiers": [given]})
    texts = {problem.where: str(problem) for problem in caught.value.problems}
    assert texts.keys() == {"$.tiers[0].policy", "$.tiers[0].high_watermark"}
    assert "does not apply to a shared tier" in texts["$.tiers[0].policy"]
    if table.get("type") == "lmdb":
        scrubbed = table | {"scrub": "idle", "scrub_rate": "1MiB", "scrub_period_s": 3600}
        with pytest.raises(ConfigError, match="3 problems"):
            parse_config({"cpu": {"capacity": "1GiB"}, "tiers": [scrubbed]})
    if "shared" in table:
        parse_config({"cpu": {"capacity": "1GiB"}, "tiers": [given | {"shared": False}]})
