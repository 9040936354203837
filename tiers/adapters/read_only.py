"""A tier over records of another geometry: it reads and translates them, and never writes.

``open_sources`` finds the other engines' records when the tier opens; each source translates its
records into payloads of this engine's geometry. Nothing is ever written, deleted or touched there:
a record that disappears is a miss. ``ReadOnlyTier`` lists the records at its start and ignores
later ones. ``SharedReadOnlyTier`` is for sources to which other engines still write.

Ownership: the sources belong to one thread of the tier, which does everything that blocks;
everything else belongs to the event loop's thread.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple, Protocol

from tiers.base import (
    Buffer,
    Key,
    ReadOutcome,
    SharedTier,
    StoredKeys,
    Tier,
    TierClosedError,
    TierInfo,
    TierIoError,
    WriteOutcome,
    stored_keys,
)
from tiers.io.threads import DaemonThreads, settled

logger = logging.getLogger(__name__)

BAD_MAX = 65_536


class SourceKey(NamedTuple):
    """A record that can be read: its last use in ns since 1970 (0 if unknown), and the length of
    its payload in this engine's geometry."""

    key: Key
    use_ns: int
    payload_bytes: int


class RecordSource(Protocol):
    """One store of another geometry. Belongs to one thread; blocks. Any exception means that the
    medium failed."""

    def keys(self) -> list[SourceKey]:
        """Return the records that can be read."""
        ...

    def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        """Fill ``into`` with verified payloads. The outcome is ``MISS`` for records that are
        gone."""
        ...

    def have(self, keys: Sequence[Key]) -> list[bool]:
        """Return which of these keys ``read`` would find now."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class ReadOnlyTier(Tier):
    """See the module's docstring. If two sources have a key, the first source is used."""

    def __init__(self, open_sources: Callable[[], Sequence[RecordSource]]) -> None:
        """``open_sources`` runs on the tier's thread when it is opened."""
        self._open_sources = open_sources
        self._threads: DaemonThreads | None = None
        self._sources: Sequence[RecordSource] = ()
        # (source, bytes) by key; least recently used first
        self._found: dict[Key, tuple[int, int]] = {}
        self._is_closed = False
        self._counts = {"records": 0, "reads": 0, "misses": 0, "write_attempts": 0}

    async def open(self) -> TierInfo:
        found = await self._opened_by(self._look)
        self._found = found
        self._counts["records"] = len(found)
        used = sum(size for _, size in found.values())
        return TierInfo("read-only", used, used, len(found), persistent=True)

    async def _opened_by(self, function: Callable[[], Any]) -> Any:
        """Call ``function``, which opens the sources, on the tier's thread and return its result.
        If it fails or is cancelled, nothing stays open."""
        self._threads, self._is_closed = DaemonThreads("tier-read-only", 1), False
        try:
            return await self._run(function)
        except BaseException:  # a cancelled open ends its thread, too
            await self.aclose()
            raise

    def _look(self) -> dict[Key, tuple[int, int]]:
        """List the records, on the tier's thread."""
        self._sources = list(self._open_sources())
        rows: dict[Key, tuple[int, int, int]] = {}
        for number, source in enumerate(self._sources):
            try:
                held = source.keys()
            except Exception as error:
                # damaged records of another engine must not prevent the start
                logger.warning("kvtiers: records of another engine cannot be read: %r", error)
                continue
            for key, use_ns, size in held:
                rows.setdefault(key, (use_ns, number, size))
        ordered = sorted(rows.items(), key=lambda row: row[1][0])
        return {key: (number, size) for key, (_, number, size) in ordered}

    def footprint_bytes(self, payload_bytes: int) -> int:
        return payload_bytes

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        """Fail, because the records belong to other engines."""
        self._check_open()
        self._counts["write_attempts"] += len(keys)
        return [WriteOutcome.FAILED] * len(keys)

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        self._check_open()
        found = [self._found.get(key) for key in keys]
        outcomes: list[ReadOutcome] = await self._run(_read_all, self._sources, keys, found, into)
        self._count(outcomes)
        return outcomes

    def _count(self, outcomes: Sequence[ReadOutcome]) -> None:
        self._counts["reads"] += len(outcomes)
        self._counts["misses"] += outcomes.count(ReadOutcome.MISS)

    async def delete(self, keys: Sequence[Key]) -> None:
        """Forget the keys here. The records stay where they are."""
        self._check_open()
        for key in keys:
            self._found.pop(key, None)

    async def touch(self, keys: Sequence[Key]) -> None:
        """Do nothing: the owner of the records tracks their recency."""
        self._check_open()

    async def keys(self) -> AsyncIterator[StoredKeys]:
        self._check_open()
        found = [(key, size) for key, (_, size) in self._found.items()]
        for batch in stored_keys(found):
            yield batch

    async def reset(self, epoch: int) -> None:
        """Forget everything: the weights have changed, so no stored record is valid any more."""
        self._check_open()
        self._found = {}

    async def aclose(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        threads, self._threads = self._threads, None
        self._found = {}
        if threads is not None:
            sources, self._sources = self._sources, ()
            try:
                await settled(threads.run(_close_all, sources))
            finally:
                threads.stop()

    def stats(self) -> dict[str, Any]:
        return dict(self._counts)

    async def _run(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Run a blocking call on the tier's thread. The call has ended when this returns or
        raises."""
        assert self._threads is not None
        try:
            return await settled(self._threads.run(function, *arguments))
        except Exception as error:  # libraries of sources raise many errors
            raise TierIoError(f"records of another geometry cannot be read: {error}") from error

    def _check_open(self) -> None:
        if self._is_closed or self._threads is None:
            raise TierClosedError("the tier is not open")


class SharedReadOnlyTier(ReadOnlyTier, SharedTier):
    """A ``ReadOnlyTier`` over stores that others still write to: it queries their records every
    time and never lists them.

    ``delete`` remembers up to ``BAD_MAX`` damaged records; otherwise the next query would find them
    again.
    """

    def __init__(self, open_sources: Callable[[], Sequence[RecordSource]]) -> None:
        super().__init__(open_sources)
        self._is_over = False
        self._bad: dict[Key, None] = {}

    async def open(self) -> TierInfo:
        await self._opened_by(self._open_all)
        return TierInfo("read-only", 0, 0, 0, persistent=True)

    def _open_all(self) -> None:
        """Open the sources, on the tier's thread."""
        self._sources = list(self._open_sources())

    async def present(self, keys: Sequence[Key]) -> list[bool]:
        self._check_open()
        if self._is_over:
            return [False] * len(keys)
        found: list[bool] = await self._run(_any_have, self._sources, keys)
        return [here and key not in self._bad for key, here in zip(keys, found, strict=True)]

    async def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        self._check_open()
        sources = () if self._is_over else self._sources
        outcomes: list[ReadOutcome] = await self._run(_read_any, sources, keys, into)
        self._count(outcomes)
        return outcomes

    async def delete(self, keys: Sequence[Key]) -> None:
        self._check_open()
        self._bad.update(dict.fromkeys(keys))
        while len(self._bad) > BAD_MAX:
            del self._bad[next(iter(self._bad))]

    async def reset(self, epoch: int) -> None:
        self._check_open()
        self._is_over = True


def _any_have(sources: Sequence[RecordSource], keys: Sequence[Key]) -> list[bool]:
    """Query all sources, on the tier's thread."""
    found = [False] * len(keys)
    for source in sources:
        here = source.have(keys)
        found = [a or b for a, b in zip(found, here, strict=True)]
    return found


def _read_any(
    sources: Sequence[RecordSource], keys: Sequence[Key], into: Sequence[Buffer]
) -> list[ReadOutcome]:
    """Read from the first source that has the key, on the tier's thread."""
    outcomes = [ReadOutcome.MISS] * len(keys)
    for source in sources:
        left = [n for n, outcome in enumerate(outcomes) if outcome is ReadOutcome.MISS]
        found = source.read([keys[n] for n in left], [into[n] for n in left])
        for n, outcome in zip(left, found, strict=True):
            outcomes[n] = outcome
    return outcomes


def _read_all(
    sources: Sequence[RecordSource],
    keys: Sequence[Key],
    found: Sequence[tuple[int, int] | None],
    into: Sequence[Buffer],
) -> list[ReadOutcome]:
    """Read from the known source of each key, on the tier's thread."""
    outcomes: list[ReadOutcome] = []
    for key, known, data in zip(keys, found, into, strict=True):
        if known is None:
            outcomes.append(ReadOutcome.MISS)
        elif known[1] != data.nbytes:
            outcomes.append(ReadOutcome.CORRUPT)
        else:
            outcomes += sources[known[0]].read([key], [data])
    return outcomes


def _close_all(sources: Sequence[RecordSource]) -> None:
    for source in sources:
        source.close()
