"""Publishes KV events for the tiers, from which routers learn which blocks the tiers have gained
and lost.

A chunk is named by the block hash at its end, as vLLM's own offloading connector does. The other
fields of a GPU cache event (tokens, parent block) are not kept, so no state is needed per chunk; a
listener knows these fields from the GPU cache's events.

Changes are published in order, a bounded number per step. Chunks found on a disk at start follow,
if they still exist by then. So a listener that replays all events knows what the tiers hold. If too
many changes wait, they are dropped: one event clears everything, and the present content is
published again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from offload.layout.groups import ModelLayout
from offload.layout.keys import CPU, GROUP_BYTES, group_of
from offload.planner.planner import Planner
from offload.planner.step_budget import EVENT_CHANGES_MAX, EVENT_FOUND_MAX

WAITING_CHANGES_MAX = 1 << 20
"""Number of changes that may wait. Only a tier that loses all its chunks at once causes that many;
their keys take less memory than its index has just freed."""
_INTEGER_BYTES = 8


@dataclass(slots=True)
class _ChangedKeys:
    """Chunks that a tier gained, lost, or held at start; the first ``published`` of them have been
    published."""

    tier: int
    keys: Sequence[bytes]
    is_stored: bool = True
    published: int = 0

    @property
    def left(self) -> int:
        return len(self.keys) - self.published

    def next(self, keys_max: int) -> Sequence[bytes]:
        part = self.keys[self.published : self.published + keys_max]
        self.published += len(part)
        return part


class KvEvents:
    """Collects events on the scheduler's thread until vLLM takes them.

    ``lost`` counts changes that were dropped and replaced by publishing everything again.
    """

    def __init__(self, layout: ModelLayout, planner: Planner) -> None:
        self.lost = 0
        self._groups = {group.group: group for group in layout.groups}
        self._tier_names = [index.name for index in planner.lower]
        self._indexes = {CPU: planner.cpu, **dict(enumerate(planner.lower))}
        self._changes: deque[_ChangedKeys] = deque()
        self._waiting = 0
        self._is_clear_due = False
        self._hash_of = _hash_function()
        self._unpublished = self._resident_batches()  # chunks found on disk after a restart
        planner.stats.listen(self)

    def _resident_batches(self) -> deque[_ChangedKeys]:
        """Return everything that the tiers hold at present."""
        return deque(
            _ChangedKeys(tier, tuple(index.resident)) for tier, index in self._indexes.items()
        )

    def take(self) -> list[KVCacheEvent]:
        """Return the events to publish in this step."""
        events: list[KVCacheEvent] = [AllBlocksCleared()] if self._is_clear_due else []
        self._is_clear_due = False
        left = EVENT_CHANGES_MAX
        while left and self._changes:
            batch = self._changes[0]
            keys = batch.next(left)
            left -= len(keys)
            self._waiting -= len(keys)
            events += self._events(batch, keys)
            if not batch.left:
                self._changes.popleft()
        left = min(left, EVENT_FOUND_MAX)
        while left and self._unpublished:
            batch = self._unpublished[0]
            keys = batch.next(left)
            left -= len(keys)
            events += self._events(batch, self._still_resident(batch.tier, keys))
            if not batch.left:
                self._unpublished.popleft()
        return events

    def _still_resident(self, tier: int, keys: Iterable[bytes]) -> list[bytes]:
        index = self._indexes[tier]
        return [key for key in keys if key in index]

    def stored(self, tier: int, keys: Sequence[bytes]) -> None:
        """Record that a tier can now provide these chunks."""
        self._changed(_ChangedKeys(tier, keys, is_stored=True))

    def removed(self, tier: int, keys: Sequence[bytes]) -> None:
        """Record that a tier can no longer provide them."""
        self._changed(_ChangedKeys(tier, keys, is_stored=False))

    def _changed(self, batch: _ChangedKeys) -> None:
        if not batch.keys:
            return
        self._changes.append(batch)
        self._waiting += len(batch.keys)
        if self._waiting > WAITING_CHANGES_MAX:
            self.lost += self._waiting
            self.cleared()
            self._unpublished = self._resident_batches()

    def cleared(self) -> None:
        """Record that no tier can provide any chunk."""
        self._changes.clear()
        self._unpublished.clear()
        self._waiting = 0
        self._is_clear_due = True

    def _events(self, batch: _ChangedKeys, keys: Iterable[bytes]) -> Iterable[KVCacheEvent]:
        """The events for these keys of a batch."""
        by_group: dict[int, list[bytes]] = {}
        for key in keys:
            by_group.setdefault(group_of(key), []).append(key)
        for group_id, part in by_group.items():
            hashes = list(map(self._hash_of, part))
            make = self._stored if batch.is_stored else self._removed
            yield make(batch.tier, group_id, hashes)

    def _stored(self, tier: int, group_id: int, hashes: list[bytes | int]) -> BlockStored:
        group = self._groups[group_id]
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None,
            token_ids=[],
            block_size=group.chunk_tokens,
            lora_id=None,
            medium=_medium(tier),
            lora_name=None,
            group_idx=group_id,
            kv_cache_spec_kind=group.spec,
            kv_cache_spec_sliding_window=group.window_tokens or None,
            locality="LOCAL",
            ownership=self._owner(tier),
        )

    def _removed(self, tier: int, group_id: int, hashes: list[bytes | int]) -> BlockRemoved:
        return BlockRemoved(
            block_hashes=hashes,
            medium=_medium(tier),
            group_idx=group_id,
            locality="LOCAL",
            ownership=self._owner(tier),
        )

    def _owner(self, tier: int) -> str | None:
        return None if tier == CPU else self._tier_names[tier]


def _medium(tier: int) -> str:
    return str(MEDIUM_CPU if tier == CPU else MEDIUM_STORAGE)


def _hash_function() -> Callable[[bytes], bytes | int]:
    """Return how vLLM publishes the hash in a key: as bytes, or as an integer made from its end.

    The choice is made once, because vLLM's own check reads the environment for each hash.
    """
    if isinstance(maybe_convert_block_hash(BlockHash(bytes(32))), bytes):
        return lambda key: key[:-GROUP_BYTES]
    at = slice(-GROUP_BYTES - _INTEGER_BYTES, -GROUP_BYTES)
    return lambda key: int.from_bytes(key[at], "big")
