"""The options of an LMDB tier, exclusive or shared."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tiers.record import NO_NAMESPACE

TOUCH_FLUSH_S = 5.0
"""Uses of records are written to disk after at most this time."""


class Recovery(enum.Enum):
    """How a tier treats data from earlier runs.

    ``OFF``: start empty. ``QUIET``: keep intact records, move damaged files aside, continue.
    ``STRICT``: any damage found at open raises ``TierIoError``, and nothing is changed.
    """

    OFF = "off"
    QUIET = "quiet"
    STRICT = "strict"


@dataclass(frozen=True, slots=True)
class LmdbOptions:
    """The options of an LMDB tier. Sizes are in bytes.

    ``record_bytes`` is the smallest usual payload: the index gets space for ``capacity /
    record_bytes`` records. The payload file grows in steps of ``grow_bytes`` and leaves
    ``reserve_bytes`` of the file system free (``None``: 5 %, at least 2 GiB). ``io_threads`` is the
    queue depth, for reads and for writes each; a few additional threads seal and verify meanwhile.
    ``job_bytes`` is the maximum that one thread transfers at a time, with one system call for
    adjacent records; the bytes in progress are first divided among all threads. Small jobs cost CPU
    time for switching between threads. ``queue_records`` limits the number of records waiting to be
    written. ``key_file`` turns encryption on, ``compress`` compression (see ``tiers.io.codec``).
    """

    namespace: bytes = NO_NAMESPACE
    rank: int = 0
    epoch: int = 0
    recovery: Recovery = Recovery.QUIET
    record_bytes: int = 64 << 10
    grow_bytes: int = 1 << 30
    reserve_bytes: int | None = None
    io_threads: int = 8
    job_bytes: int = 8 << 20
    queue_records: int = 4096
    direct_io: bool = True
    key_file: str = ""
    compress: bool = False
    allow_network: bool = False
    close_timeout_s: float = 30.0
