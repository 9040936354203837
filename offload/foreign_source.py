"""Reads the records of another geometry, one replica of one namespace, and puts them together.

The stores may have a live owner: they are read as the command line reads them (decision 0070). What
the owner removes, replaces or resets meanwhile is a miss. Belongs to one thread; blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from offload.errors import NamespaceError
from offload.geometry import Geometry
from offload.keys import GROUP_BYTES, group_suffix
from offload.stores import Store
from offload.translation import GroupPlan, apply, plan_group
from tiers.base import ALIGNMENT, Buffer, Key, ReadOutcome
from tiers.foreign_tier import ForeignKey
from tiers.outside import Checker, Health, OutsideStore, StoreChangedError
from tiers.record import Identity

logger = logging.getLogger(__name__)

_NOTHING: Buffer = np.empty(0, np.uint8)


def padded(size: int) -> int:
    """Bytes of a record's payload: see ``offload.load_task.io_bytes``."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class TranslatedSource:
    """See the module. A ``tiers.foreign_tier.Source``."""

    def __init__(
        self,
        folder: Path,
        epoch: int,
        ranks: Sequence[Geometry],
        now: Geometry,
        key_file: str = "",
    ) -> None:
        """``folder`` is the replica's; ``ranks`` stand in no obstacle to ``now``.

        Raises ``NamespaceError`` if a rank that is needed is not there or is not what its geometry
        says, and as ``Store.open`` does.
        """
        self._epoch = epoch
        by_rank = {geometry.rank: geometry for geometry in ranks}
        first = ranks[0]
        self._plans: dict[bytes, GroupPlan] = {
            group_suffix(group.group): plan_group(first, now, group.group) for group in now.groups
        }
        needed = sorted({rank for plan in self._plans.values() for rank in plan.ranks})
        with ExitStack() as undo:
            self._stores: dict[int, OutsideStore] = {}
            for rank in needed:
                if rank not in by_rank:
                    raise NamespaceError(f"rank {rank} of {first.ranks} does not describe itself")
                store = Store(folder / f"rank-{rank}").open(key_file)
                undo.callback(store.close)
                _check_owner(store, Identity(by_rank[rank].records, rank), epoch)
                self._stores[rank] = store
            undo.pop_all()
        has_key = bool(key_file)
        self._checkers = {
            rank: Checker(store, has_key=has_key) for rank, store in self._stores.items()
        }

    def keys(self) -> list[ForeignKey]:
        """Chunks that every rank has whose part is needed."""
        held: dict[int, dict[Key, int]] = {}
        try:
            for rank, store in self._stores.items():
                held[rank] = self._held_by(store)
        except StoreChangedError as error:
            logger.info("kvtiers: %s: nothing of it is translated", error)
            return []
        found = []
        for suffix, plan in self._plans.items():
            size = padded(plan.chunk_bytes)
            first, *others = (held[rank] for rank in plan.ranks)
            found += [
                ForeignKey(key, use_ns, size)
                for key, use_ns in first.items()
                if key.endswith(suffix) and all(key in other for other in others)
            ]
        return found

    def _held_by(self, store: OutsideStore) -> dict[Key, int]:
        """Keys of the right size, with the time of their last use."""
        sizes = {suffix: padded(plan.record_bytes) for suffix, plan in self._plans.items()}
        return {
            found.key: found.use_ns
            for batch in store.batches()
            for found in batch
            if sizes.get(found.key[-GROUP_BYTES:]) == found.payload_bytes
        }

    def read(self, keys: Sequence[Key], into: Sequence[Buffer]) -> list[ReadOutcome]:
        """Chunks, one after the other."""
        return [self._read(key, data) for key, data in zip(keys, into, strict=True)]

    def _read(self, key: Key, into: Buffer) -> ReadOutcome:
        """One chunk. Of a record that is not there any more, or not of this epoch, nothing is said
        but that it is missing; one that is damaged is ``CORRUPT``."""
        plan = self._plans.get(key[-GROUP_BYTES:])
        if plan is None or into.nbytes < plan.chunk_bytes:
            return ReadOutcome.CORRUPT
        records: list[Buffer] = []
        try:
            for rank in plan.ranks:
                outcome, record = self._record(rank, key, plan)
                if outcome is not ReadOutcome.OK:
                    return outcome
                records.append(record)
        except StoreChangedError:
            return ReadOutcome.MISS
        apply(plan, records, into)
        into[plan.chunk_bytes :] = 0
        return ReadOutcome.OK

    def _record(self, rank: int, key: Key, plan: GroupPlan) -> tuple[ReadOutcome, Buffer]:
        """The record of one rank, in memory that is its own until the rank's next one."""
        store, checker = self._stores[rank], self._checkers[rank]
        found = store.find(key)
        if found is None or store.epoch != self._epoch:
            return ReadOutcome.MISS, _NOTHING
        if found.payload_bytes != padded(plan.record_bytes):
            return ReadOutcome.MISS, _NOTHING
        health, payload = checker.check(found)
        if store.epoch != self._epoch or health in (Health.GONE, Health.SEALED):
            return ReadOutcome.MISS, _NOTHING
        if health is Health.DAMAGED or payload.nbytes != padded(plan.record_bytes):
            return ReadOutcome.CORRUPT, _NOTHING
        return ReadOutcome.OK, payload

    def have(self, keys: Sequence[Key]) -> list[bool]:
        """Which chunks every rank has, now, whose part is needed."""
        found = [key[-GROUP_BYTES:] in self._plans for key in keys]
        try:
            for at, key in enumerate(keys):
                if found[at]:
                    plan = self._plans[key[-GROUP_BYTES:]]
                    found[at] = all(self._has(rank, key, plan) for rank in plan.ranks)
        except StoreChangedError:
            return [False] * len(keys)
        return found

    def _has(self, rank: int, key: Key, plan: GroupPlan) -> bool:
        store = self._stores[rank]
        found = store.find(key)
        return (
            found is not None
            and store.epoch == self._epoch
            and found.payload_bytes == padded(plan.record_bytes)
        )

    def close(self) -> None:
        """Idempotent."""
        for store in self._stores.values():
            store.close()


def _check_owner(store: OutsideStore, identity: Identity, epoch: int) -> None:
    """Only records that their rank's geometry describes may be read by it."""
    if store.owner != identity:
        raise NamespaceError(f"{store.folder} holds other records than its geometry describes")
    if store.epoch != epoch:
        raise NamespaceError(f"{store.folder} is of epoch {store.epoch}, its replica of {epoch}")
