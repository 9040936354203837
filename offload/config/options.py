"""Every option by name: kind, default and meaning. The reference is generated from these tables.

The options of only one type of tier are in ``offload.config.tier_types``.
"""

from __future__ import annotations

from offload.config.fields import (
    REQUIRED,
    Field,
    PolicyConfig,
    anything,
    choice,
    count,
    encryption,
    flag,
    number,
    path,
    policy,
    size,
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
        "Policy that decides which chunks are evicted first when the tier is full.",
        f"`{DEFAULT_CPU_POLICY}`",
    ),
    Field(
        "admission",
        policy(),
        ADMIT_ALL,
        "Policy that decides which computed chunks enter the tier.",
        "`all`",
    ),
    Field(
        "pin",
        choice("require", "prefer", "off"),
        "require",
        "With a GPU: page-locked memory. `prefer` continues without it, slower and with a "
        "warning, if the memlock limit forbids it. Without a GPU nothing is pinned.",
    ),
)

TIER_FIELDS = (
    Field(
        "path",
        path(),
        REQUIRED,
        "A folder for this tier alone; created with mode 0700. It must not be a link, a system "
        "folder, a user's home, a model's folder, or contain other files.",
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
        "Policy that decides which records are evicted first when the tier is full. Not for shared "
        "tiers, which do their own eviction.",
        "`lru`",
    ),
    Field(
        "admission",
        policy(),
        ADMIT_ALL,
        "Policy that decides which chunks are written to the tier.",
        "`all`",
    ),
    Field(
        "io_threads",
        count(1, 64),
        None,
        "Requests in flight, per rank. 8 is enough for one disk, 32 for an array of NVMe disks.",
        "`8`; `4` for `mooncake`",
    ),
    Field(
        "high_watermark",
        number(0.01, 1),
        0.95,
        "Share of `capacity` above which eviction starts, before space runs out.",
    ),
    Field("low_watermark", number(0.01, 1), 0.90, "Share of `capacity` at which eviction stops."),
    Field(
        "reserve",
        size(bytes_min=0),
        None,
        "Disk space to leave free for other programs; stores pause when less is free.",
        "5 % of the file system, at least 2GiB",
    ),
    Field(
        "write_budget_per_day",
        size(bytes_min=0),
        0,
        "Maximum number of bytes written per 24 hours (SSD endurance); 0 means no limit. Stores "
        "beyond it are skipped.",
    ),
    Field(
        "recovery",
        choice("off", "quiet", "strict"),
        "quiet",
        "At start: `off` begins with an empty tier, `quiet` moves damaged data aside and "
        "continues, `strict` refuses to start on damage.",
    ),
    Field(
        "geometry",
        choice("own", "translate", "refuse"),
        "own",
        "What to do with blocks of the same model that engines with another geometry (tensor "
        "parallel size, chunks, layout) left below `path` or in the store. `own` ignores them. "
        "`translate` reads them if an exact translation exists, and otherwise refuses to start. "
        "`refuse` refuses to start if there are any. See the [guide](../guides/geometry.md).",
    ),
    Field(
        "encryption",
        encryption(),
        None,
        "AES-256-GCM at rest with the key in this file: 64 hexadecimal digits, as made by `openssl "
        "rand -hex 32`, mode 0600. A wrong key means misses.",
        "off",
    ),
    Field(
        "compression",
        choice("off", "zstd"),
        "off",
        "Lossless compression; the tier stops compressing if it saves too little.",
    ),
)

