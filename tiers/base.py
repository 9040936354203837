"""The interface of a key-addressed tier below the CPU slab.

A tier keeps immutable records under byte keys. It decides nothing: what to keep and what to
evict is decided above it; the tier enforces its own hard capacity and says so by an outcome.
Everything is asyncio and batched; one call may carry hundreds of keys.

Ownership: the caller owns every buffer until the call returns, also when the call is cancelled
(a cancelled ``read`` returns only after nobody writes into ``into`` any more).
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
"""The name of a record: at most 511 bytes, equal only for equal content."""
Buffer = npt.NDArray[np.uint8]
"""One-dimensional, C-contiguous bytes. A buffer whose address and length are multiples of
``ALIGNMENT`` can be moved by direct I/O without a copy; any other one still works."""

ALIGNMENT = 4096
"""Bytes; direct I/O needs addresses and lengths that are multiples of it."""
KEYS_PER_BATCH = 1 << 14


class ReadOutcome(enum.Enum):
    """What became of one key of a ``read``. Only ``OK`` means that the buffer may be used."""

    OK = "ok"
    MISS = "miss"
    CORRUPT = "corrupt"
    BUSY = "busy"


class WriteOutcome(enum.Enum):
    """What became of one key of a ``write``. ``OK`` means durable and readable."""

    OK = "ok"
    FULL = "full"
    FAILED = "failed"


class TierError(Exception):
    """The tier itself is gone; trouble with one key is an outcome instead."""


class TierClosedError(TierError):
    """The tier was closed, or never opened."""


class TierIoError(TierError):
    """The medium failed in a way that concerns every key."""


@dataclass(frozen=True, slots=True)
class TierInfo:
    """What a tier says of itself after ``open``.

    ``capacity_bytes`` is what records may occupy together, each counted with
    ``footprint_bytes(payload length)``; ``used_bytes`` is the part taken at open.

    ``medium`` tells one medium from another and from one made anew in its place. Records are
    written and read under ``epoch``; what the medium held was of ``found_epoch``, and is forgotten
    where that is another one.
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
"""Keys of one length, one item each; ``tolist`` makes them ``bytes``."""


class StoredKeys(NamedTuple):
    """Records found by ``keys``: ``payload_bytes[i]`` is the length of the payload of
    ``column[i]``.

    Columns and no pairs: a restart goes through millions of records, and whoever only passes them
    on shall not make an object of each.
    """

    column: KeyColumn
    payload_bytes: npt.NDArray[np.int64]

    @property
    def keys(self) -> list[Key]:
        """The keys as bytes."""
        return self.column.tolist()  # type: ignore[no-any-return]  # a void's item is bytes

    def pairs(self) -> Iterator[StoredKey]:
        """One record after the other."""
        return map(StoredKey, self.keys, self.payload_bytes.tolist())


def stored_keys(found: Iterable[tuple[Key, int]]) -> Iterator[StoredKeys]:
    """Keys and lengths of payloads as columns, in the same order: as many as come one after the
    other with keys of one length, at most ``KEYS_PER_BATCH``."""
    for key_bytes, same in groupby(found, lambda pair: len(pair[0])):
        while batch := list(islice(same, KEYS_PER_BATCH)):
            keys, sizes = zip(*batch, strict=True)
            column = np.frombuffer(b"".join(keys), f"V{key_bytes}")
            yield StoredKeys(column, np.array(sizes, np.int64))


class Scrubbed(NamedTuple):
    """What one ``scrub`` has read and verified: ``records`` with so many bytes of payload. The
    ``damaged`` ones are forgotten. ``trouble`` says why nothing could be read."""

    records: int = 0
    payload_bytes: int = 0
    damaged: tuple[Key, ...] = ()
    trouble: str = ""


class Tier(ABC):
    """A medium that keeps records under keys. All methods raise ``TierClosedError`` when closed
    and ``TierIoError`` when the medium as a whole has failed; nothing else."""

    @abstractmethod
    async def open(self) -> TierInfo:
        """Open or create the medium and recover what it holds."""

    @abstractmethod
    def footprint_bytes(self, payload_bytes: int) -> int:
        """Bytes of capacity that one record with a payload of this length takes."""

    @abstractmethod
    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        """Store one record per key. A key that is present already is ``OK`` and stays as it is."""

    @abstractmethod
    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        """Fill ``into[i]`` with the payload of ``keys[i]``, verified after the copy.

        A record whose length differs from the buffer's is ``CORRUPT``.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[Key]) -> None:
        """Forget these keys; unknown ones are ignored. Their space can be used by later writes.

        Not durable when it returns: after a crash a deleted record may be there again, whole.
        """

    @abstractmethod
    async def touch(self, keys: Sequence[Key]) -> None:
        """Note a use, so that ``keys`` reports recency after a restart. Best effort."""

    @abstractmethod
    def keys(self) -> AsyncIterator[StoredKeys]:
        """Every record, least recently used first, in batches; for recovery after ``open``."""

    @abstractmethod
    async def reset(self, epoch: int) -> None:
        """Forget everything at once: only records written under ``epoch`` exist from now on.

        Durable when it returns; space is reclaimed in the background.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Finish or abandon what is in flight and release everything. Idempotent."""

    async def scrub(self, most_bytes: int, period_s: float) -> Scrubbed | None:
        """Read and verify the next few records, about ``most_bytes`` and one at least, so that each
        has its turn once in ``period_s``; no use of them. ``None``: no turn has come, or the tier
        does not do this."""
        del most_bytes, period_s
        return None

    def on_loss(self, call: Callable[[], None]) -> None:
        """Have ``call`` called, on the loop, whenever records that the tier had vouched for are
        found to be gone all at once."""
        del call  # most tiers never find that out

    def stats(self) -> dict[str, Any]:
        """Counters since ``open`` (plain numbers), for metrics. Never raises."""
        return {}


class SharedTier(Tier):
    """A tier that other engines write to as well. It evicts records itself to keep its capacity,
    so the engine asks it what it holds (``present``) and does not list it: ``keys`` may leave
    records out, and ``TierInfo`` counts what all engines have stored."""

    @abstractmethod
    async def present(self, keys: Sequence[Key]) -> list[bool]:
        """Return, for each key, whether a ``read`` would find it now. The answer is a hint: a
        record can appear or disappear a moment later."""
