"""A tier that others have written and that is only read: what they keep in another form.

``open_sources`` finds what is there when the tier is opened; each source knows how to turn a record
of its own into a payload as this side has it. Nothing is ever written, deleted or touched there:
what a source loses is a miss here. ``ReadOnlyTier`` lists what it finds at its start and knows of
nothing that comes later; ``SharedReadOnlyTier`` is for those who go on writing.

Ownership: the sources belong to one thread of the tier's own, which does all that blocks;
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
from tiers.io.awaiting import settled
from tiers.io.daemon_threads import DaemonThreads

logger = logging.getLogger(__name__)

BAD_MAX = 65_536


class ForeignKey(NamedTuple):
    """A record that can be had: its last use in ns since 1970 (0 if unknown), and the length of its
    payload as this side has it."""

    key: Key
    use_ns: int
    payload_bytes: int


class Source(Protocol):
    """One store of somebody else. Belongs to one thread; blocks. What it raises means that
    the medium is gone."""

    def keys(self) -> list[ForeignKey]:
        """What can be had."""
        ...

    def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        """Fill ``into`` with payloads, verified. ``MISS`` for what is not there any more."""
        ...

    def have(self, keys: Sequence[Key]) -> list[bool]:
        """Which of these keys ``read`` would find now."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class ReadOnlyTier(Tier):
    """See the module. Of a key that two sources have, the first is asked."""

    def __init__(self, open_sources: Callable[[], Sequence[Source]]) -> None:
        """``open_sources`` runs on the tier's thread when it is opened."""
        self._open_sources = open_sources
        self._threads: DaemonThreads | None = None
        self._sources: Sequence[Source] = ()
        self._found: dict[Key, tuple[int, int]] = {}  # source, bytes; least recently used first
        self._is_closed = False
        self._counts = {"records": 0, "reads": 0, "misses": 0, "write_attempts": 0}

    async def open(self) -> TierInfo:
        found = await self._opened_by(self._look)
        self._found = found
        self._counts["records"] = len(found)
        used = sum(size for _, size in found.values())
        return TierInfo("foreign", used, used, len(found), persistent=True)

    async def _opened_by(self, function: Callable[[], Any]) -> Any:
        """What ``function``, which opens the sources, returns on the tier's thread. If it fails, or
        is cancelled, nothing is left open."""
        self._threads, self._is_closed = DaemonThreads("tier-foreign", 1), False
        try:
            return await self._run(function)
        except BaseException:
            await self.aclose()
            raise

    def _look(self) -> dict[Key, tuple[int, int]]:
        """On the tier's thread."""
        self._sources = list(self._open_sources())
        rows: dict[Key, tuple[int, int, int]] = {}
        for number, source in enumerate(self._sources):
            try:
                held = source.keys()
            except Exception as error:  # a broken store of others is no reason not to start
                logger.warning("kvtiers: a store of others cannot be read: %r", error)
                continue
            for key, use_ns, size in held:
                rows.setdefault(key, (use_ns, number, size))
        ordered = sorted(rows.items(), key=lambda row: row[1][0])
        return {key: (number, size) for key, (_, number, size) in ordered}

    def footprint_bytes(self, payload_bytes: int) -> int:
        return payload_bytes

    async def write(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[WriteOutcome]:
        """Nothing is written to what is somebody else's."""
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
        """Forget them here; they stay where they are."""
        self._check_open()
        for key in keys:
            self._found.pop(key, None)

    async def touch(self, keys: Sequence[Key]) -> None:
        """Their order of use is their owner's."""
        self._check_open()

    async def keys(self) -> AsyncIterator[StoredKeys]:
        self._check_open()
        found = [(key, size) for key, (_, size) in self._found.items()]
        for batch in stored_keys(found):
            yield batch

    async def reset(self, epoch: int) -> None:
        """The weights of this side are others now: nothing that is stored there fits them."""
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
        """A blocking call on the tier's thread, which has ended when this returns or raises."""
        assert self._threads is not None
        try:
            return await settled(self._threads.run(function, *arguments))
        except Exception as error:  # whatever the library of a source has to say
            raise TierIoError(f"what others have stored cannot be read: {error}") from error

    def _check_open(self) -> None:
        if self._is_closed or self._threads is None:
            raise TierClosedError("the tier is not open")


class SharedReadOnlyTier(ReadOnlyTier, SharedTier):
    """The same where the others go on writing: what they have is asked each time, never listed.

    ``delete`` remembers up to ``BAD_MAX`` damaged records, which would be found there again.
    """

    def __init__(self, open_sources: Callable[[], Sequence[Source]]) -> None:
        super().__init__(open_sources)
        self._is_over = False
        self._bad: dict[Key, None] = {}

    async def open(self) -> TierInfo:
        await self._opened_by(self._open_all)
        return TierInfo("foreign", 0, 0, 0, persistent=True)

    def _open_all(self) -> None:
        """On the tier's thread."""
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


def _any_have(sources: Sequence[Source], keys: Sequence[Key]) -> list[bool]:
    """On the tier's thread."""
    found = [False] * len(keys)
    for source in sources:
        here = source.have(keys)
        found = [a or b for a, b in zip(found, here, strict=True)]
    return found


def _read_any(
    sources: Sequence[Source], keys: Sequence[Key], into: Sequence[Buffer]
) -> list[ReadOutcome]:
    """On the tier's thread. The first source that has a key is believed."""
    outcomes = [ReadOutcome.MISS] * len(keys)
    for source in sources:
        left = [n for n, outcome in enumerate(outcomes) if outcome is ReadOutcome.MISS]
        found = source.read([keys[n] for n in left], [into[n] for n in left])
        for n, outcome in zip(left, found, strict=True):
            outcomes[n] = outcome
    return outcomes


def _read_all(
    sources: Sequence[Source],
    keys: Sequence[Key],
    found: Sequence[tuple[int, int] | None],
    into: Sequence[Buffer],
) -> list[ReadOutcome]:
    """On the tier's thread."""
    outcomes: list[ReadOutcome] = []
    for key, place, data in zip(keys, found, into, strict=True):
        if place is None:
            outcomes.append(ReadOutcome.MISS)
        elif place[1] != data.nbytes:
            outcomes.append(ReadOutcome.CORRUPT)
        else:
            outcomes += sources[place[0]].read([key], [data])
    return outcomes


def _close_all(sources: Sequence[Source]) -> None:
    for source in sources:
        source.close()
