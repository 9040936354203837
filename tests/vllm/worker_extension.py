"""Raw access to the KV cache of one worker; vLLM mixes this class into its worker class.

It bypasses everything under test: bytes are found by vLLM's own placement (``offset + l *
layer_stride + block * block_stride``), never through this project's layout code.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, UniformTypeKVCacheSpecs

from tests.models import random_loader
from tests.vllm import copy_faults

BlocksByGroup = dict[int, list[int]]


class KvBytes:
    """Methods for ``collective_rpc``. The prefix distinguishes them from vLLM's own names."""

    model_runner: Any
    rank: int
    kvtest_loader = random_loader.LOAD_FORMAT  # registered by the import, in every worker

    def kvtest_read(self, blocks: BlocksByGroup) -> dict[int, list[bytes]]:
        """The content of each block: the pages of the group's layers, in order, without padding."""
        pages = {group: self._pages(group) for group in blocks}
        memory = self._memory()
        return {
            group: [
                b"".join(
                    memory[start + block * stride : start + block * stride + size].numpy().tobytes()
                    for start, stride, size in pages[group]
                )
                for block in ids
            ]
            for group, ids in blocks.items()
        }

    def kvtest_fill(self, blocks: BlocksByGroup, value: int = 0) -> None:
        """Overwrite all pages of these blocks: a planted fault."""
        memory = self._memory()
        for group, ids in blocks.items():
            for start, stride, size in self._pages(group):
                for block in ids:
                    memory[start + block * stride : start + block * stride + size] = value

    def kvtest_plant(self, planted: list[dict[int, dict[int, bytes]]]) -> None:
        """``kvtest_write`` with each rank's own part."""
        self.kvtest_write(planted[self.rank])

    def kvtest_write(self, content: dict[int, dict[int, bytes]]) -> None:
        """Write bytes into blocks (group -> block -> the value that ``kvtest_read`` returns)."""
        memory = self._memory()
        for group, blocks in content.items():
            for block, data in blocks.items():
                rest = torch.frombuffer(bytearray(data), dtype=memory.dtype)
                for start, stride, size in self._pages(group):
                    begin = start + block * stride
                    memory[begin : begin + size] = rest[:size]
                    rest = rest[size:]
                assert not len(rest)

    def kvtest_plant_in_loads(self, fault: str) -> None:
        """Plant a fault of ``copy_faults``, by name, in the loads of all groups."""
        copy_faults.plant(self, getattr(copy_faults, fault), None)

    def kvtest_heal_loads(self) -> None:
        """Remove it again."""
        copy_faults.heal(self)

    def kvtest_swap(self, group: int, first: int, second: int) -> None:
        """Swap the content of two blocks: a planted fault."""
        memory = self._memory()
        for start, stride, size in self._pages(group):
            a = memory[start + first * stride : start + first * stride + size]
            b = memory[start + second * stride : start + second * stride + size]
            saved = a.clone()
            a.copy_(b)
            b.copy_(saved)

    def _pages(self, group: int) -> list[tuple[int, int, int]]:
        """``(start of block 0, block stride, bytes)`` for each layer of the group."""
        config: KVCacheConfig = self.model_runner.kv_cache_config
        spec = config.kv_cache_groups[group].kv_cache_spec
        pages = []
        for name in config.kv_cache_groups[group].layer_names:
            layer_spec = (
                spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            )
            place = next((t for t in config.kv_cache_tensors if name in t.layers), None)
            if place is None:
                continue  # shares another layer's cache
            start = place.offset + place.layers.index(name) * place.layer_stride
            size = getattr(layer_spec, "real_page_size_bytes", layer_spec.page_size_bytes)
            pages.append((start, place.block_stride, size))
        return pages

    def _memory(self) -> torch.Tensor:
        """The one backing allocation of the KV cache as bytes."""
        cache = self.model_runner.kv_caches[0]
        tensor = cache[0] if isinstance(cache, list | tuple) else cache
        storage = tensor.untyped_storage()
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
