"""The keys of a request's chunks, made on first use.

A prompt of 131,072 tokens has 8,192 chunks in every group. Making their keys takes most of a
millisecond of vLLM's scheduler thread and about as much memory as vLLM's hashes of it. But few keys
are needed before the prompt is computed: the first keys of a new prompt, the keys after the part in
vLLM's cache, and the last keys for a sliding window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from offload.errors import InvariantError
from offload.layout.keys import chunk_keys

PAGE = 256
"""Number of keys per page. A query for a key also makes the keys before it in its page, but no
others."""


class RequestKeys(Sequence[bytes]):
    """The keys of one group's chunks, in prefix order; see ``offload.layout.keys.chunk_keys``.

    vLLM's list of block hashes is referenced, not copied; ``grow`` sets how many of them are valid.
    A resumed session replaces only hashes of tokens that were never part of a step, and the keys of
    such tokens were never requested. So keys stay valid once they are made.
    """

    __slots__ = ("_count", "_group", "_hashes", "_identity", "_keys", "_made", "_per_chunk")

    def __init__(self, group: int, hashes_per_chunk: int, identity: bytes = b"") -> None:
        self._group = group
        self._per_chunk = hashes_per_chunk
        self._identity = identity
        self._hashes: Sequence[bytes] = ()
        self._count = 0
        self._keys: list[bytes] = []  # an empty key is not made yet
        self._made: dict[int, int] = {}  # the number of keys made in each page

    def grow(self, block_hashes: Sequence[bytes]) -> None:
        """Set the request's current hashes, which cover all of its whole chunks."""
        self._hashes = block_hashes
        self._count = len(block_hashes) // self._per_chunk

    def frozen(self, count: int) -> RequestKeys:
        """The first ``count`` keys, which never change again, so another thread may read them."""
        found = RequestKeys(self._group, self._per_chunk, self._identity)
        found.grow(self._hashes[: min(count, self._count) * self._per_chunk])
        return found

    def make(self, end: int, keys_max: int) -> int:
        """Make up to ``keys_max`` of the first ``end`` keys ahead, or all; return how many were
        made."""
        end, left = min(end, self._count), keys_max
        for page in range(-(-end // PAGE)):
            wanted = min(PAGE, end - page * PAGE, self._made.get(page, 0) + left)
            left -= self._make(page, wanted)
        return keys_max - left

    def first(self, count: int) -> Sequence[bytes]:
        """The first ``count`` keys. The result may be the list itself and not a copy: do not change
        it."""
        self._ensure(0, min(count, self._count))
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
            chunk = range(self._count)[at]
            self._ensure(chunk, chunk + 1)
            return self._keys[chunk]
        first, end, step = at.indices(self._count)
        if step != 1:
            return [self[chunk] for chunk in range(first, end, step)]
        self._ensure(first, end)
        return self._keys[first:end]

    def _ensure(self, first: int, end: int) -> None:
        """Make the keys ``[first, end)`` available."""
        for page in range(first // PAGE, -(-end // PAGE)):
            self._make(page, min(PAGE, end - page * PAGE))

    def _make(self, page: int, count: int) -> int:
        """Make the first ``count`` keys of a page; return how many of them are new."""
        made = self._made.get(page, 0)
        if made >= count:
            return 0
        first, end = page * PAGE + made, page * PAGE + count
        found = chunk_keys(self._hashes, self._group, self._per_chunk, first, self._identity, end)
        if len(found) != end - first:
            raise InvariantError(f"the hashes of chunks {first} to {end} are no longer available")
        self._keys += [b""] * (first - len(self._keys))
        self._keys[first:end] = found
        self._made[page] = count
        return count - made
