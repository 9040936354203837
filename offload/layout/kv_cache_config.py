"""The attributes of a ``kv_cache_config`` that the in-process API reads, and classes to build
one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class KvCacheConfig(Protocol):
    """The attributes of a ``kv_cache_config`` that are read. vLLM's class has them."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def kv_cache_groups(self) -> Sequence[Any]:
        """Groups with the attributes of a ``SimpleGroup``.

        A spec with a mapping ``kv_cache_specs`` contains one spec per layer (vLLM's
        ``UniformTypeKVCacheSpecs``); a spec with ``unpadded_page_size_bytes`` has padded pages.
        """


@dataclass(frozen=True, slots=True)
class SimpleSpec:
    """A spec for users without vLLM: tokens of a block and bytes of each layer's page."""

    block_size: int
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class SimpleGroup:
    """A group for users without vLLM."""

    layer_names: tuple[str, ...]
    kv_cache_spec: SimpleSpec


@dataclass(frozen=True, slots=True)
class SimpleConfig:
    """A ``kv_cache_config`` for users without vLLM."""

    num_blocks: int
    kv_cache_groups: tuple[SimpleGroup, ...]


def page_bytes(spec: Any) -> int:
    """Bytes of one layer's page without padding."""
    return int(getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes))
