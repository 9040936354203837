"""LMDB's file format, as far as an index uses it (LMDB 0.9, data version 1, 64 bit).

A file consists of pages of one size, numbered from 0. Pages 0 and 1 are the two meta pages; the one
with the later transaction is valid. Every other page either belongs to exactly one B+tree (the list
of free pages, the main database, or a named database inside it) or is listed as free.

    page      number u64, pad u16, flags u16, lower u16, upper u16, then one u16 per node: its
              offset in the page. ``lower`` is where these offsets end, ``upper`` where nodes begin.
              The first page of an overflow extent has its length as u32 instead of both.
    node      low u16, high u16, flags u16, key length u16, key, data
    branch    low | high << 16 | flags << 32 is the number of the page below
    leaf      low | high << 16 is the length of the data, which follows the key at once
    tree      pad u32, flags u16, depth u16, then u64: branch, leaf and overflow pages, entries,
              root
    meta      page header, magic u32, version u32, address u64, map size u64, tree of the free list,
              main tree, last page u64, transaction u64; the first tree's pad is the page size

Numbers are in the processor's byte order. Source: ``struct MDB_page`` and what follows it in LMDB's
``mdb.c``.
"""

from __future__ import annotations

import itertools
import os
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

META_PAGES = 2
PAGE_BYTES_MAX = 1 << 15
"""LMDB's limit. Its pages are as large as those of the machine that created the file, up to this
size."""
PAGE_HEAD_BYTES = 16
NODE_BYTES = 8
NO_PAGE = (1 << 64) - 1
BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8
BIG_DATA, SUB_DATA = 1, 2
INTEGER_KEY = 8
TREE_DEPTH_MAX = 32

_MAGIC = 0xBEEFC0DE
_VERSION = 1
_TREE = struct.Struct("=IHH5Q")
TREE_BYTES = _TREE.size
_META = struct.Struct(f"=QHHHHII8xQ{TREE_BYTES}s{TREE_BYTES}sQQ")
_HEAD = np.dtype(
    [("number", "=u8"), ("pad", "=u2"), ("flags", "=u2"), ("lower", "=u2"), ("upper", "=u2")]
)

Pages = npt.NDArray[np.uint8]
"""Whole pages: an array of shape (count, page bytes)."""
Numbers = npt.NDArray[np.int64]


class UnsoundError(Exception):
    """Raised if LMDB would not write such a file, or if this module does not understand it."""


class DamagedError(UnsoundError):
    """Raised for damage that LMDB's verifier does not detect and that LMDB would make worse."""


def require(is_true: Any, what: str) -> None:
    """Raise ``UnsoundError`` unless the condition holds."""
    if not is_true:
        raise UnsoundError(what)


class Tree(NamedTuple):
    """The file's description of one B+tree."""

    pad: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int

    @classmethod
    def load(cls, raw: bytes) -> Tree:
        require(len(raw) == TREE_BYTES, f"a tree record of {len(raw)} bytes")
        return cls._make(_TREE.unpack(raw))


@dataclass(frozen=True, slots=True)
class Meta:
    """The meta page that is valid."""

    page_bytes: int
    free: Tree
    main: Tree
    page_count: int
    transaction: int


