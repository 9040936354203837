"""Walks once over the file of an index at open: reads all records, and proves that LMDB can safely
open the file.

LMDB trusts its file and crashes on a garbled one. This walk visits every page without LMDB, in
arrays of a thousand pages, and checks the invariants that LMDB's write paths assume. These are the
checks of py-lmdb's own verifier (``lmdb.verify``), which needs four seconds per million records:
every page in use is reached exactly once, has the right number and kind, and holds nodes that lie
inside it in the order of their keys; the counters of every tree are right; every other page is
listed as free exactly once. The walk also reads the records, so that no second pass through LMDB's
cursor is needed.

The walk is stricter than LMDB only about features that an index never uses: it allows no
duplicates, and no overflow pages except in the list of free pages. For a file that this walk
rejects, the caller lets ``lmdb.verify`` decide.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from operator import lt
from pathlib import Path

import numpy as np

from tiers.lmdb.records.record_table import RecordTable
from tiers.lmdb.recovery.pages import (
    BIG_DATA,
    BRANCH,
    INTEGER_KEY,
    LEAF,
    META_PAGES,
    NO_PAGE,
    NODE_BYTES,
    OVERFLOW,
    PAGE_HEAD_BYTES,
    SUB_DATA,
    TREE_DEPTH_MAX,
    Nodes,
    Numbers,
    PageFile,
    Pages,
    Tree,
    nodes_of,
    require,
)

WALK_BATCH_BYTES = 2 << 20
"""Number of bytes of the file that are checked together, so that they stay in the processor's
cache."""
_OnLeaf = Callable[[Nodes], None]


def walk(path: Path, name: bytes) -> list[RecordTable]:
    """Check the whole file and return all entries of the named database.

    Raises ``UnsoundError`` if the file is not sound, and ``OSError`` if it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return _Walk(PageFile(fd)).run(name)
    finally:
        os.close(fd)


