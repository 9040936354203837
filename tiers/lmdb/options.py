"""How an LMDB tier works, exclusive or shared: its options, and how large its I/O jobs are."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tiers.record import NO_NAMESPACE

JOB_BYTES_MIN = 256 << 10


class Recovery(enum.Enum):
    """What to do with what an earlier run left.

    ``OFF``: start empty. ``QUIET``: keep what is whole, move aside what is not, go on.
    ``STRICT``: any damage found at open is a ``TierIoError`` and nothing is touched.
    """

    OFF = "off"
    QUIET = "quiet"
    STRICT = "strict"


@dataclass(frozen=True, slots=True)
class LmdbOptions:
    """How an LMDB tier works. Sizes in bytes.

    ``record_bytes`` is the smallest usual payload: the index gets room for
    ``capacity / record_bytes`` records. ``grow_bytes`` is the step in which the payload file takes
    its space; ``reserve_bytes`` of the file system stay free (``None``: 5 %, at least 2 GiB).
    ``io_threads`` is the queue depth, for reads and for writes each; a few more threads seal and
    verify meanwhile. ``job_bytes`` is the most that
    one thread moves at a time, adjacent records with one system call; a call is divided among all
    threads first. Small jobs cost CPU: threads that hand over to each other all the time.
    ``queue_records`` bounds what waits.
    ``key_file`` turns encryption on, ``compress`` compression (see ``codec``).
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


def job_bytes(options: LmdbOptions, total_bytes: int) -> int:
    """How much goes into one job: all threads get some, small records go together."""
    share = total_bytes // options.io_threads
    return min(options.job_bytes, max(JOB_BYTES_MIN, share))
