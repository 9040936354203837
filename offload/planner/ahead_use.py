"""The progress of the reads ahead for one request, their use in the end, and counts of both."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from offload.index.chunk_batch import GroupInfo
from offload.layout.keys import group_of

COUNTED = ("read", "used", "late", "wasted")


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """The state of one request's reads. ``is_read``: all chunks that are read ahead for it have
    arrived, or nearly all; ``since`` is when the first was read, if any."""

    is_read: bool
    since: float | None


@dataclass(frozen=True, slots=True)
class AheadUse:
    """``tokens`` of the request's load were read ahead, of which ``late_tokens`` were still being
    read when the load was planned. The reads of the others took ``saved_s``. ``wasted_tokens`` were
    read ahead for it and not loaded."""

    tokens: int = 0
    late_tokens: int = 0
    saved_s: float = 0.0
    wasted_tokens: int = 0


NOT_READ_AHEAD = AheadUse()


class AheadCounts:
    """Counts what was read ahead, and what came of it. Owned by ``LookAhead``; used on the
    planner's thread.

    ``chunks`` has the chunks that were read, those loaded by the requests that they were read for
    (``used``), those of them that were still being read when the load was planned (``late``), and
    those given up (``wasted``). ``saved_s`` adds up the time of the reads of used chunks that were
    not late.
    """

    def __init__(self, groups: Mapping[int, GroupInfo], ranks: int) -> None:
        self.chunks = dict.fromkeys(COUNTED, 0)
        self.saved_s = 0.0
        self._bytes = dict.fromkeys(COUNTED, 0)
        self._groups = groups
        self._ranks = ranks
        self._took_s: dict[bytes, float] = {}  # of chunks that a request waits for: their reads
        self._wasted: defaultdict[str, list[bytes]] = defaultdict(list)  # by request that waits

    def read(self, keys: Collection[bytes]) -> None:
        """Count chunks whose read begins."""
        self._count("read", keys)

    def arrived(self, keys: Iterable[bytes], took_s: float) -> None:
        """Remember the time that the read of each of these chunks took: a request waits for
        them."""
        self._took_s.update(dict.fromkeys(keys, took_s))

    def used(self, keys: Collection[bytes], late: Collection[bytes]) -> AheadUse:
        """Count chunks that a request loads. Some of them may be late."""
        saved_s = 0.0
        for key in keys:
            took_s = self._took_s.pop(key, 0.0)
            saved_s += 0.0 if key in late else took_s
        self.saved_s += saved_s
        self._count("used", keys)
        self._count("late", late)
        return AheadUse(self._tokens(keys), self._tokens(late), saved_s)

    def wasted(self, reads: Mapping[bytes, str]) -> None:
        """Count chunks as wasted, in total and for the requests that they were read for."""
        for key, request in reads.items():
            self._took_s.pop(key, None)
            self._wasted[request].append(key)
        self._count("wasted", reads.keys())

    def take_wasted(self, request: str) -> int:
        """The number of tokens wasted for this request since the previous call."""
        wasted = self._wasted.pop(request, None)
        return self._tokens(wasted) if wasted else 0

    def forget(self) -> None:
        """Forget the chunks and requests, and keep the totals."""
        self._took_s.clear()
        self._wasted.clear()

    def totals(self) -> dict[str, float]:
        """The counts in bytes of the first lower tier, and the saved time, by flat name."""
        found: dict[str, float] = {f"ahead_{what}_bytes": n for what, n in self._bytes.items()}
        return found | {"ahead_saved_seconds": self.saved_s}

    def _count(self, what: str, keys: Collection[bytes]) -> None:
        if not keys:
            return
        self.chunks[what] += len(keys)
        for group, count in Counter(map(group_of, keys)).items():
            self._bytes[what] += self._ranks * count * self._groups[group].footprints[0]

    def _tokens(self, keys: Iterable[bytes]) -> int:
        counts = Counter(map(group_of, keys))
        tokens = (n * self._groups[group].chunk_tokens for group, n in counts.items())
        return max(tokens, default=0)
