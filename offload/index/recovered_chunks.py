"""Enters the chunks that a tier held when it was opened into the tier's index.

A restart may bring back millions of chunks, so whole columns of keys are processed at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from offload.index.tier_index import TierIndex
from offload.layout.keys import GROUP_BYTES, groups_of
from policies.base import EntryInfo
from tiers.base import KeyColumn


def recover(
    index: TierIndex, columns: Sequence[KeyColumn], infos: Mapping[int, EntryInfo]
) -> list[bytes]:
    """Enter the chunks of these columns, oldest first; ``infos`` are the facts about the chunks of
    each group.

    Returns the other chunks: those of an unknown group, or without space.
    """
    keys: list[bytes] = []
    entries: list[EntryInfo] = []
    rejected: list[bytes] = []
    for column in columns:
        if column.itemsize <= GROUP_BYTES:
            rejected += column.tolist()
            continue
        groups = groups_of(column)
        is_known = np.isin(groups, list(infos))
        if not is_known.all():
            rejected += column[~is_known].tolist()
            column, groups = column[is_known], groups[is_known]
        keys += column.tolist()
        if column.size and (groups == groups[0]).all():
            entries += [infos[int(groups[0])]] * column.size
        else:
            entries += map(infos.__getitem__, groups.tolist())
    return rejected + index.recover(keys, entries)


def held_by_all(
    ranks: Sequence[Sequence[KeyColumn]],
) -> tuple[Sequence[KeyColumn], set[bytes]]:
    """The keys that every rank holds, in the order of the first rank, and the keys that only some
    ranks hold (after a crash between their writes)."""
    first = ranks[0]
    if all(_are_equal(first, other) for other in ranks[1:]):
        return first, set()
    held = [{key for column in columns for key in column.tolist()} for columns in ranks]
    everywhere = set.intersection(*held)
    complete = [
        column[np.fromiter(map(everywhere.__contains__, column.tolist()), bool, column.size)]
        for column in first
    ]
    return complete, set.union(*held) - everywhere


def _are_equal(mine: Sequence[KeyColumn], others: Sequence[KeyColumn]) -> bool:
    return [(column.itemsize, column.tobytes()) for column in mine] == [
        (column.itemsize, column.tobytes()) for column in others
    ]
