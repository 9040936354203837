"""The expected content of every page: a function of its key, the weights' epoch, the rank and the
layer.

Two groups share one pool of GPU block ids, as in vLLM. A position of a request's prefix is one
chunk of each group: one block of group 0, two of group 1.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from offload.index.chunk_batch import GroupInfo
from offload.layout.keys import group_of, group_suffix
from tiers.copy.base import GroupRegions, PageRegion

LAYERS = {0: ("a", "b"), 1: ("c",)}
PAGE_BYTES = {"a": 24, "b": 40, "c": 32}
CHUNK_BLOCKS = {0: 1, 1: 2}
CHUNK_TOKENS = 128
SLOT_BYTES = 4096
BLOCKS_PER_POSITION = sum(CHUNK_BLOCKS.values())
JUNK = 0xDB

# Addresses have no meaning for the simulated engine: it identifies layers by name.
REGIONS = tuple(
    GroupRegions(
        group,
        CHUNK_BLOCKS[group],
        tuple(PageRegion(layer, 0, PAGE_BYTES[layer], PAGE_BYTES[layer]) for layer in layers),
    )
    for group, layers in LAYERS.items()
)


def group_infos(tiers: int) -> dict[int, GroupInfo]:
    """The groups as the planner knows them."""
    return {g: GroupInfo("full", CHUNK_TOKENS, (SLOT_BYTES,) * tiers) for g in LAYERS}


def node(parent: bytes, branch: int) -> bytes:
    """The hash of the prefix that extends ``parent`` by ``branch``."""
    return hashlib.blake2b(parent + branch.to_bytes(4, "big"), digest_size=12).digest()


def key_of(prefix: bytes, group: int) -> bytes:
    """The key of a prefix' last chunk in a group."""
    return prefix + group_suffix(group)


@lru_cache(maxsize=1 << 17)
def page(key: bytes, epoch: int, rank: int, layer: str, block: int) -> bytes:
    """The page of one layer in the chunk's ``block``-th block."""
    identity = b"%d/%d/%s/%d" % (epoch, rank, layer.encode(), block)
    size = PAGE_BYTES[layer]
    return hashlib.blake2b(key + identity, digest_size=size).digest()


@lru_cache(maxsize=1 << 15)
def chunk(key: bytes, epoch: int, rank: int) -> bytes:
    """The chunk as stored in a slot: block by block, and within a block layer by layer."""
    group = group_of(key)
    return b"".join(
        page(key, epoch, rank, layer, block)
        for block in range(CHUNK_BLOCKS[group])
        for layer in LAYERS[group]
    )