class _Walk:
    """One walk. ``_owned`` has one bool per page: True if the page was reached or is listed as
    free."""

    def __init__(self, file: PageFile) -> None:
        self._file = file
        self._batch_pages = max(1, WALK_BATCH_BYTES // file.meta.page_bytes)
        # Twice the size, to include pages between those of a batch.
        self._buffer: Pages = np.empty((2 * self._batch_pages, file.meta.page_bytes), np.uint8)
        self._owned = np.zeros(file.meta.page_count, np.bool_)
        self._owned[:META_PAGES] = True
        self._overflow_pages = 0

    def run(self, name: bytes) -> list[RecordTable]:
        meta = self._file.meta
        free, named = list[Numbers](), dict[bytes, Tree]()
        wanted = _Tables(0, 0)
        require(meta.free.flags == INTEGER_KEY, f"the list of free pages: {meta.free.flags} flags")
        self._tree(meta.free, lambda nodes: free.extend(self._free_lists(nodes)), is_list=True)
        self._tree(meta.main, lambda nodes: named.update(_named_trees(nodes)))
        for key, tree in named.items():
            tables = _Tables(tree.entries, self._file.file_bytes)
            self._tree(tree, tables.add if key == name else _require_plain)
            if key == name:
                wanted = tables
        for numbers in free:
            self._own(numbers)
        require(self._owned.all(), "pages that are neither in use nor free")
        return wanted.tables()

    def _own(self, numbers: Numbers) -> None:
        """Record that these pages have an owner; no page may have two."""
        fits = (numbers >= META_PAGES) & (numbers < self._owned.size)
        require(fits.all(), "a page number beyond the file")
        before = np.count_nonzero(self._owned)
        self._owned[numbers] = True
        require(
            np.count_nonzero(self._owned) == before + numbers.size, "a page that is owned twice"
        )

    def _tree(self, tree: Tree, on_leaf: _OnLeaf, *, is_list: bool = False) -> None:
        """Visit a tree level by level and check its counters."""
        is_plain = is_list or not (tree.flags or tree.pad)
        require(is_plain, f"a database with flags {tree.flags} and pad {tree.pad}")
        if tree.root == NO_PAGE:
            require(not any(tree[2:7]), "an empty tree with counters")
            return
        require(0 < tree.depth <= TREE_DEPTH_MAX, f"a tree of depth {tree.depth}")
        require(tree.root < self._owned.size, "a root beyond the file")
        numbers = np.array([tree.root], np.int64)
        branch_pages = self._overflow_pages = 0
        for _ in range(tree.depth - 1):
            self._own(numbers)
            branch_pages += numbers.size
            numbers = np.concatenate(
                [_children(nodes, is_list=is_list) for nodes in self._nodes(numbers, BRANCH)]
            )
        self._own(numbers)
        entries = self._leaves(numbers, on_leaf, is_list=is_list)
        counted = (branch_pages, numbers.size, self._overflow_pages, entries)
        require(counted == tree[3:7], f"a tree with {counted} pages and entries, not {tree[3:7]}")

    def _leaves(self, numbers: Numbers, on_leaf: _OnLeaf, *, is_list: bool) -> int:
        """Visit all leaves of one tree in file order; ``numbers`` is in key order. Returns the
        number of entries."""
        file_order = np.argsort(numbers)
        firsts, lasts = list[bytes](), list[bytes]()
        entries = 0
        for nodes in self._nodes(numbers[file_order], LEAF):
            last = np.cumsum(nodes.counts) - 1
            first = last - nodes.counts + 1
            firsts += nodes.keys(first)
            lasts += nodes.keys(last)
            _require_order(nodes, first, is_list=is_list)
            entries += nodes.at.size
            on_leaf(nodes)
        order = np.argsort(file_order).tolist()
        before = map(lasts.__getitem__, order)
        after = map(firsts.__getitem__, order[1:])
        if is_list:
            is_rising = all(map(lt, map(_number, before), map(_number, after)))
        else:
            is_rising = all(map(lt, before, after))
        require(is_rising, "leaves out of order")
        return entries

    def _nodes(self, numbers: Numbers, kind: int) -> Iterator[Nodes]:
        """The nodes of these pages, part by part. The memory is reused for the next part."""
        for start in range(0, numbers.size, self._batch_pages):
            part = numbers[start : start + self._batch_pages]
            pages, rows = self._file.gather(part, self._buffer)
            yield nodes_of(pages, rows, part, kind)

    def _free_lists(self, nodes: Nodes) -> Iterator[Numbers]:
        """The page numbers in these nodes. Each entry: transaction -> count u64, then page numbers
        in descending order."""
        require(not (nodes.flags & ~BIG_DATA).any(), "a list of free pages that has flags")
        everything = np.arange(nodes.at.size)
        for node, key in zip(everything.tolist(), nodes.keys(everything), strict=True):
            require(1 <= _number(key) <= self._file.meta.transaction, "a future transaction")
            raw = nodes.data(node)
            if nodes.flags[node] & BIG_DATA:
                raw = self._overflow(_number(raw), int(nodes.word[node]))
            require(raw and not len(raw) % 8, "a list of free pages that is cut off")
            listed = np.frombuffer(raw, np.uint64)
            require(listed[0] == listed.size - 1, "a list of free pages of another length")
            require((listed[1:] < self._owned.size).all(), "a free page beyond the file")
            numbers = listed[1:].astype(np.int64)
            require((numbers[1:] < numbers[:-1]).all(), "a list of free pages out of order")
            yield numbers

    def _overflow(self, number: int, length: int) -> bytes:
        """The data of an overflow extent."""
        page_bytes = self._file.meta.page_bytes
        count = (PAGE_HEAD_BYTES - 1 + length) // page_bytes + 1
        require(number + count <= self._owned.size, "an overflow extent beyond the file")
        self._own(np.arange(number, number + count))
        self._overflow_pages += count
        pages = np.empty((count, page_bytes), np.uint8)
        self._file.read(number, pages)
        raw = pages.tobytes()
        is_ours = _number(raw[:8]) == number and raw[10:12] == _OVERFLOW_FLAGS
        require(is_ours, "an overflow extent with other flags")
        found = _number(raw[12:16])
        require(found == count, f"an overflow extent of {found} pages instead of {count}")
        return raw[PAGE_HEAD_BYTES : PAGE_HEAD_BYTES + length]


_OVERFLOW_FLAGS = OVERFLOW.to_bytes(2, sys.byteorder)


def _number(raw: bytes) -> int:
    return int.from_bytes(raw, sys.byteorder)


def _is_before(one: bytes, two: bytes, is_list: bool) -> bool:
    """Compare in LMDB's order: as bytes, or as numbers in the list of free pages."""
    return _number(one) < _number(two) if is_list else one < two


def _require_order(nodes: Nodes, first: Numbers, *, is_list: bool, skip: int = 0) -> None:
    """Require that the keys of each page ascend from its node ``skip`` on. ``first`` are the pages'
    first nodes.

    Compares the first eight bytes of neighbours as numbers, and the whole keys only where that is
    inconclusive.
    """
    words = np.ndarray(((nodes.flat.nbytes - 8) // 2 + 1,), ">u8", nodes.flat, strides=(2,))
    heads = words[np.minimum((nodes.at + NODE_BYTES) // 2, words.size - 1)].astype(np.uint64)
    is_ordered = (heads[1:] > heads[:-1]) & (nodes.key_bytes >= 8)[1:] & (nodes.key_bytes >= 8)[:-1]
    is_ordered &= not is_list
    for step in range(skip + 1):  # a page's first keys have no predecessor
        across = first + step - 1
        is_ordered[across[(across >= 0) & (across < is_ordered.size)]] = True
    undecided = np.flatnonzero(~is_ordered)
    pairs = zip(nodes.keys(undecided), nodes.keys(undecided + 1), strict=True)
    require(all(_is_before(one, two, is_list) for one, two in pairs), "keys out of order")


def _children(nodes: Nodes, *, is_list: bool) -> Numbers:
    """Return the children of branch pages. The first key of each branch page is empty or has no
    meaning."""
    first = np.cumsum(nodes.counts) - nodes.counts
    _require_order(nodes, first, is_list=is_list, skip=1)
    return nodes.word | nodes.flags << 32


def _named_trees(nodes: Nodes) -> dict[bytes, Tree]:
    everything = np.arange(nodes.at.size)
    require((nodes.flags == SUB_DATA).all(), "an entry of the main database is no database")
    return {
        key: Tree.load(nodes.data(node))
        for node, key in zip(everything.tolist(), nodes.keys(everything), strict=True)
    }


class _Tables:
    """The entries of one database as tables, one for each pair of lengths."""

    def __init__(self, entries: int, file_bytes: int) -> None:
        """``entries`` is the number of entries according to the file."""
        self._entries, self._file_bytes = entries, file_bytes
        self._by_shape: dict[int, RecordTable] = {}

    def tables(self) -> list[RecordTable]:
        """The tables of all entries added."""
        return list(self._by_shape.values())

    def add(self, nodes: Nodes) -> None:
        """Add keys and values. Each pair is adjacent in the page, so it is copied as one piece."""
        _require_plain(nodes)
        some = slice(1) if nodes.same else slice(None)
        shapes = nodes.key_bytes[some] << 32 | nodes.word[some]
        for shape in np.unique(shapes).tolist():
            starts = (nodes.at if nodes.same else nodes.at[shapes == shape]) + NODE_BYTES
            table = self._by_shape.get(shape)
            if table is None:
                table = self._by_shape[shape] = self._table(shape >> 32, shape & 0xFFFFFFFF)
            table.memory.extend(nodes.windows(starts, table.memory.width))

    def _table(self, key_bytes: int, value_bytes: int) -> RecordTable:
        """Return a table for a new shape. Usually all entries have the first shape, so its table
        gets memory for all of them; unused memory costs nothing."""
        if self._by_shape:
            return RecordTable(key_bytes, value_bytes)
        rows_max = self._file_bytes // (key_bytes + value_bytes)
        return RecordTable(key_bytes, value_bytes, min(self._entries, rows_max))


def _require_plain(nodes: Nodes) -> None:
    require(not nodes.flags[: 1 if nodes.same else None].any(), "entries of another kind")
