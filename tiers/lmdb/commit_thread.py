"""The thread that commits writes of an exclusive LMDB tier: it flushes payloads, then updates the
index.

Changes queue up while a commit runs, and the next commit takes all of them, so the number of
flushes adapts to the speed of the disk. While more writes are in progress, the thread waits for
them (``GATHER_S``): a flush in between would slow these writes down, and no call would return
earlier. Deletions and recency updates wait until there is a write to join (at most ``LAZY_S``)
unless ``hurry`` is called: every flush saved is milliseconds of disk time.

Ownership: the event loop (removals, refreshes, clears) and the I/O threads (puts) call ``submit``.
A change belongs to this thread until it is passed to ``post``, which must be callable from any
thread. ``failure`` is written here, read by any thread, and never cleared.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import lmdb

from tiers.base import Key, WriteOutcome
from tiers.io.direct_io import PayloadFile
from tiers.io.extents import Extents
from tiers.lmdb.index import Changes, LmdbIndex
from tiers.lmdb.io_jobs import Put

GATHER_S = 0.1
LAZY_S = 0.1
"""Longest time that deletions and recency updates wait to share the commit of a write."""
CHANGES_MAX = 8192
HALVED_MIN = 512
"""A batch smaller than this is rejected as a whole if it does not fit into the map, because
deletions need the rest of the map."""


@dataclass(slots=True, eq=False)
class Remove:
    """Keys to delete, and the allocations that become free once that is durable."""

    keys: list[Key]
    allocations: list[Extents]


@dataclass(slots=True, eq=False)
class Refresh:
    """New values of present records, with a later time of use."""

    values: list[tuple[Key, bytes]]


@dataclass(slots=True, eq=False)
class Clear:
    """Delete everything and begin an epoch."""

    epoch: int


Change = Put | Remove | Refresh | Clear


@dataclass(slots=True)
class Counters:
    """Counters of the thread: plain numbers that only it writes."""

    commits: int = 0
    sync_failures: int = 0


class CommitThread:
    """See the module's docstring. ``failure`` is the reason why the index can no longer be written,
    or ``None``."""

    def __init__(
        self,
        index: LmdbIndex,
        file: PayloadFile,
        writes_pending: Callable[[], bool],
        post: Callable[[list[Change]], None],
    ) -> None:
        self._index = index
        self._file = file
        self._writes_pending = writes_pending
        self._post = post
        self._waiting: deque[Sequence[Change]] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_gathering_puts = self._is_urgent = self._is_stopping = False
        self.failure: Exception | None = None
        self.counters = Counters()
        self._thread = threading.Thread(target=self._run, name="tier-commit", daemon=True)
        self._thread.start()

    def submit(self, changes: Sequence[Change]) -> None:
        """Queue changes, which are either all puts or contain no put. Any thread may call. Wakes
        the thread unless it is waiting for more writes that are still on their way."""
        self._waiting.append(changes)
        is_put = isinstance(changes[0], Put)
        if not (is_put and self._is_gathering_puts and self._writes_pending()):
            self._wake.put(None)

    def hurry(self) -> None:
        """Commit what is queued without waiting for more."""
        self._is_urgent = True
        self._wake.put(None)

    def stop(self) -> None:
        """Commit the queued changes and end. Blocks as long as the thread hangs."""
        self._is_stopping = True
        self._wake.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._waiting or not self._is_stopping:
            if not self._waiting:
                self._wake.get()
            batch = self._collect()
            if batch:
                self._commit(batch)
                self._post(batch)

    def _collect(self) -> list[Change]:
        batch: list[Change] = []
        deadline = time.monotonic() + LAZY_S
        while self._take(batch) and not self._is_due(batch):
            if not self._is_gathering_puts and any(isinstance(change, Put) for change in batch):
                self._is_gathering_puts = True
                deadline = time.monotonic() + GATHER_S
            try:
                self._wake.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
        # The order matters: a caller that saw the thread gathering did not wake it.
        self._is_gathering_puts = self._is_urgent = False
        self._take(batch)
        return batch

    def _take(self, batch: list[Change]) -> bool:
        """Move waiting changes into the batch. Returns True if the batch is not empty and can take
        more."""
        while self._waiting and len(batch) < CHANGES_MAX:
            batch += self._waiting.popleft()
        return 0 < len(batch) < CHANGES_MAX

    def _is_due(self, batch: list[Change]) -> bool:
        if self._is_urgent or self._is_stopping:
            return True
        if any(isinstance(change, Clear) for change in batch):
            return True
        return not self._writes_pending() and any(isinstance(change, Put) for change in batch)

    def _commit(self, batch: list[Change]) -> None:
        if self.failure is not None:
            return
        if any(isinstance(change, Put) for change in batch) and not self._sync():
            batch = [change for change in batch if not isinstance(change, Put)]
        try:
            self._apply(batch)
            self.counters.commits += 1
        except Exception as error:
            # Whatever LMDB raises, the state on disk is unknown and its environment may be
            # dead (MDB_PANIC): nothing more is written until the tier is opened again.
            self.failure = error

    def _sync(self) -> bool:
        try:
            self._file.sync()
        except OSError:
            self.counters.sync_failures += 1
            return False
        return True

    def _apply(self, batch: list[Change]) -> None:
        """Commit the batch in one transaction. If the map has no space for copies of all pages that
        it changes, commit each half separately."""
        changes, named = _merge(batch, self._index.epoch)
        try:
            if changes.edits or changes.clear_to_epoch is not None:
                (self._index.apply if named else self._index.apply_in_parts)(changes)
        except lmdb.MapFullError:
            if not named:
                raise
            # Never split at a clear: puts before it must not be reported as stored.
            if len(batch) >= HALVED_MIN and changes.clear_to_epoch is None:
                half = len(batch) // 2
                self._apply(batch[:half])
                self._apply(batch[half:])
                return
            for put in named:
                put.note_outcome(WriteOutcome.FULL)
            self._apply([change for change in batch if not isinstance(change, Put)])
            return
        for put in named:
            put.note_committed()


def _merge(batch: list[Change], epoch: int) -> tuple[Changes, list[Put]]:
    """Return the net effect of a batch, and the puts that contribute to it.

    Puts of an older epoch are left out: their bytes come from old weights.
    """
    clear_to_epoch: int | None = None
    edits: dict[Key, bytes | None] = {}
    named: list[Put] = []
    for change in batch:
        if isinstance(change, Clear):
            epoch = clear_to_epoch = change.epoch
            edits.clear()
            named.clear()
        elif isinstance(change, Remove):
            edits.update(dict.fromkeys(change.keys))
        elif isinstance(change, Refresh):
            edits.update(change.values)
        elif change.epoch == epoch:
            edits[change.key] = change.value
            named.append(change)
    return Changes(clear_to_epoch, edits), named
