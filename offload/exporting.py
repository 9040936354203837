"""``kvtiers export``: the records of a namespace into one file.

Any store will do, also one that a server writes to: what is evicted meanwhile is left out, and
every record is verified before it is written. Records go in the order of their last use, oldest
first, so that a store that is filled from the file has the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from offload.errors import NamespaceError
from offload.scrub import Pace
from offload.stores import Home, Store
from tiers.outside import Checker, Health, OutsideStore
from tiers.portable import Record, write_about, write_magic, write_record

FORMAT = 1


@dataclass(slots=True)
class Exported:
    """What one store gave. ``damaged`` and ``unread`` (encrypted, no key) records were left out,
    as were those that were ``gone`` by the time they were read."""

    replica: int
    rank: int
    records: int = 0
    payload_bytes: int = 0
    gone: int = 0
    damaged: int = 0
    unread: int = 0


def export_home(
    home: Home,
    stores: Sequence[tuple[Store, OutsideStore]],
    file: IO[bytes],
    *,
    has_key: bool,
    pace: Pace,
    advance: Callable[[int], None],
) -> list[Exported]:
    """Write everything. Raises ``StoreChangedError`` and ``OSError``; the file is useless then."""
    write_magic(file)
    write_about(file, "M", {"format": FORMAT, "namespace": home.name, "fields": home.fields})
    found = [
        _export_store(one, outside, file, Checker(outside, has_key=has_key), pace, advance)
        for one, outside in stores
    ]
    write_about(file, "E", {"records": sum(one.records for one in found)})
    return found


def _export_store(
    store: Store,
    outside: OutsideStore,
    file: IO[bytes],
    checker: Checker,
    pace: Pace,
    advance: Callable[[int], None],
) -> Exported:
    counts = Exported(store.replica, store.rank)
    epoch = outside.epoch
    found = [(r.use_ns, r.key, r.payload_bytes) for batch in outside.batches() for r in batch]
    record_bytes = min((size for _, _, size in found), default=0)
    write_about(file, "S", _about(store, outside, record_bytes))
    order = sorted((use_ns, key) for use_ns, key, _ in found)
    for use_ns, key in order:
        record = outside.find(key)
        if record is None:
            counts.gone += 1
            continue
        pace.spend(record.stored_bytes)
        health, payload = checker.check(record)
        if outside.epoch != epoch:
            raise NamespaceError(f"{store.folder} was reset while it was exported")
        if health is Health.GOOD:
            write_record(file, Record(key, use_ns, payload))
            counts.records += 1
            counts.payload_bytes += payload.nbytes
        counts.gone += health is Health.GONE
        counts.damaged += health is Health.DAMAGED
        counts.unread += health is Health.SEALED
        advance(record.stored_bytes)
    return counts


def _about(store: Store, outside: OutsideStore, record_bytes: int) -> dict[str, Any]:
    """What an import must know of a store. ``record_bytes`` is its smallest payload."""
    owner = outside.owner
    return {
        "replica": store.replica,
        "rank": store.rank,
        "kind": outside.kind,
        "epoch": outside.epoch,
        "records_of": owner.namespace.hex() if owner else "",
        "record_bytes": record_bytes,
    }
