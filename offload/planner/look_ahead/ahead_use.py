"""Records how far the reads ahead for a request have got, which chunks are held for it, and which
of them it used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

from offload.index.chunk_batch import GroupInfo
from offload.layout.keys import count_groups
from offload.planner.look_ahead.ahead_requests import AheadRequest, StallWatch
from offload.planner.step_budget import AHEAD_HEIRS_MAX

COUNTED = ("read", "used", "late", "wasted")


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """The progress of one request's reads ahead. ``is_read`` means that all chunks to read ahead
    for it have arrived, or nearly all. ``since`` is the time when the first read began; ``None`` if
    none has begun."""

    is_read: bool
    since: float | None


@dataclass(frozen=True, slots=True)
class AheadUse:
    """How one request's load used the chunks that were read ahead for it.

    ``tokens`` of the load were read ahead; ``late_tokens`` of them were still being read when the
    load was planned. Reading the others had taken ``saved_s`` seconds. ``wasted_tokens`` were read
    ahead for the request and not loaded.
    """

    tokens: int = 0
    late_tokens: int = 0
    saved_s: float = 0.0
    wasted_tokens: int = 0


NOT_READ_AHEAD = AheadUse()


class AheadCounts:
    """Counts the chunks that were read ahead, and how many of them were used. Owned by
    ``LookAhead``; used on the planner's thread.

    ``chunks`` counts all chunks that were ``read``, those loaded by the requests that they were
    read for (``used``), the used chunks that were still being read when their load was planned
    (``late``), and the chunks that were given up (``wasted``). ``saved_s`` is the total time of the
    reads of used chunks that were not late.
    """

    def __init__(self, groups: Mapping[int, GroupInfo], ranks: int) -> None:
        self.chunks = dict.fromkeys(COUNTED, 0)
        self.saved_s = 0.0
        self._bytes = dict.fromkeys(COUNTED, 0)
        self._groups = groups
        self._ranks = ranks
        self._took_s: dict[bytes, float] = {}  # the time of each read, for chunks not used yet
        self._wasted: defaultdict[str, list[bytes]] = defaultdict(list)  # by request

    def read(self, keys: Collection[bytes]) -> None:
        """Count chunks whose read begins."""
        self._count("read", keys)

    def arrived(self, keys: Iterable[bytes], took_s: float) -> None:
        """Remember how long the read of each of these chunks took. A request waits for them."""
        self._took_s.update(dict.fromkeys(keys, took_s))

    def used(self, keys: Collection[bytes], late: Collection[bytes]) -> AheadUse:
        """Count the chunks of a request's load that were read ahead; those in ``late`` are still
        being read."""
        if not keys:
            return NOT_READ_AHEAD
        for key in late:  # the request had to wait for these
            self._took_s.pop(key, 0.0)
        saved_s = sum(map(self._took_s.pop, keys, repeat(0.0)))
        self.saved_s += saved_s
        return AheadUse(self._count("used", keys), self._count("late", late), saved_s)

    def wasted(self, reads: Mapping[bytes, str]) -> None:
        """Count chunks as wasted, in total and for the requests that they were read for."""
        for key, request in reads.items():
            self._took_s.pop(key, None)
            self._wasted[request].append(key)
        self._count("wasted", reads.keys())

    def take_wasted(self, request: str) -> int:
        """The number of tokens wasted for this request since the previous call."""
        wasted = self._wasted.pop(request, None)
        return self._tokens(self._by_group(wasted)) if wasted else 0

    def forget(self) -> None:
        """Forget the chunks and requests, and keep the totals."""
        self._took_s.clear()
        self._wasted.clear()

    def totals(self) -> dict[str, float]:
        """The counts as bytes in the first lower tier, and the saved time, by flat name."""
        found: dict[str, float] = {f"ahead_{what}_bytes": n for what, n in self._bytes.items()}
        return found | {"ahead_saved_seconds": self.saved_s}

    def _count(self, what: str, keys: Collection[bytes]) -> int:
        """Count chunks; returns their tokens."""
        if not keys:
            return 0
        self.chunks[what] += len(keys)
        groups = self._by_group(keys)
        for group, count in groups.items():
            self._bytes[what] += self._ranks * count * self._groups[group].footprints[0]
        return self._tokens(groups)

    def _by_group(self, keys: Collection[bytes]) -> Mapping[int, int]:
        """The number of these chunks in each group."""
        if len(self._groups) == 1:
            return dict.fromkeys(self._groups, len(keys))
        return count_groups(keys)

    def _tokens(self, groups: Mapping[int, int]) -> int:
        """The tokens of this number of chunks of each group, in the group with the most tokens."""
        return max(count * self._groups[group].chunk_tokens for group, count in groups.items())


class HeldChunks:
    """The chunks that were read ahead, or are being read, and not used yet. Owned by ``LookAhead``,
    whose ``queue`` it is; used on the planner's thread.

    ``owners`` has the request that waits for each chunk. The retention of the CPU tier reads it:
    none of these chunks is evicted. A request is watched as long as it owns chunks.
    """

    def __init__(
        self, queue: Sequence[AheadRequest], watch: StallWatch, counts: AheadCounts
    ) -> None:
        self.owners: dict[bytes, AheadRequest] = {}
        self._queue = queue
        self._watch = watch
        self._counts = counts

    def __len__(self) -> int:
        return len(self.owners)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.owners)

    def hold(self, keys: Collection[bytes], owner: AheadRequest, now: float) -> None:
        """Hold these chunks for a request that waits."""
        self.owners.update(dict.fromkeys(keys, owner))
        if owner.since is None:
            self._watch.watch(owner, now)
        owner.add_read(keys, now)

    def use(
        self, owner: AheadRequest, load: Iterable[bytes], arriving: Mapping[bytes, int], now: float
    ) -> AheadUse:
        """Release all chunks of a request that has left the queue: it uses those of its ``load``.
        Those in ``arriving`` are still being read."""
        used = owner.read.intersection(load)
        late = used & arriving.keys()
        for key in used:
            del self.owners[key]
        use = self._counts.used(used, late)
        if rest := owner.read - used:
            self._pass_on(owner, rest, now)
        return use

    def keep(self, owner: AheadRequest, keys: frozenset[bytes], now: float) -> None:
        """Release the chunks of a request that are not among ``keys``: it will not use them."""
        gone = owner.read - keys
        self._disown(owner, gone)
        self._pass_on(owner, gone, now)

    def _pass_on(self, owner: AheadRequest, rest: Collection[bytes], now: float) -> None:
        """Allow the eviction of chunks that were read for a request that does not use them, unless
        one of the next requests wants them."""
        for heir in self._queue[:AHEAD_HEIRS_MAX] if rest else ():
            mine = heir.keys.intersection(rest)
            if mine:
                self.hold(mine, heir, now)
                rest = frozenset(rest) - mine
        for key in rest:
            del self.owners[key]
        self._counts.wasted(dict.fromkeys(rest, owner.request))

    def lose(self, keys: Iterable[bytes]) -> None:
        """Stop holding chunks that could not be read, or that were dropped after their read: the
        CPU tier does not have them."""
        lost = {}
        for key in keys:
            owner = self.owners.pop(key, None)
            if owner is not None:
                lost[key] = owner.request
                self._disown(owner, (key,))
        self._counts.wasted(lost)

    def _disown(self, owner: AheadRequest, keys: Collection[bytes]) -> None:
        owner.discard_read(keys)
        if owner.since is None:
            self._watch.forget(owner)

    def clear(self) -> None:
        """Release all chunks."""
        self._counts.wasted({key: owner.request for key, owner in self.owners.items()})
        self.owners.clear()
