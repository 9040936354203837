"""The interface of a tier: a medium below the CPU slab that keeps records under keys.

Records are immutable and keys are bytes. The planner above the tier decides what to keep and what
to evict. The tier enforces its own hard capacity and reports a full medium as an outcome. Every
method is asynchronous and batched; one call may carry hundreds of keys.

Ownership: the caller owns every buffer until the call returns. This also applies to a cancelled
call: a cancelled ``read`` returns only when nothing writes to ``into`` any more.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Key = bytes
"""The name of a record, of at most 511 bytes. Equal keys mean equal content."""
Buffer = npt.NDArray[np.uint8]
"""One-dimensional, C-contiguous bytes. A buffer whose address and length are multiples of
``ALIGNMENT`` can be moved by direct I/O without a copy; other buffers also work."""

ALIGNMENT = 4096
"""Direct I/O needs addresses and lengths that are multiples of this number of bytes."""
KEYS_PER_BATCH = 1 << 14


class ReadOutcome(enum.Enum):
    """The result for one key of a ``read``. The buffer may be used only after ``OK``."""

    OK = "ok"
    MISS = "miss"
    CORRUPT = "corrupt"
    BUSY = "busy"


class WriteOutcome(enum.Enum):
    """The result for one key of a ``write``. ``OK`` means durable and readable."""

    OK = "ok"
    FULL = "full"
    FAILED = "failed"


class TierError(Exception):
    """Raised if the tier as a whole failed. A problem with one key is an outcome instead."""


class TierClosedError(TierError):
    """Raised if the tier was closed, or never opened."""


class TierIoError(TierError):
    """Raised if the medium failed in a way that affects every key."""


@dataclass(frozen=True, slots=True)
class TierInfo:
    """The report of a tier that has opened.

    ``capacity_bytes`` limits the records together, each counted with ``footprint_bytes(payload
    length)``; ``used_bytes`` is the part in use at open.

    ``medium`` identifies the medium: it changes when the medium is replaced or created again.
    Records are written and read under ``epoch``. ``found_epoch`` is the epoch that the medium was
    in; if it differs, the tier has dropped those records.
    """

    name: str
    capacity_bytes: int
    used_bytes: int
    record_count: int
    persistent: bool
    medium: str = ""
    epoch: int = 0
    found_epoch: int = 0


class StoredKey(NamedTuple):
    """One record of a tier: its key and the length of its payload in bytes."""

    key: Key
    payload_bytes: int


KeyColumn = npt.NDArray[np.void]
"""An array of keys of one length; ``tolist`` returns them as ``bytes``."""


class StoredKeys(NamedTuple):
    """Records found by ``keys``: ``payload_bytes[i]`` is the payload length of ``column[i]``.

    They are columns instead of pairs, because after a restart there are millions of records, and
    one object per record would cost too much.
    """

    column: KeyColumn
    payload_bytes: npt.NDArray[np.int64]

    @property
    def keys(self) -> list[Key]:
        """The keys as bytes."""
        return self.column.tolist()  # type: ignore[no-any-return]  # a void's item is bytes

    def pairs(self) -> Iterator[StoredKey]:
        """Iterate over the records one by one."""
        return map(StoredKey, self.keys, self.payload_bytes.tolist())


def stored_keys(found: Iterable[tuple[Key, int]]) -> Iterator[StoredKeys]:
    """Turn keys and payload lengths into columns, in the same order. Each batch holds consecutive
    keys of one length, at most ``KEYS_PER_BATCH``."""
    for key_bytes, same in groupby(found, lambda pair: len(pair[0])):
        while batch := list(islice(same, KEYS_PER_BATCH)):
            keys, sizes = zip(*batch, strict=True)
            column = np.frombuffer(b"".join(keys), f"V{key_bytes}")
            yield StoredKeys(column, np.array(sizes, np.int64))


class Scrubbed(NamedTuple):
    """The result of one ``scrub``: it verified ``records`` with ``payload_bytes`` in total and
    forgot the ``damaged`` ones. ``trouble`` is the reason why nothing could be read, or empty."""

    records: int = 0
    payload_bytes: int = 0
    damaged: tuple[Key, ...] = ()
    trouble: str = ""


class Tier(ABC):
    """A medium that keeps records under keys. Its methods raise ``TierClosedError`` when the tier
    is closed, ``TierIoError`` when the medium as a whole has failed, and nothing else."""

    @abstractmethod
    async def open(self) -> TierInfo:
        """Open or create the medium and recover its records."""

    @abstractmethod
    def footprint_bytes(self, payload_bytes: int) -> int:
        """Return the capacity in bytes that one record with a payload of this length takes."""

    @abstractmethod
    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        """Write one record per key. A key that is present already is ``OK`` and keeps its
        record."""

    @abstractmethod
    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        """Fill ``into[i]`` with the payload of ``keys[i]``, verified after the copy.

        A record whose length differs from the buffer's is ``CORRUPT``.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[Key]) -> None:
        """Forget these keys; unknown ones are ignored. Later writes can use their space.

        The deletion is not durable when this returns: after a crash a deleted record may be present
        again, intact.
        """

    @abstractmethod
    async def touch(self, keys: Sequence[Key]) -> None:
        """Record a use, so that ``keys`` reports recency after a restart. Best effort."""

    @abstractmethod
    def keys(self) -> AsyncIterator[StoredKeys]:
        """List every record in batches, least recently used first; for recovery after ``open``."""

    @abstractmethod
    async def reset(self, epoch: int) -> None:
        """Forget everything at once: from now on only records written under ``epoch`` exist.

        The change is durable when this returns. The space is reclaimed in the background.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Finish or abandon all work and release everything. Idempotent."""

    async def scrub(self, bytes_max: int, period_s: float) -> Scrubbed | None:
        """Read and verify the next few records, about ``bytes_max`` and at least one, so that every
        record is verified once in ``period_s``. Verification does not count as a use. Returns
        ``None`` if no record is due yet, or if the tier does not scrub."""
        del bytes_max, period_s
        return None

    def on_loss(self, call: Callable[[], None]) -> None:
        """Register ``call``, which runs on the loop when the tier finds that all records it had
        reported are lost."""
        del call  # most tiers cannot detect this

    def stats(self) -> dict[str, Any]:
        """Return counters since ``open`` (plain numbers) for metrics. Never raises."""
        return {}


class SharedTier(Tier):
    """A tier that other engines write to as well. It evicts records itself to stay within its
    capacity, so the engine queries its content (``present``) instead of listing it: ``keys`` may
    leave records out, and ``TierInfo`` counts what all engines have stored."""

    @abstractmethod
    async def present(self, keys: Sequence[Key]) -> list[bool]:
        """Return, for each key, whether a ``read`` would find it now. The answer is a hint: a
        record can appear or disappear a moment later."""