TOP_FIELDS = (
    Field("cpu", anything("object"), {}, "The CPU tier; see below.", "`{}`"),
    Field("tiers", anything("list of objects"), [], "Lower tiers, fastest first.", "`[]`"),
    Field(
        "chunk_blocks",
        count(1, 1024),
        1,
        "Blocks per chunk, the unit of offload. Sliding windows, recurrent states and the groups "
        "beside them get fewer blocks per chunk if more would cost hits.",
    ),
    Field(
        "staging",
        size(),
        None,
        "Part of `cpu.capacity` reserved for loads from lower tiers whose prefixes are longer than "
        "the CPU tier. It is at least one chunk if there are lower tiers, otherwise 0.",
        "a sixteenth of `cpu.capacity`, at most 256MiB",
    ),
    Field(
        "max_inflight_load",
        size(),
        None,
        "Maximum bytes of concurrent loads; a hit beyond it counts as a miss.",
        "half of `cpu.capacity`",
    ),
    Field(
        "max_inflight_store",
        size(),
        None,
        "Maximum bytes of concurrent stores; a store beyond it waits until it can begin, or until "
        "vLLM reuses its GPU blocks.",
        "a quarter of `cpu.capacity`",
    ),
    Field(
        "load_timeout_s",
        number(0.001, 600, " s"),
        10.0,
        "Maximum time of one load; after this time the prefix is recomputed.",
    ),
    Field(
        "fence_timeout_s",
        number(0.001, 60, " s"),
        5.0,
        "Maximum time that a step waits for stores still reading blocks that vLLM is about to "
        "reuse; after this time these stores are abandoned.",
    ),
    Field(
        "max_load_gpu_share",
        number(0.01, 1),
        0.5,
        "Share of the GPU's KV blocks that concurrent loads may hold. A hit beyond it waits for "
        "loads in flight if computing would take longer; otherwise it counts as a miss.",
    ),
    Field(
        "tier_timeout_s",
        number(0.01, 600, " s"),
        5.0,
        "Maximum time of one operation of a lower tier; a late operation counts as one failure per "
        "elapsed timeout.",
    ),
    Field(
        "breaker_failures",
        count(1, 1000),
        3,
        "Number of consecutive failures that open the circuit breaker of a lower tier. It is "
        "then probed after 5 s, and after that at intervals that double up to a minute.",
    ),
    Field(
        "break_even",
        flag(),
        True,
        "Leave a lower tier out of lookups while measurements show that loading from it is slower "
        "than computing. Leave it out of a single lookup if computing is faster than waiting for "
        "the tier's other loads. Look-ahead still reads a slow tier for requests that wait, unless "
        "the tier has less than a quarter of the speed of computing.",
    ),
    Field(
        "look_ahead",
        number(0, 0.5),
        0.25,
        "Share of the CPU tier for chunks that are read from lower tiers while their requests "
        "still queue; 0 turns look-ahead off.",
    ),
    Field(
        "wait_for_reads",
        choice("auto", "always", "never"),
        "never",
        "With `look_ahead`: whether a request that vLLM could run waits, without GPU blocks, "
        "until its chunks have been read into the CPU tier. Other requests do not wait. With "
        "`auto`, a request waits while other requests could use the blocks, if the reads take long "
        "enough at the measured speed. A request whose own reads take more than `load_timeout_s` "
        "computes the rest.",
    ),
    Field(
        "lookup_timeout_s",
        number(0.001, 10, " s"),
        0.05,
        "Maximum time that a request waits for the reply of a shared tier. After this time, and "
        "after at least three steps, the request continues with the replies that have arrived. "
        "Other requests do not wait.",
    ),
    Field(
        "remember_s",
        number(0, 3600, " s"),
        5.0,
        "Time for which replies of shared tiers are cached.",
    ),
    Field(
        "kv_layout",
        choice("vllm", "block_contiguous"),
        "vllm",
        "Layout of the layers in the GPU's KV cache. `block_contiguous` asks vLLM to place all "
        "layers of a block side by side, so that one copy moves a block. vLLM then does not "
        "start if an attention kernel needs blocks smaller than `--block-size`, and keeps its "
        "own layout, with a warning, if a kernel cannot read this one.",
    ),
    Field(
        "require_salt",
        flag(),
        False,
        "Offload only requests with a `cache_salt`, so that prompts without one are never shared.",
    ),
    Field(
        "max_pinned_share",
        number(0, 1),
        0.25,
        "Share of each tier that clients may pin for a time (`pin_s`); 0 allows no pins.",
    ),
    Field(
        "record_trace",
        path(),
        None,
        "File in which the prompts of this server are recorded for `kvtiers simulate`: when they "
        "arrived and which of them share blocks, but no content. The file is replaced at each "
        "start; a name that ends in `.gz` is compressed. With several data-parallel replicas, the "
        "number of each is added to the name.",
        "off",
    ),
    Field(
        "record_requests",
        path(),
        None,
        "File for `kvtiers why`: one line per request, for at least the last `recent_requests` "
        "requests. A line names the tiers that held the prefix, and says why the prefix was not "
        "longer. It contains no text and no tokens. A restarted server keeps older lines until "
        "newer ones replace them. With several data-parallel replicas, the number of each is "
        "added to the name.",
        "off",
    ),
    Field(
        "recent_requests",
        count(1, 100_000),
        256,
        "Number of requests whose lookup results are kept.",
    ),
    Field(
        "verify",
        choice("off", "device"),
        "off",
        "For debugging: `device` digests every chunk in the KV cache right after the chunk was "
        "computed and again after it was loaded, and compares the two. A difference is counted, "
        "logged with key, group and layer, and fails the load, so that the chunk is recomputed. "
        "Costs computing time. See the [guide](../guides/serve.md#when-an-answer-looks-wrong).",
    ),
    Field(
        "verify_path",
        path(),
        None,
        "Folder for the digests of `verify`, so that chunks stored before a restart, or by "
        "another engine with the same folder, can be compared as well. The folder only grows: "
        "remove it afterwards.",
        "in memory only",
    ),
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
