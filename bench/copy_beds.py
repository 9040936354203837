"""KV caches, a slab and engines for measuring copies, on the CPU or on a CUDA device.

torch is imported only for a GPU.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import default_rng  # a later import can swallow a Ctrl-C

from tiers.copy.base import CopyBatch, CopyEngine, GroupRegions, PageRegion
from tiers.copy.cuda_engine import CudaCopyEngine, gpu_node
from tiers.copy.cuda_paths import CopyPath
from tiers.copy.host_engine import HostCopyEngine
from tiers.copy.host_loop import memmove_loop
from tiers.slab.slab import HostSlab

LAYERS = 32
MLA_LAYERS = 61
MLA_PAGE_BYTES = 16 * 576 * 2
"""The page of DeepSeek-V3: 16 tokens of a 576-wide latent in bfloat16, per layer."""

LARGE_COPY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """The pages of one block. ``contiguous`` is True if the layers of a block are adjacent in
    memory."""

    name: str
    page_bytes: int
    layers: int
    chunk_blocks: int
    contiguous: bool

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_blocks * self.layers * self.page_bytes

    def regions(self, address: int, num_blocks: int) -> GroupRegions:
        """The cache at ``address``: ``[block][layer][page]`` or ``[layer][block][page]``."""
        page, regions = self.page_bytes, []
        for layer in range(self.layers):
            start = layer * page if self.contiguous else layer * num_blocks * page
            stride = self.layers * page if self.contiguous else page
            regions.append(PageRegion(f"layer.{layer}", address + start, stride, page))
        return GroupRegions(0, self.chunk_blocks, tuple(regions))


def layout(name: str, chunk_bytes: int) -> Layout | None:
    """The layout ``name`` with chunks of about ``chunk_bytes``, or ``None`` if it has no chunks of
    this size."""
    if name == "mla":
        blocks = chunk_bytes // (MLA_LAYERS * MLA_PAGE_BYTES)
        return Layout(name, MLA_PAGE_BYTES, MLA_LAYERS, blocks, False) if blocks else None
    contiguous = name == "contiguous"
    return Layout(name, chunk_bytes // LAYERS, LAYERS, 1, contiguous)


LAYOUTS = ("separate", "contiguous", "mla")


class Bed(ABC):
    """Memory of one device that contains a cache of ``cache_bytes``, and a slab of the same
    size."""

    def __init__(self, cache_bytes: int) -> None:
        self.cache_bytes = cache_bytes

    @abstractmethod
    def cache_address(self) -> int:
        """The address of the cache."""

    @abstractmethod
    def slab(self, slot_bytes: int) -> HostSlab:
        """A slab of the cache's size, ready to use."""

    @abstractmethod
    def engines(
        self, regions: GroupRegions, slab: HostSlab, num_blocks: int
    ) -> Mapping[str, CopyEngine]:
        """The engines to compare, by name."""

    @abstractmethod
    def large_copy_s(self, to_slab: bool) -> float:
        """Time in seconds of one contiguous copy of ``LARGE_COPY_BYTES``, which is the limit."""

    @abstractmethod
    def gpu_name(self) -> str:
        """The description of the device in the report."""

    def products_per_s(self, seconds: float) -> float:
        """Matrix products per second on the device, measured for about ``seconds``. NaN on a
        CPU."""
        return float("nan")

    @abstractmethod
    def close(self) -> None:
        """Free the memory."""


