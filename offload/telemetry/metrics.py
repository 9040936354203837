"""Every metric by name, with its text and labels. ``docs/reference/metrics.md`` is generated from
this table.

Names follow Prometheus: ``vllm:kvtiers_<what>_<unit>``; a published counter also ends in
``_total``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

PREFIX = "vllm:kvtiers_"


class Tiers(enum.Enum):
    """The tiers that a metric with the label ``tier`` can describe."""

    ALL = "all"
    LOWER = "lower"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its help text, its own labels, whether it only grows, and which tiers it
    describes."""

    text: str
    labels: tuple[str, ...] = ()
    counter: bool = True
    tiers: Tiers = Tiers.ALL

    def shown_as(self, name: str) -> str:
        """The metric's full name on ``/metrics``."""
        return PREFIX + name + ("_total" if self.counter else "")


TIER = ("tier",)


def _lower(text: str) -> Metric:
    return Metric(text, TIER, tiers=Tiers.LOWER)


def _shared(text: str) -> Metric:
    return Metric(text, TIER, tiers=Tiers.SHARED)


def _gauge(text: str, *labels: str) -> Metric:
    return Metric(text, labels, counter=False)


FOUND = {
    "wanted_tokens": Metric(
        "Prompt tokens, beyond those in vLLM's own cache, that a tier could have provided."
    ),
    "hit_tokens": Metric("Tokens for which a load was planned, by the tier that holds them.", TIER),
    "missed_tokens": Metric("Wanted tokens that neither this tier nor one above it holds.", TIER),
    "loaded_tokens": Metric("Tokens restored, by the tier that held them.", TIER),
    "misses": Metric(
        "Requests that did not find their whole prefix, by the reason of the first missing chunk.",
        ("reason",),
    ),
    "recomputed_tokens": Metric(
        "Wanted tokens that were computed, by the reason of the first missing chunk.", ("reason",)
    ),
    "complete_lookups": Metric("Requests that found their whole prefix."),
    "lookups": Metric("Lookups; each lookup of a waiting request counts."),
    "lookup_seconds": Metric("Time spent in lookups, on vLLM's scheduler thread."),
    "asked_chunks": _shared("Chunks whose presence in a shared tier was queried."),
    "found_chunks": _shared("Chunks that a shared tier reported as present."),
    "unanswered_questions": _shared("Presence queries that a shared tier did not answer."),
    "lookup_timeouts": Metric(
        "Requests that continued before a shared tier had replied (lookup_timeout_s)."
    ),
}
MOVED = {
    "loads": Metric("Loads that succeeded."),
    "load_bytes": Metric("Bytes copied from the CPU tier into GPU blocks."),
    "load_seconds": Metric("Time from the start of a load to its end."),
    "load_failures": Metric("Loads that failed and were recomputed."),
    "load_timeouts": Metric("Loads that took longer than load_timeout_s."),
    "load_refusals": Metric(
        "Hits that waited for other loads or were recomputed because the load budget was spent."
    ),
    "short_loads": Metric(
        "Lookups whose hit was shortened because computing its tail is faster than loading it."
    ),
    "ahead_read_bytes": Metric(
        "Bytes that were to be read from lower tiers while their requests waited (look_ahead)."
    ),
    "ahead_used_bytes": Metric("Of these, bytes loaded by the requests they were read for."),
    "ahead_late_bytes": Metric(
        "Of the used bytes, those that were still being read when their load began."
    ),
    "ahead_wasted_bytes": Metric(
        "Bytes read ahead and not used: the request was cancelled, computed them or came too late."
    ),
    "ahead_saved_seconds": Metric(
        "Time that the disk spent on the used bytes before their loads began; loads that read at "
        "a greater depth would have needed less."
    ),
    "read_waits": Metric(
        "Requests that got no GPU blocks until their chunks were read ahead (wait_for_reads)."
    ),
    "read_wait_seconds": Metric("Time for which these requests waited."),
    "store_bytes": Metric("Bytes copied from GPU blocks into the CPU tier."),
    "store_seconds": Metric("Time from the submission of a store to its end."),
    "store_refusals": Metric("Chunks that found no slot in the CPU tier."),
    "stores_cancelled": Metric("Stores given up because their blocks were reused first."),
    "fence_timeouts": Metric(
        "Stores that failed because a step could not wait for them any longer."
    ),
    "copy_failures": Metric(
        "Unexpected errors of copies between the GPU and the CPU tier, for example of the CUDA "
        "driver; the log has their texts. Each one fails a store or a load."
    ),
    "copy_groups": _gauge(
        "KV cache groups, by the way they are copied between the GPU and the CPU tier: batch, "
        "kernel or each (GPUs).",
        *("direction", "way"),
    ),
    "copy_bytes_per_second": _gauge(
        "Rate of each way of copying for the slowest group, measured when the server started "
        "(GPUs).",
        *("direction", "way"),
    ),
    "read_bytes": _lower("Bytes read from a lower tier."),
    "read_seconds": _lower("Time spent in reads of a lower tier."),
    "write_bytes": _lower("Bytes written to a lower tier."),
    "write_seconds": _lower("Time spent in writes of a lower tier."),
    "write_refusals": _lower(
        "Chunks that an admission policy or the write budget kept out of a lower tier."
    ),
    "writes_skipped": _lower(
        "Chunks not written to a lower tier because its queue was full or its breaker open."
    ),
    "writes_given_up": _lower(
        "Chunks evicted from the CPU tier before they were written to a lower tier."
    ),
}
HELD = {
    "capacity_bytes": _gauge(
        "Bytes that chunks may take in a tier, all ranks together (on a disk, to high_watermark).",
        "tier",
    ),
    "used_bytes": _gauge("Bytes of a tier in use, all ranks together.", "tier"),
    "used_ratio": _gauge("Used share of the bytes that chunks may take in a tier.", "tier"),
    "kept_ratio": _gauge("Share of a tier that clients have pinned for a time (pin_s).", "tier"),
    "resident_chunks": _gauge("Chunks that can be loaded from a tier.", "tier"),
    "queue_depth": _gauge("Chunks on their way into a tier, waiting or being written.", "tier"),
    "loading_chunks": _gauge("Chunks on their way to the GPU."),
    "stored_chunks": Metric("Chunks that became readable in a tier.", TIER),
    "store_failures": Metric("Chunks that could not be written to a tier.", TIER),
    "evicted_chunks": Metric("Chunks evicted from a tier to free space.", TIER),
    "dropped_chunks": Metric("Chunks forgotten because they were missing or damaged.", TIER),
    "removed_chunks": Metric(
        "Chunks that left a tier: evicted, corrupt, lost (the record had disappeared) or reset.",
        ("tier", "reason"),
    ),
}
HEALTH = {
    "breaker_state": _gauge(
        "Circuit breaker of a lower tier: 0 closed, 1 half-open, 2 open.", "tier"
    ),
    "breaker_openings": _lower("Times that a circuit breaker of a lower tier opened."),
    "break_even": _gauge("1 while loading from a tier is faster than computing, else 0.", "tier"),
    "load_tokens_per_second": _gauge("Measured rate of loads from a tier, for break_even.", "tier"),
    "prefill_tokens_per_second": _gauge("Measured rate of computing, for break_even."),
    "corrupt_records": _lower("Records of a lower tier that failed verification."),
    "verified_chunks": Metric(
        "Loaded chunks that equal what was computed, according to their digests (verify)."
    ),
    "differing_chunks": Metric(
        "Loaded chunks that differ from what was computed (verify); their loads have failed."
    ),
    "unverified_chunks": Metric(
        "Loaded chunks that could not be compared (verify): their digests were unknown, or the "
        "comparison has ended with an error."
    ),
    "scrubbed_records": _lower("Records verified while their tier was idle."),
    "scrubbed_bytes": _lower("Bytes of the records verified while their tier was idle."),
    "scrub_damaged": _lower(
        "Damaged records found while their tier was idle; corrupt_records counts them too."
    ),
    "set_aside": _lower(
        "Times that a lower tier began empty because its files could not be trusted: damaged "
        "files, another disk, an older copy."
    ),
    "set_aside_timestamp_seconds": _gauge(
        "Time of the last such event, in seconds since 1970; absent if there was none.", "tier"
    ),
    "refused_records": _lower(
        "Records dropped at start-up because they were damaged or belonged to another server."
    ),
    "write_failures": Metric("Records that could not be written to a lower tier."),
    "tier_errors": Metric("Operations in which a lower tier failed as a whole."),
    "late_answers": Metric("Results of jobs that had already ended."),
    "resets": Metric("Resets of all tiers."),
    "wrong_values": Metric("Invalid values in clients' kv_transfer_params."),
    "events_lost": Metric(
        "Changes not published as KV events because too many waited; all chunks were then "
        "published again."
    ),
    "requests_lost": Metric("Requests that record_requests could not write in time."),
}
HOOKS = {
    "hook_calls": Metric("Calls of a hook on vLLM's threads, all ranks together.", ("hook",)),
    "hook_seconds": Metric("Time spent in a hook on vLLM's threads.", ("hook",)),
    "hook_slowest_seconds": _gauge(
        "The longest call of a hook on the scheduler's thread since the last publication, "
        "about a second ago.",
        "hook",
    ),
    "hook_faults": Metric("Exceptions that a vLLM hook raised and kvtiers caught.", ("hook",)),
}
SECTIONS: dict[str, dict[str, Metric]] = {
    "Results of requests": FOUND,
    "Transfers": MOVED,
    "Contents of the tiers": HELD,
    "Health": HEALTH,
    "Time on vLLM's threads": HOOKS,
}
METRICS: dict[str, Metric] = {
    name: metric for section in SECTIONS.values() for name, metric in section.items()
}


def reference() -> str:
    """The tables of ``docs/reference/metrics.md``."""
    parts = []
    for title, metrics in SECTIONS.items():
        parts += [f"## {title}\n", "| metric | kind | labels | meaning |", "|---|---|---|---|"]
        for name, metric in metrics.items():
            kind = "counter" if metric.counter else "gauge"
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            parts.append(f"| `{metric.shown_as(name)}` | {kind} | {labels} | {metric.text} |")
        parts.append("")
    return "\n".join(parts)
