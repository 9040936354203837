"""Every option by name: kind, default and meaning. The reference is printed from these tables.

A new type of tier registers itself here with the options that only it knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.config.fields import (
    REQUIRED,
    Field,
    PolicyConfig,
    address,
    anything,
    choice,
    count,
    encryption,
    flag,
    number,
    path,
    policy,
    size,
    text,
)
from policies.registry import DEFAULT_CPU_POLICY, DEFAULT_TIER_POLICY

LRU = PolicyConfig(DEFAULT_TIER_POLICY)
CPU_POLICY = PolicyConfig(DEFAULT_CPU_POLICY)
ADMIT_ALL = PolicyConfig("all")

CPU_FIELDS = (
    Field(
        "capacity",
        size(),
        None,
        "Host memory for chunks, per server: all ranks together, staging buffers included.",
        "a quarter of the memory limit, 256MiB to 64GiB",
    ),
    Field(
        "policy",
        policy(),
        CPU_POLICY,
        "Which chunks go first when the tier is full.",
        f"`{DEFAULT_CPU_POLICY}`",
    ),
    Field("admission", policy(), ADMIT_ALL, "Which computed chunks may enter at all.", "`all`"),
    Field(
        "pin",
        choice("require", "prefer", "off"),
        "require",
        "With a GPU: page-locked memory. `prefer` goes on without it, slower and with a warning, "
        "where the memlock limit forbids it. Without a GPU nothing is pinned.",
    ),
)

TIER_FIELDS = (
    Field(
        "path",
        path(),
        REQUIRED,
        "Folder of this tier alone; made with mode 0700. No link, no folder of the system, of a "
        "user, of a model, or with other files in it.",
    ),
    Field(
        "capacity",
        size(),
        REQUIRED,
        "Hard limit for everything below `path`, per server: all ranks and all namespaces.",
    ),
    Field(
        "policy",
        policy(),
        LRU,
        "Which records go first when the tier is full. Not for shared tiers, which evict by "
        "themselves.",
        "`lru`",
    ),
    Field("admission", policy(), ADMIT_ALL, "Which chunks may be written at all.", "`all`"),
    Field(
        "io_threads",
        count(1, 64),
        4,
        "Requests in flight, per rank. 8 are enough for one disk, 32 for an array of NVMe disks.",
    ),
    Field(
        "high_watermark",
        number(0.01, 1),
        0.95,
        "Share of `capacity` above which eviction starts, ahead of need.",
    ),
    Field("low_watermark", number(0.01, 1), 0.90, "Share of `capacity` at which eviction stops."),
    Field(
        "reserve",
        size(least=0),
        None,
        "Disk space to leave free for others; stores pause below it.",
        "5 % of the file system, at least 2GiB",
    ),
    Field(
        "write_budget_per_day",
        size(least=0),
        0,
        "Bytes to write per 24 hours (SSD endurance); 0 is no limit. Above it stores are skipped.",
    ),
    Field(
        "recovery",
        choice("off", "quiet", "strict"),
        "quiet",
        "At start: `off` begins empty, `quiet` moves what is damaged aside and goes on, `strict` "
        "refuses to start on damage.",
    ),
    Field(
        "geometry",
        choice("own", "translate", "refuse"),
        "own",
        "Blocks of the same model that engines of other geometry (tensor parallel size, chunks, "
        "layout) left below `path` or in the store: `own` leaves them alone, `translate` reads "
        "them where that is exact and refuses to start where it is not, `refuse` refuses to start "
        "beside them. See the [guide](../guides/geometry.md).",
    ),
    Field(
        "encryption",
        encryption(),
        None,
        "AES-256-GCM at rest with the key in this file: 64 hexadecimal digits, as made by `openssl "
        "rand -hex 32`, mode 0600. A wrong key means misses.",
        "off",
    ),
    Field("compression", choice("off", "zstd"), "off", "Lossless; stops by itself where useless."),
)

TOP_FIELDS = (
    Field("cpu", anything("object"), {}, "The CPU tier, see below.", "`{}`"),
    Field("tiers", anything("list of objects"), [], "Lower tiers, fastest first.", "`[]`"),
    Field(
        "chunk_blocks",
        count(1, 1024),
        1,
        "Blocks per chunk, the unit of offload. Sliding windows, recurrent states and what stands "
        "beside these get fewer where more would cost hits.",
    ),
    Field(
        "staging",
        size(),
        None,
        "Part of `cpu.capacity` through which prefixes longer than the CPU tier are restored from "
        "lower tiers. At least one chunk is taken; without lower tiers none.",
        "a sixteenth of `cpu.capacity`, at most 256MiB",
    ),
    Field(
        "max_inflight_load",
        size(),
        None,
        "Bytes of loads under way at a time; beyond it a hit counts as a miss.",
        "half of `cpu.capacity`",
    ),
    Field(
        "max_inflight_store",
        size(),
        None,
        "Bytes of stores under way at a time; beyond it a store is skipped.",
        "a quarter of `cpu.capacity`",
    ),
    Field(
        "load_timeout_s",
        number(0.001, 600, " s"),
        10.0,
        "Longest time for one load; after it the prefix is recomputed.",
    ),
    Field(
        "fence_timeout_s",
        number(0.001, 60, " s"),
        5.0,
        "Longest time to wait for stores out of blocks that vLLM gives to another request; after "
        "it the stores are abandoned.",
    ),
    Field(
        "max_load_gpu_share",
        number(0.01, 1),
        0.5,
        "Share of the GPU's KV blocks that loads under way may hold; beyond it a hit counts as a "
        "miss.",
    ),
    Field(
        "tier_timeout_s",
        number(0.01, 600, " s"),
        5.0,
        "Longest time for one operation of a lower tier; each such period that one is late counts "
        "as a failure.",
    ),
    Field(
        "breaker_failures",
        count(1, 1000),
        3,
        "Failures in a row after which a lower tier is not asked any more, but for a probe after "
        "5 s and then after waits that double up to a minute.",
    ),
    Field(
        "break_even",
        flag(),
        True,
        "Leave a lower tier out of lookups while loading from it is measured to be slower than "
        "computing.",
    ),
    Field(
        "lookup_timeout_s",
        number(0.001, 10, " s"),
        0.05,
        "Longest time that a request waits to hear what a shared tier holds; after it, but not "
        "before three steps, it goes on with what is known. Other requests do not wait.",
    ),
    Field(
        "remember_s",
        number(0, 3600, " s"),
        5.0,
        "How long it is remembered what a shared tier holds and what not.",
    ),
    Field(
        "kv_layout",
        choice("vllm", "block_contiguous"),
        "vllm",
        "How layers lie in the GPU's KV cache. `block_contiguous` asks vLLM to put all layers of a "
        "block side by side, so that a block is one copy; vLLM then does not start where an "
        "attention kernel needs blocks smaller than `--block-size`, and keeps its own layout, "
        "with a warning, where a kernel cannot read this one.",
    ),
    Field(
        "require_salt",
        flag(),
        False,
        "Offload only requests with a `cache_salt`, so that no unsalted prompt is ever shared.",
    ),
    Field(
        "max_pinned_share",
        number(0, 1),
        0.25,
        "Share of each tier that clients may have kept for a time (`pin_s`); 0 allows none.",
    ),
    Field(
        "record_trace",
        path(),
        None,
        "File to record the prompts of this server to, for `kvtiers simulate`: which of them share "
        "blocks, and when, but no content. Replaced at each start; `.gz` is packed. With several "
        "data-parallel replicas the number of each is added to the name.",
        "off",
    ),
    Field(
        "record_requests",
        path(),
        None,
        "File for `kvtiers why`: a line for each of the last `recent_requests` requests at least, "
        "with what it found in which tier and why it did not find more; no content. Lines of the "
        "server before stay at first; with several data-parallel replicas the number of each is "
        "added to the name.",
        "off",
    ),
    Field(
        "recent_requests",
        count(1, 100_000),
        256,
        "How many requests are remembered with what they found.",
    ),
    Field(
        "verify",
        choice("off", "device"),
        "off",
        "To hunt a fault: `device` digests every chunk in the KV cache right after it was computed "
        "and again after it was loaded, and compares. A difference is counted, logged with key, "
        "group and layer, and fails the load, so that the chunk is recomputed. Costs computing "
        "time. See the [guide](../guides/serve.md#when-an-answer-looks-wrong).",
    ),
    Field(
        "verify_path",
        path(),
        None,
        "Folder for the digests of `verify`, so that what was stored before a restart, or by "
        "another engine with the same folder, can be compared as well. It only grows: remove it "
        "afterwards.",
        "in memory only",
    ),
)


@dataclass(frozen=True, slots=True)
class TierType:
    """A type of tier that a configuration may name.

    ``fields`` are its own options beside ``TIER_FIELDS``; ``needs_local_disk`` refuses network
    file systems; ``shared`` ones are written to by other engines as well, and so are others whose
    option ``shared`` is set; ``without`` names the ``TIER_FIELDS`` that mean nothing to it.
    ``summary`` is for the reference.
    """

    name: str
    summary: str
    fields: tuple[Field, ...] = ()
    needs_local_disk: bool = False
    shared: bool = False
    without: frozenset[str] = frozenset()

    @property
    def common(self) -> tuple[Field, ...]:
        """The fields of ``TIER_FIELDS`` that this type takes."""
        return tuple(field for field in TIER_FIELDS if field.name not in self.without)


TIER_TYPES: dict[str, TierType] = {}


def register_tier_type(tier_type: TierType) -> None:
    """Make a type of tier known to configurations. Raises ``ValueError`` if the name is taken."""
    if tier_type.name in TIER_TYPES:
        raise ValueError(f"tier type {tier_type.name!r} is registered already")
    TIER_TYPES[tier_type.name] = tier_type


register_tier_type(
    TierType(
        "lmdb",
        "LMDB index with payloads in preallocated extents beside it; needs a local disk.",
        (
            Field(
                "direct_io",
                choice("auto", "off"),
                "auto",
                "Bypass the page cache where the file system can, or never.",
            ),
            Field(
                "scrub",
                choice("idle", "off"),
                "idle",
                "`idle` verifies records while the tier has nothing else to do, and removes "
                "damaged ones. Not for shared tiers.",
            ),
            Field(
                "scrub_rate",
                size(),
                8 << 20,
                "Bytes per second to read for that at most, per server.",
                "`8MiB`",
            ),
            Field(
                "scrub_period_s",
                number(60, 31_536_000, " s"),
                604_800.0,
                "Time in which each record has its turn once.",
            ),
            Field(
                "shared",
                flag(),
                False,
                "Several engines of this machine use `path` together, under one `capacity`: all of "
                "them say `true`. See the [guide](../guides/share-on-one-host.md).",
            ),
        ),
        needs_local_disk=True,
    )
)
register_tier_type(
    TierType(
        "file",
        "One record per file; for file systems LMDB cannot use.",
        (
            Field(
                "shared",
                flag(),
                False,
                "Several engines, also of several machines, use `path` together, on NFS, Lustre, "
                "CephFS or a local disk: all of them say `true`. `capacity` is then that of each "
                "namespace. See the [guide](../guides/share-on-one-host.md).",
            ),
        ),
    )
)
register_tier_type(
    TierType(
        "mooncake",
        "A [Mooncake](https://github.com/kvcache-ai/Mooncake) store that servers of many machines "
        "share; needs the extra `mooncake`. It keeps its capacity itself. See the guide "
        "[Sharing](../guides/share.md).",
        (
            Field("master", address(), REQUIRED, "Where `mooncake_master` listens."),
            Field(
                "metadata",
                text("http://10.0.0.1:8080/metadata"),
                "",
                "URL of the metadata server, or `P2PHANDSHAKE` for none.",
                "port 8080 of the master's machine",
            ),
            Field(
                "segment",
                size(least=0),
                1 << 30,
                "Memory that this server gives to the store, all ranks together, beside "
                "`cpu.capacity`. What lies there is gone for everybody when the server stops; 0 "
                "gives none.",
                "`1GiB`",
            ),
            Field(
                "protocol",
                choice("tcp", "rdma"),
                "tcp",
                "How bytes travel. `rdma` was never run by the authors.",
            ),
            Field("device", text("mlx5_0,mlx5_1"), "", "RDMA devices to use.", "all"),
            Field(
                "host",
                text("10.0.0.7"),
                "",
                "Address by which other servers reach this machine.",
                "the one on the way to the master",
            ),
        ),
        shared=True,
        without=frozenset(
            {
                "path",
                "capacity",
                "high_watermark",
                "low_watermark",
                "reserve",
                "recovery",
                "encryption",
                "compression",
            }
        ),
    )
)


_CPU_NAMES = {field.name for field in CPU_FIELDS}
_TIER_ONLY = {field.name for field in TIER_FIELDS} - _CPU_NAMES
ELSEWHERE_TOP = {
    **dict.fromkeys(_CPU_NAMES, '"cpu" or an entry of "tiers"'),
    **dict.fromkeys(_TIER_ONLY | {"type"}, 'an entry of "tiers"'),
}
ELSEWHERE_CPU = {
    **dict.fromkeys(_TIER_ONLY, 'an entry of "tiers"'),
    **{field.name: "the top level" for field in TOP_FIELDS},
}
ELSEWHERE_TIER = {
    "pin": '"cpu"',
    **{field.name: "the top level" for field in TOP_FIELDS},
}
