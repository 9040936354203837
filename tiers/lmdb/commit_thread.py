"""The one thread that makes writes durable and names them: payload first, index second.

Changes queue up while a commit runs; the next commit takes all of them, so the number of flushes
follows the speed of the disk by itself. While writes are still on their way to the disk the
thread waits for them (``GATHER_S``): a flush among them holds them up, and tells nobody anything
whose call is not written as a whole. Deletions and uses wait for any write (``LAZY_S``), unless
somebody is in a ``hurry``: each flush saved is milliseconds of the disk.

Ownership: ``submit`` is called by the event loop (removals, refreshes, clears) and the I/O
threads (puts); a change belongs to this thread until it is handed to ``post``, which must be
callable from any thread. ``failure`` is written here and read anywhere: once set it stays.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import lmdb

from tiers.base import WriteOutcome
from tiers.io.direct_io import PayloadFile
from tiers.lmdb.changes import Change, Clear, Put, Refresh, Remove
from tiers.lmdb.index import Changes, LmdbIndex

GATHER_S = 0.1
LAZY_S = 0.1
"""How long what nobody waits for (deletions, recency) may wait for a write to share its commit."""
CHANGES_MAX = 8192
HALVED_MIN = 512
"""Smaller batches that do not fit the map are refused whole: deletions need what that leaves."""


@dataclass(slots=True)
class Counters:
    """What the thread has done; plain numbers, written by it alone."""

    commits: int = 0
    sync_failures: int = 0
    map_full: int = 0


class CommitThread:
    """See the module. ``failure`` is why the index cannot be written any more, if so."""

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
        """Queue changes, all puts or none; from any thread. Wakes the thread unless it is waiting
        for more writes anyway, and more are on their way."""
        self._waiting.append(changes)
        is_put = isinstance(changes[0], Put)
        if not (is_put and self._is_gathering_puts and self._writes_pending()):
            self._wake.put(None)

    def hurry(self) -> None:
        """Somebody waits for what is queued by now."""
        self._is_urgent = True
        self._wake.put(None)

    def stop(self) -> None:
        """Commit what is queued and end. Blocks, for as long as the thread hangs."""
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
        # In this order: whoever saw it gathering did not wake it, and is taken along here.
        self._is_gathering_puts = self._is_urgent = False
        self._take(batch)
        return batch

    def _take(self, batch: list[Change]) -> bool:
        """Move what waits into the batch; whether there is something and room for more."""
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
        """One transaction for all of it; where the map has no room for copies of all the pages that
        a large one touches, one for each half."""
        changes, named = _merge(batch, self._index.epoch)
        try:
            if changes.edits or changes.clear_to_epoch is not None:
                (self._index.apply if named else self._index.apply_in_parts)(changes)
        except lmdb.MapFullError:
            self.counters.map_full += 1
            if not named:
                raise
            # Not around a clear: what was put before it must not be told as stored.
            if len(batch) >= HALVED_MIN and changes.clear_to_epoch is None:
                half = len(batch) // 2
                self._apply(batch[:half])
                self._apply(batch[half:])
                return
            for put in named:
                put.outcome = WriteOutcome.FULL
            self._apply([change for change in batch if not isinstance(change, Put)])
            return
        for put in named:
            put.outcome, put.is_named = WriteOutcome.OK, True


def _merge(batch: list[Change], epoch: int) -> tuple[Changes, list[Put]]:
    """The net effect of a batch, and the puts that are part of it.

    A put of an older epoch is not: its bytes come from old weights.
    """
    changes = Changes()
    named: list[Put] = []
    for change in batch:
        if isinstance(change, Clear):
            epoch = changes.clear_to_epoch = change.epoch
            changes.edits.clear()
            named.clear()
        elif isinstance(change, Remove):
            changes.edits.update(dict.fromkeys(change.keys))
        elif isinstance(change, Refresh):
            changes.edits.update(change.values)
        elif change.epoch == epoch:
            changes.edits[change.key] = change.value
            named.append(change)
    return changes, named
