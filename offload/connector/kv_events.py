"""vLLM's KV events for the tiers: which blocks they have got and lost, for routers that listen.

A chunk is named by the block hash at its end, as vLLM's own offloading connector does. What an
event of the GPU's cache says beside (tokens, the block before) is not kept, so that nothing has to
be remembered per chunk; a listener knows it from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from offload.keys import GROUP_BYTES, group_of
from offload.layout import ModelLayout
from offload.ledger import CPU
from offload.planner import Planner

WAITING_MOST = 65_536
"""Chunks in events that nobody has taken; what comes beyond is counted and not published."""


class KvEvents:
    """Collects events on the scheduler's thread until vLLM takes them, in order."""

    def __init__(self, layout: ModelLayout, planner: Planner) -> None:
        self.lost = 0
        self._groups = {group.group: group for group in layout.groups}
        self._owners = [index.name for index in planner.lower]
        self._events: list[KVCacheEvent] = []
        self._waiting = 0
        for tier, index in enumerate(planner.lower):  # what was found after a restart
            self.stored(tier, index.some(WAITING_MOST))
        planner.stats.listener = self

    def take(self) -> list[KVCacheEvent]:
        """Everything since the last call."""
        events, self._events, self._waiting = self._events, [], 0
        return events

    def stored(self, tier: int, keys: Sequence[bytes]) -> None:
        """A tier can give these chunks now."""
        for group_id, part in self._by_group(keys):
            group = self._groups[group_id]
            self._events.append(
                BlockStored(
                    block_hashes=_hashes(part),
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
            )

    def removed(self, tier: int, keys: Sequence[bytes]) -> None:
        """A tier cannot give them any more."""
        for group_id, part in self._by_group(keys):
            self._events.append(
                BlockRemoved(
                    block_hashes=_hashes(part),
                    medium=_medium(tier),
                    group_idx=group_id,
                    locality="LOCAL",
                    ownership=self._owner(tier),
                )
            )

    def cleared(self) -> None:
        """No tier can give anything any more."""
        self._events, self._waiting = [AllBlocksCleared()], 0

    def _owner(self, tier: int) -> str | None:
        return None if tier == CPU else self._owners[tier]

    def _by_group(self, keys: Sequence[bytes]) -> Iterable[tuple[int, list[bytes]]]:
        room = WAITING_MOST - self._waiting
        self.lost += max(0, len(keys) - room)
        by_group: dict[int, list[bytes]] = {}
        for key in keys[:room]:
            by_group.setdefault(group_of(key), []).append(key)
        self._waiting += min(len(keys), room)
        return by_group.items()


def _medium(tier: int) -> str:
    return str(MEDIUM_CPU if tier == CPU else MEDIUM_STORAGE)


def _hashes(keys: Iterable[bytes]) -> list[bytes | int]:
    return [maybe_convert_block_hash(key[:-GROUP_BYTES]) for key in keys]
