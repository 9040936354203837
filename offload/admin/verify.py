"""The work of ``kvtiers verify`` on one rank's folder: it reads and verifies every record.

If a server owns the folder, nothing is changed: the server drops a damaged record when it next
reads that record, and counts a miss. Without an owner, the command removes damaged records.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from offload.admin.offline_edits import RankFolderInUseError, remove_damaged
from offload.namespaces.inventory import FolderVerdict, RankFolder, Standing
from tiers.offline.offline_folder import (
    Checker,
    FolderChangedError,
    ListedRecord,
    OfflineFolder,
    RecordHealth,
)


class RateLimit:
    """Limits reading to ``bytes_per_s`` by sleeping; 0 means no limit."""

    def __init__(
        self,
        bytes_per_s: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._free_at = clock()

    def spend(self, byte_count: int) -> None:
        """Wait until this number of bytes may be read."""
        if delay_s := self.delay_s(byte_count):
            self._sleep(delay_s)

    def delay_s(self, byte_count: int) -> float:
        """The time to wait before this number of bytes may be read; 0 for less than 10 ms."""
        if not self._rate:
            return 0.0
        now = self._clock()
        self._free_at = max(self._free_at, now) + byte_count / self._rate
        delay_s = self._free_at - now
        return delay_s if delay_s > 0.01 else 0.0


@dataclass(slots=True)
class VerifyResult:
    """The result for one rank's folder.

    ``gone`` counts records that the owner removed or replaced meanwhile, ``unread`` counts
    encrypted records whose key was not given. ``problem`` is the reason why the folder could not
    be read to its end, or why a server would not use it; ``standing`` and ``remark`` are as in
    ``offload.namespaces.inventory``.
    """

    rank_folder: RankFolder
    records: int = 0
    read_bytes: int = 0
    good: int = 0
    gone: int = 0
    unread: int = 0
    damaged: list[ListedRecord] = field(default_factory=list)
    removed: int = 0
    owner_pid: int | None = None
    standing: str = Standing.WHOLE.value
    problem: str = ""
    remark: str = ""

    def judge(self, verdict: FolderVerdict) -> None:
        """Record what the next server to start would do with the folder."""
        self.standing = verdict.standing.value
        self.problem, self.remark = verdict.problem, verdict.remark

    def fail(self, problem: str) -> None:
        """Set the reason why the folder could not be read to its end, unless one is known."""
        self.problem = self.problem or problem

    def note_owner(self) -> None:
        """Record the process that uses the folder, if there is one."""
        owner = self.rank_folder.owner()
        self.owner_pid = owner.pid if owner else None

    @property
    def is_ok(self) -> bool:
        """True if everything could be read, nothing was damaged and a server would use it."""
        return not (self.damaged or self.problem)

    def to_json(self) -> dict[str, Any]:
        """The result as plain values, with damaged records by key."""
        return {
            "namespace": self.rank_folder.namespace,
            "replica": self.rank_folder.replica,
            "rank": self.rank_folder.rank,
            "owner_pid": self.owner_pid,
            "records": self.records,
            "read_bytes": self.read_bytes,
            "good": self.good,
            "gone": self.gone,
            "unread": self.unread,
            "damaged": [_name(found) for found in self.damaged],
            "removed": self.removed,
            "standing": self.standing,
            "problem": self.problem,
            "remark": self.remark,
        }


def _name(found: ListedRecord) -> str:
    """A record's key as hex. A file tier's record with a damaged header is named by its file."""
    return found.key.hex()


def scrub(
    result: VerifyResult,
    reader: OfflineFolder,
    *,
    rate_limit: RateLimit,
    advance: Callable[[int], None],
) -> None:
    """Read and verify everything.

    ``advance`` gets the number of bytes read. Modifies ``result``. Raises ``FolderChangedError``.
    """
    checker = Checker(reader)
    for batch in reader.batches():
        for record in batch:
            rate_limit.spend(record.stored_bytes)
            health, payload = checker.check(record)
            result.records += 1
            result.read_bytes += payload.nbytes
            result.good += health is RecordHealth.GOOD
            result.gone += health is RecordHealth.GONE
            result.unread += health is RecordHealth.SEALED
            if health is RecordHealth.DAMAGED:
                result.damaged.append(record)
            advance(record.stored_bytes)


def repair(result: VerifyResult, key_file: str) -> None:
    """Remove damaged records, unless a server uses the folder. Modifies ``result``.

    Raises ``TierError``, ``TierUnavailableError`` or ``OSError``.
    """
    owner = result.rank_folder.owner()

    def note(removed: int) -> None:
        result.removed += removed

    if owner is None and result.damaged:
        try:
            remove_damaged(result.rank_folder, result.damaged, key_file, note)
        except RankFolderInUseError as error:  # a server has started in the meantime
            owner = error.owner
        except FolderChangedError as error:
            result.fail(f"{error} before its damaged records were")
    result.owner_pid = owner.pid if owner else None
