"""The keys of a request's chunks, made as they are asked for.

A prompt of 131,072 tokens has 8,192 chunks in every group: making their keys is most of a
millisecond of vLLM's scheduler thread and about as much memory as vLLM's own hashes of it. Of a new
prompt only the first few are ever asked for before it is computed, of one whose beginning lies in
vLLM's own cache those behind it, and of a sliding window those at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from offload.errors import InvariantError
from offload.layout.keys import chunk_keys

PAGE = 256
"""Keys that are made in order: asking for one makes those before it in its page, and no other."""


class RequestKeys(Sequence[bytes]):
    """The keys of one group's chunks, in prefix order; see ``offload.layout.keys.chunk_keys``.

    vLLM's list of block hashes is kept, not copied: ``grow`` says how much of it counts. A session
    that goes on replaces only hashes of tokens that were never part of a step, which nobody has
    asked for. What was asked for once is kept: a key knows its own hash then.
    """

    __slots__ = ("_count", "_group", "_hashes", "_identity", "_keys", "_made", "_per_chunk")

    def __init__(self, group: int, hashes_per_chunk: int, identity: bytes = b"") -> None:
        self._group = group
        self._per_chunk = hashes_per_chunk
        self._identity = identity
        self._hashes: Sequence[bytes] = ()
        self._count = 0
        self._keys: list[bytes] = []  # empty where they are not made
        self._made: dict[int, int] = {}  # of each page so many, its first

    def grow(self, block_hashes: Sequence[bytes]) -> None:
        """These are the request's hashes now: all of its whole chunks have keys."""
        self._hashes = block_hashes
        self._count = len(block_hashes) // self._per_chunk

    def frozen(self, count: int) -> RequestKeys:
        """The first ``count`` keys, which nothing changes any more: also for another thread."""
        found = RequestKeys(self._group, self._per_chunk, self._identity)
        found.grow(self._hashes[: min(count, self._count) * self._per_chunk])
        return found

    def make(self, end: int, most: int) -> int:
        """Make up to ``most`` of the first ``end`` keys ahead, or all; how many were made."""
        end, left = min(end, self._count), most
        for page in range(-(-end // PAGE)):
            wanted = min(PAGE, end - page * PAGE, self._made.get(page, 0) + left)
            left -= self._make(page, wanted)
        return most - left

    def first(self, count: int) -> Sequence[bytes]:
        """The first ``count`` keys, which the caller does not change: not copied if it is all of a
        request that has ended."""
        self._ask(0, min(count, self._count))
        return self._keys if count >= len(self._keys) else self._keys[:count]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.first(self._count))

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if not isinstance(at, slice):
            place = range(self._count)[at]
            self._ask(place, place + 1)
            return self._keys[place]
        first, end, step = at.indices(self._count)
        if step != 1:
            return [self[chunk] for chunk in range(first, end, step)]
        self._ask(first, end)
        return self._keys[first:end]

    def _ask(self, first: int, end: int) -> None:
        """The keys ``[first, end)`` are needed."""
        for page in range(first // PAGE, -(-end // PAGE)):
            self._make(page, min(PAGE, end - page * PAGE))

    def _make(self, page: int, count: int) -> int:
        """Make the first ``count`` keys of a page; how many were not made before."""
        made = self._made.get(page, 0)
        if made >= count:
            return 0
        first, end = page * PAGE + made, page * PAGE + count
        found = chunk_keys(self._hashes, self._group, self._per_chunk, first, self._identity, end)
        if len(found) != end - first:
            raise InvariantError(f"hashes of chunks {first} to {end} have gone")
        self._keys += [b""] * (first - len(self._keys))
        self._keys[first:end] = found
        self._made[page] = count
        return count - made
