"""Writes many records to a tier that no process has open. For the command line, which has no event
loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tiers.base import Tier, WriteOutcome
from tiers.offline.archive import Record
from tiers.offline.interrupts import run_until_interrupted

WRITE_BATCH_BYTES = 32 << 20


@dataclass(slots=True)
class Written:
    """The result of a bulk write. Records that are already ``present`` are not changed. Writing
    stops at the first record for which the tier is ``full``."""

    written: int = 0
    written_bytes: int = 0
    present: int = 0
    full: int = 0
    failed: int = 0


def write_all(tier: Tier, records: Iterable[Record]) -> Written:
    """Open the tier, write every record in the given order, and close the tier. Blocks.

    Raises ``TierError``, and any exception of ``records``; the tier is closed in either case.
    """
    return run_until_interrupted(_write_all(tier, records))


async def _write_all(tier: Tier, records: Iterable[Record]) -> Written:
    counts = Written()
    try:
        await tier.open()
        batches = tier.keys()
        known = {key async for batch in batches for key in batch.keys}
        batch: list[Record] = []
        size = 0
        for record in records:
            if record.key in known:
                counts.present += 1
                continue
            known.add(record.key)
            batch.append(record)
            size += record.payload.nbytes
            if size >= WRITE_BATCH_BYTES:
                await _write_batch(tier, batch, counts)
                batch, size = [], 0
            if counts.full:
                return counts
        await _write_batch(tier, batch, counts)
        return counts
    finally:
        await tier.aclose()


async def _write_batch(tier: Tier, batch: list[Record], counts: Written) -> None:
    keys = [record.key for record in batch]
    outcomes = await tier.write(keys, [record.payload for record in batch]) if batch else []
    for record, outcome in zip(batch, outcomes, strict=True):
        counts.written += outcome is WriteOutcome.OK
        counts.full += outcome is WriteOutcome.FULL
        counts.failed += outcome is WriteOutcome.FAILED
        if outcome is WriteOutcome.OK:
            counts.written_bytes += record.payload.nbytes
