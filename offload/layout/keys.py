"""Keys of chunks.

A key is the block hash at the chunk's end followed by the group id (4 bytes, big-endian), so only
blocks that end on a hash boundary have keys. vLLM's block hash covers the whole prefix, the cache
salt, the adapter's name and the media of the prompt; kvtiers never derives hashes from tokens.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from tiers.base import KeyColumn

GROUP_BYTES = 4
CPU = -1
"""The CPU tier's number; lower tiers are numbered from 0."""


def group_suffix(group: int) -> bytes:
    """The last bytes of every key of this group."""
    return group.to_bytes(GROUP_BYTES, "big")


def group_of(key: bytes) -> int:
    """The group a key belongs to."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


_suffix_of = itemgetter(slice(-GROUP_BYTES, None))


def count_groups(keys: Iterable[bytes]) -> dict[int, int]:
    """The number of keys of each group. Avoids a Python call per key."""
    return {group_of(suffix): count for suffix, count in Counter(map(_suffix_of, keys)).items()}


def groups_of(column: KeyColumn) -> npt.NDArray[np.uint32]:
    """The groups that these keys belong to. Keys are longer than a group suffix."""
    rows = column.view(np.uint8).reshape(column.size, column.itemsize)
    return rows[:, -GROUP_BYTES:].copy().view(">u4")[:, 0].astype(np.uint32)


def joined(columns: Iterable[KeyColumn]) -> tuple[KeyColumn, ...]:
    """The same keys in the same order, in as few columns as their lengths allow: usually a single
    one."""
    filled = (column for column in columns if column.size)
    found = [list(same) for _, same in itertools.groupby(filled, lambda column: column.itemsize)]
    return tuple(same[0] if len(same) == 1 else np.concatenate(same) for same in found)


def pack_keys(keys: Sequence[bytes]) -> tuple[bytes, list[int]]:
    """Pack all keys into one piece.

    Returns the piece and the lengths of the keys: one number if they are all equal and not 0,
    because 0 would not reveal how many keys there are.
    """
    lengths = set(map(len, keys))
    are_alike = len(lengths) == 1 and 0 not in lengths
    return b"".join(keys), list(lengths) if are_alike else list(map(len, keys))


def unpack_keys(packed: bytes, lengths: Sequence[int]) -> tuple[bytes, ...]:
    """The keys that were packed."""
    if len(lengths) == 1 and lengths[0]:
        step = lengths[0]
        return tuple([packed[at : at + step] for at in range(0, len(packed), step)])
    ends = itertools.accumulate(lengths)
    return tuple(packed[end - size : end] for end, size in zip(ends, lengths, strict=True))


def chunk_keys(
    block_hashes: Sequence[bytes],
    group: int,
    hashes_per_chunk: int,
    first_chunk: int = 0,
    identity: bytes = b"",
    end_chunk: int | None = None,
) -> list[bytes]:
    """Keys of the whole chunks ``[first_chunk, end_chunk)`` of one group (``None``: all).

    ``block_hashes`` are vLLM's, one per hash block; a chunk spans ``hashes_per_chunk`` of them and
    takes the hash at its end. ``identity`` is the content that vLLM's hash does not cover (of a
    LoRA adapter); it is digested into the key.
    """
    suffix = group_suffix(group)
    end = None if end_chunk is None else end_chunk * hashes_per_chunk
    ends = block_hashes[(first_chunk + 1) * hashes_per_chunk - 1 : end : hashes_per_chunk]
    if identity:
        return [hashlib.sha256(identity + end).digest() + suffix for end in ends]
    return [end + suffix for end in ends]