class CpuBed(Bed):
    """Cache and slab in host memory, as on vLLM's CPU platform."""

    def __init__(self, cache_bytes: int) -> None:
        super().__init__(cache_bytes)
        self._cache = HostSlab(max(cache_bytes, LARGE_COPY_BYTES), 1, background=False)
        self._cache.slot(0)[:] = np.resize(np.arange(251, dtype=np.uint8), self._cache.slot_stride)
        self._large = HostSlab(LARGE_COPY_BYTES, 1, background=False)

    def cache_address(self) -> int:
        return self._cache.address

    def slab(self, slot_bytes: int) -> HostSlab:
        return HostSlab(slot_bytes, self.cache_bytes // slot_bytes, background=False)

    def engines(
        self, regions: GroupRegions, slab: HostSlab, num_blocks: int
    ) -> Mapping[str, CopyEngine]:
        return {
            "kvtiers": HostCopyEngine([regions], slab, num_blocks=num_blocks),
            "memmove per page": HostCopyEngine(
                [regions], slab, num_blocks=num_blocks, loop=memmove_loop
            ),
        }

    def large_copy_s(self, to_slab: bool) -> float:
        to, source = self._large.address, self._cache.address
        if not to_slab:
            to, source = source, to
        began = time.perf_counter()
        ctypes.memmove(to, source, LARGE_COPY_BYTES)
        return time.perf_counter() - began

    def gpu_name(self) -> str:
        return "none used"

    def close(self) -> None:
        self._cache.close()
        self._large.close()


class CudaBed(Bed):
    """The cache on a CUDA device, the slab pinned. This has not yet run on a GPU."""

    def __init__(self, cache_bytes: int, device: int = 0) -> None:
        import torch

        super().__init__(cache_bytes)
        self._torch: Any = torch
        self._device = device
        torch.cuda.set_device(device)
        size = max(cache_bytes, LARGE_COPY_BYTES)
        self._cache: Any = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
        self._large: Any = torch.empty(LARGE_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        self._stream: Any = torch.cuda.Stream()
        self._compute: Any = torch.cuda.Stream()
        self._matrix: Any = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()

    def cache_address(self) -> int:
        return int(self._cache.data_ptr())

    def slab(self, slot_bytes: int) -> HostSlab:
        return HostSlab(
            slot_bytes,
            self.cache_bytes // slot_bytes,
            pin=True,
            numa_node=gpu_node(self._device),
            background=False,
        )

    def engines(
        self, regions: GroupRegions, slab: HostSlab, num_blocks: int
    ) -> Mapping[str, CopyEngine]:
        chosen = CudaCopyEngine([regions], slab, device=self._device, num_blocks=num_blocks)
        paths = {way: choice.path for (_, way), choice in chosen.choices().items()}
        text = ", ".join(f"{way} {path.name.lower()}" for way, path in paths.items())
        engines: dict[str, CopyEngine] = {f"kvtiers ({text})": chosen}
        for path in (CopyPath.BATCH, CopyPath.KERNEL):
            one = CudaCopyEngine(
                [regions], slab, device=self._device, num_blocks=num_blocks, path=path
            )
            is_possible = {choice.path for choice in one.choices().values()} == {path}
            if is_possible and {*paths.values()} != {path}:
                engines[f"forced {path.name.lower()}"] = one
            else:
                one.close()
        return engines

    def large_copy_s(self, to_slab: bool) -> float:
        torch = self._torch
        device_side = self._cache[:LARGE_COPY_BYTES]
        to, source = (self._large, device_side) if to_slab else (device_side, self._large)
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        self._stream.synchronize()
        return time.perf_counter() - began

    def gpu_name(self) -> str:
        return str(self._torch.cuda.get_device_name(self._device))

    def products_per_s(self, seconds: float) -> float:
        count = 0
        began = time.perf_counter()
        with self._torch.cuda.stream(self._compute):
            while time.perf_counter() - began < seconds:
                for _ in range(8):
                    self._matrix @ self._matrix
                self._compute.synchronize()
                count += 8
        return count / (time.perf_counter() - began)

    def close(self) -> None:
        del self._cache, self._large, self._matrix
        self._torch.cuda.empty_cache()


class Load:
    """Makes jobs over one layout, each with new random chunks and slots."""

    def __init__(self, layout: Layout, bed: Bed, jobs_bytes: int, seed: int) -> None:
        self.layout = layout
        self.num_blocks = bed.cache_bytes // layout.chunk_bytes * layout.chunk_blocks
        self.slots = self.num_blocks // layout.chunk_blocks
        self.chunks = max(1, min(jobs_bytes // layout.chunk_bytes, self.slots // 2))
        self.nbytes = self.chunks * layout.chunk_bytes
        self._rng = default_rng(seed)

    def pair(self) -> tuple[list[CopyBatch], list[CopyBatch]]:
        """Make two jobs without a common block or slot."""
        blocks = self._rng.permutation(self.num_blocks)[
            : 2 * self.chunks * self.layout.chunk_blocks
        ].reshape(2, self.chunks, -1)
        slots = self._rng.permutation(self.slots)[: 2 * self.chunks].reshape(2, -1)
        first, second = ([CopyBatch(0, blocks[i], slots[i])] for i in range(2))
        return first, second
