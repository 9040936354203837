"""Exports everything that the author of a tier needs, in one place (docs/guides/write-a-tier.md).

The interface comes from ``tiers.base``, sealing and checking records from ``tiers.record``.
``DaemonThreads``, ``in_thread`` and ``settled`` run blocking calls, so that a medium that hangs
stops neither the event loop nor the exit of the process.
"""

from __future__ import annotations

from tiers.base import (
    ALIGNMENT,
    Buffer,
    Key,
    ReadOutcome,
    Scrubbed,
    SharedTier,
    StoredKey,
    StoredKeys,
    Tier,
    TierClosedError,
    TierError,
    TierInfo,
    TierIoError,
    WriteOutcome,
    stored_keys,
)
from tiers.io.threads import DaemonThreads, in_thread, settled
from tiers.record import (
    HEADER_BYTES,
    Identity,
    check_identity,
    check_key,
    check_payload,
    check_records,
    seal,
    verify,
)

__all__ = [
    "ALIGNMENT",
    "HEADER_BYTES",
    "Buffer",
    "DaemonThreads",
    "Identity",
    "Key",
    "ReadOutcome",
    "Scrubbed",
    "SharedTier",
    "StoredKey",
    "StoredKeys",
    "Tier",
    "TierClosedError",
    "TierError",
    "TierInfo",
    "TierIoError",
    "WriteOutcome",
    "check_identity",
    "check_key",
    "check_payload",
    "check_records",
    "in_thread",
    "seal",
    "settled",
    "stored_keys",
    "verify",
]