class PageFile:
    """The file, read without a memory map, so that a truncated file causes an error instead of a
    SIGBUS."""

    def __init__(self, fd: int) -> None:
        """Raises ``UnsoundError``, and ``OSError`` as all methods do."""
        self._fd = fd
        self.file_bytes = os.fstat(fd).st_size
        self.meta = self._read_meta()

    def _read_meta(self) -> Meta:
        page_bytes, first = self._parse_meta(0, 0)
        require(
            256 <= page_bytes <= PAGE_BYTES_MAX and not page_bytes & (page_bytes - 1),
            f"pages of {page_bytes} bytes",
        )
        same_bytes, second = self._parse_meta(1, page_bytes)
        require(page_bytes == same_bytes, "the meta pages disagree on the page size")
        require(not first.transaction & 1, "meta page 0 has an odd transaction")
        require(
            second.transaction & 1 or not second.transaction, "meta page 1 has an even transaction"
        )
        meta = second if first.transaction < second.transaction else first
        # Pages at the end that were freed before they were ever written are missing from the file.
        require(
            META_PAGES <= meta.page_count <= 2 * (self.file_bytes // page_bytes),
            f"{meta.page_count} pages in {self.file_bytes} bytes",
        )
        return meta

    def _parse_meta(self, number: int, offset: int) -> tuple[int, Meta]:
        raw = os.pread(self._fd, _META.size, offset)
        require(len(raw) == _META.size, f"meta page {number} is cut off")
        own, _, flags, _, _, magic, version, _, free, main, last, transaction = _META.unpack(raw)
        is_meta = own == number and flags & META and magic == _MAGIC and version == _VERSION
        require(is_meta, f"page {number} is no meta page of LMDB 0.9")
        free_tree = Tree.load(free)
        page_bytes = free_tree.pad
        return page_bytes, Meta(page_bytes, free_tree, Tree.load(main), last + 1, transaction)

    def gather(self, numbers: Numbers, into: Pages) -> tuple[Pages, Numbers]:
        """Read these pages into the front of ``into``. Returns the part that was filled, and the
        row of each page in it. If all pages lie close together, they are read with one system call,
        including the gaps between them; otherwise each run of adjacent pages is read separately."""
        steps = numbers[1:] - numbers[:-1]
        first, last = int(numbers[0]), int(numbers[-1])
        if (steps > 0).all() and last - first < len(into):
            pages = into[: last - first + 1]
            self.read(first, pages)
            return pages, numbers - first
        breaks = np.flatnonzero(steps != 1) + 1
        for start, stop in itertools.pairwise([0, *breaks.tolist(), numbers.size]):
            self.read(int(numbers[start]), into[start:stop])
        return into[: numbers.size], np.arange(numbers.size)

    def read(self, first: int, into: Pages) -> None:
        """Fill ``into`` with the pages from ``first`` on."""
        flat, offset = into.reshape(-1), first * self.meta.page_bytes
        while flat.nbytes:
            moved = os.preadv(self._fd, [flat], offset)  # type: ignore[list-item]  # arrays are buffers
            require(moved > 0, f"the file ends inside page {offset // self.meta.page_bytes}")
            flat, offset = flat[moved:], offset + moved


@dataclass(frozen=True, slots=True)
class Nodes:
    """All nodes of some pages, page by page, in the order of their keys.

    ``counts`` has one number per page, the other arrays one per node: ``at``, its byte offset in
    ``flat``; the 32 bits of ``low`` and ``high``; flags; length of the key. If ``same``, the last
    three are equal in all nodes.
    """

    flat: npt.NDArray[np.uint8]
    counts: Numbers
    at: Numbers
    word: Numbers
    flags: Numbers
    key_bytes: Numbers
    same: bool

    def keys(self, chosen: Numbers) -> list[bytes]:
        """The keys of some nodes."""
        starts, lengths = self.at[chosen] + NODE_BYTES, self.key_bytes[chosen]
        if not (lengths == lengths[:1]).all():
            pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
            return [self.flat[at : at + n].tobytes() for at, n in pairs]
        if not starts.size or not lengths[0]:
            return [b""] * starts.size
        return self.windows(starts, int(lengths[0])).tolist()  # type: ignore[no-any-return]  # a void's item is bytes

    def windows(self, starts: Numbers, length: int) -> npt.NDArray[np.void]:
        """``length`` bytes at each of these even offsets."""
        count = (self.flat.nbytes - length) // 2 + 1
        found = np.ndarray((count,), f"V{length}", self.flat, strides=(2,))
        return found[starts // 2]

    def data(self, node: int) -> bytes:
        """The data of one leaf node. If the data overflows: the number of the first overflow
        page."""
        start = int(self.at[node]) + NODE_BYTES + int(self.key_bytes[node])
        length = 8 if self.flags[node] & BIG_DATA else int(self.word[node])
        return bytes(self.flat[start : start + length])


def nodes_of(pages: Pages, rows: Numbers, numbers: Numbers, kind: int) -> Nodes:
    """Return the nodes of the pages at these rows of ``pages``, which are all of one kind. Raises
    ``UnsoundError`` if a page does not have the given number and kind, or a node reaches beyond its
    page."""
    page_bytes = pages.shape[1]
    head = pages[:, :PAGE_HEAD_BYTES][rows].view(_HEAD)[:, 0]
    lower, upper = head["lower"].astype(np.int64), head["upper"].astype(np.int64)
    require((head["number"] == numbers).all(), "the number of a page does not match its offset")
    require(
        (head["flags"] == kind).all(), "the kind of a page does not match its position in the tree"
    )
    fits = (lower > PAGE_HEAD_BYTES) & (lower <= upper) & (upper <= page_bytes) & (lower % 2 == 0)
    require(fits.all(), "a page has impossible bounds")
    counts = (lower - PAGE_HEAD_BYTES) // 2
    widest = int(counts.max())
    offsets = pages.view(np.uint16)[:, PAGE_HEAD_BYTES // 2 : PAGE_HEAD_BYTES // 2 + widest][rows]
    is_node = np.arange(widest) < counts[:, None]
    lowest = np.where(is_node, offsets, PAGE_BYTES_MAX).min(1)
    inside = offsets[is_node]
    last = int(inside.max())
    fits = last + NODE_BYTES <= page_bytes and not (inside & 1).any()
    require((lowest >= upper).all() and fits, "a node lies outside its page")
    at = np.repeat(rows * page_bytes, counts)
    at += inside
    flat = pages.reshape(-1)
    fields = np.ndarray((flat.nbytes // 2 - 3,), np.int64, flat, strides=(2,))[at >> 1]
    same = bool((fields == fields[0]).all())
    if same:
        fields = fields[:1]
    word, flags, key_bytes = fields & 0xFFFFFFFF, fields >> 32 & 0xFFFF, fields >> 48 & 0xFFFF
    size = NODE_BYTES + key_bytes
    if kind == LEAF:
        size += np.where(flags & BIG_DATA, 8, word)
    taken = size + (size & 1)
    firsts = np.cumsum(counts) - counts
    filled = counts * taken if same else np.add.reduceat(taken, firsts)
    # with gaps, a deletion would move nodes by a wrong distance
    if (filled != page_bytes - upper).any():
        raise DamagedError("nodes that overlap, or leave gaps")
    size += last if same else inside
    require((size <= page_bytes).all(), "a node reaches beyond its page")
    word, flags, key_bytes = (np.broadcast_to(part, at.shape) for part in (word, flags, key_bytes))
    return Nodes(flat, counts, at, word, flags, key_bytes, same)
