"""The smallest capacities with which tiers can store one chunk."""

from __future__ import annotations

from offload.config.schema import OffloadConfig, TierConfig, at_least, check_cpu_capacity
from offload.errors import Problem
from offload.sizes import KIB, format_size, rounded_size
from tiers.base import ALIGNMENT
from tiers.io.direct_io import pages_for
from tiers.lmdb import files as lmdb_files
from tiers.lmdb.folder import smallest_capacity
from tiers.lmdb.index import RECORD_INDEX_BYTES
from tiers.lmdb.shared import files as shared_files
from tiers.lmdb.shared.index import SHARED_RECORD_INDEX_BYTES


def check_capacity(
    config: OffloadConfig, slot_bytes: int, ranks: int, record_bytes: int = 0
) -> list[Problem]:
    """Find capacities that cannot hold one chunk, once the chunk sizes on each rank are known.

    ``slot_bytes`` is the largest chunk size, ``record_bytes`` the smallest (0 if they are equal).
    """
    problems = check_cpu_capacity(config, slot_bytes, ranks)
    chunk = f"one chunk takes {rounded_size(slot_bytes)} on each of {ranks} ranks"
    for number, tier in enumerate(config.tiers):
        needed = ranks * smallest_share(tier, slot_bytes, record_bytes or slot_bytes)
        if tier.path and tier.capacity < needed:
            beside = ", and the index is stored beside it" if tier.type == "lmdb" else ""
            what = f"{format_size(tier.capacity)} holds no chunk: {chunk}{beside}"
            fix = f"Give at least {at_least(needed)}."
            problems.append(Problem(f"$.tiers[{number}].capacity", what, fix))
    return problems


def smallest_share(tier: TierConfig, payload_bytes: int, record_bytes: int) -> int:
    """The smallest share of a tier's capacity in which one rank can store a payload of this size,
    if the smallest payloads have ``record_bytes``."""
    if tier.type != "lmdb":
        return (1 + pages_for(payload_bytes)) * ALIGNMENT + SMALL_FILES_BYTES
    per_record, small = RECORD_INDEX_BYTES, lmdb_files.SMALL_FILES_BYTES
    if tier.shared:
        per_record, small = SHARED_RECORD_INDEX_BYTES, shared_files.SHARED_SMALL_FILES_BYTES
    bytes_min = smallest_capacity(payload_bytes, max(record_bytes, ALIGNMENT), per_record, small)
    return bytes_min + SMALL_FILES_BYTES


SMALL_FILES_BYTES = 64 * KIB
"""Bytes of a rank's share of the capacity that its lock, claim, epoch and manifest take."""
