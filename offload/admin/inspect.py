"""Counts for ``kvtiers inspect``. One walk over the records collects them without reading
payloads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from offload.namespaces.claims import Owner
from offload.namespaces.cleanup import usage
from offload.namespaces.inventory import NamespaceFolder, RankFolder, Standing
from offload.namespaces.manifest import ABSENT, FieldDifference, Namespace, differing_fields
from tiers.base import TierError
from tiers.offline.offline_folder import FolderChangedError, OfflineFolder

AGES = (("1h", 3600), ("1d", 86_400), ("7d", 604_800), ("30d", 2_592_000))
"""Upper bounds of the histogram of ages; older records count as ``older``."""
FIELDS_MAX = 20


@dataclass(slots=True)
class RankSummary:
    """One rank.

    Sizes are in bytes; times of use are in ns since 1970, 0 if unknown. ``ages`` counts records by
    the time since their last use. ``hits`` stays ``None``, because tiers do not store hit counts on
    disk. ``standing`` says what the next server to start would do with the folder
    (``offload.namespaces.inventory.Standing``). ``problem`` is the reason why the server would not
    use the folder or cannot read it; ``remark`` adds other facts. ``aside_bytes`` is the size of
    untrusted data that its tier moved aside.
    """

    replica: int
    rank: int
    kind: str
    owner_pid: int | None = None
    owner_engine: str = ""
    epoch: int = 0
    records: int = 0
    payload_bytes: int = 0
    stored_bytes: int = 0
    smallest_bytes: int = 0
    largest_bytes: int = 0
    file_bytes: int = 0
    capacity_bytes: int | None = None
    oldest_use_ns: int = 0
    newest_use_ns: int = 0
    ages: dict[str, int] = field(default_factory=dict)
    encrypted: int = 0
    hits: None = None
    standing: str = Standing.EMPTY.value
    problem: str = ""
    remark: str = ""
    aside_bytes: int = 0


@dataclass(slots=True)
class NamespaceSummary:
    """A namespace. ``differs`` lists the differences between its fields and those of the namespace
    used last."""

    name: str
    model: str
    problem: str
    disk_bytes: int
    last_used_s: float
    owners: list[Owner]
    rank_folders: list[RankSummary]
    differs: list[FieldDifference] = field(default_factory=list)


def summarise(
    namespaces: list[NamespaceFolder], advance: Callable[[int], None]
) -> list[NamespaceSummary]:
    """Walk over everything. ``advance`` receives the number of records seen since its previous
    call."""
    found = []
    for namespace in namespaces:
        disk_bytes, last_used = usage(namespace.folder)
        ranks = [summarise_folder(one, advance) for one in namespace.rank_folders]
        found.append(
            NamespaceSummary(
                namespace.name,
                namespace.model,
                namespace.problem,
                disk_bytes,
                last_used,
                namespace.owners(),
                ranks,
            )
        )
    known = [at for at, namespace in enumerate(namespaces) if namespace.fields]
    if known:
        newest = max(known, key=lambda at: (bool(found[at].owners), found[at].last_used_s))
        for at in known:
            found[at].differs = _differences(namespaces[at], namespaces[newest])
    return found


def _differences(namespace: NamespaceFolder, newest: NamespaceFolder) -> list[FieldDifference]:
    differing = differing_fields(Namespace.of(namespace.fields), Namespace.of(newest.fields))
    return [FieldDifference(path, _cut(a), _cut(b)) for path, a, b in differing[:FIELDS_MAX]]


def _cut(value: Any) -> str:
    text = "(absent)" if value is ABSENT else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def summarise_folder(rank_folder: RankFolder, advance: Callable[[int], None]) -> RankSummary:
    """Walk over one rank's folder. Read errors are described in ``problem``."""
    found = RankSummary(rank_folder.replica, rank_folder.rank, rank_folder.kind)
    found.aside_bytes = sum(usage(path)[0] for path in rank_folder.aside())
    owner = rank_folder.owner()
    if owner is not None:
        found.owner_pid, found.owner_engine = owner.pid, owner.engine
    try:
        verdict, reader = rank_folder.judge()
        found.standing = verdict.standing.value
        found.problem, found.remark = verdict.problem, verdict.remark
        if reader is not None:
            _walk(reader, found, advance)
    except FolderChangedError as error:
        found.problem = found.problem or f"{error} while the folder was read"
    except (OSError, TierError) as error:
        found.problem = found.problem or str(error)
    return found


def _walk(reader: OfflineFolder, found: RankSummary, advance: Callable[[int], None]) -> None:
    try:
        now_ns = time.time_ns()
        counts = dict.fromkeys([*(name for name, _ in AGES), "older", "unknown"], 0)
        smallest = 0
        for batch in reader.batches():
            for record in batch:
                size, use = record.payload_bytes, record.use_ns
                found.payload_bytes += size
                found.stored_bytes += record.stored_bytes
                found.encrypted += record.is_sealed
                smallest = min(smallest, size) if smallest else size
                found.largest_bytes = max(found.largest_bytes, size)
                if use:
                    found.oldest_use_ns = min(found.oldest_use_ns, use) or use
                    found.newest_use_ns = max(found.newest_use_ns, use)
                counts[_age(use, now_ns)] += 1
            found.records += len(batch)
            advance(len(batch))
        found.ages, found.smallest_bytes = counts, smallest
        found.epoch = reader.epoch
        found.file_bytes = reader.file_bytes
        found.capacity_bytes = reader.capacity_bytes or None
    finally:
        reader.close()


def _age(use_ns: int, now_ns: int) -> str:
    if not use_ns:
        return "unknown"
    seconds = (now_ns - use_ns) / 1e9
    return next((name for name, limit in AGES if seconds < limit), "older")


def to_json(namespaces: list[NamespaceSummary]) -> list[dict[str, Any]]:
    """Plain values, for ``--json``."""
    return [asdict(one) for one in namespaces]
