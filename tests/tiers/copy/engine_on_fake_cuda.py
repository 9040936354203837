"""A CUDA engine on the fake GPU, with a pinned slab and one cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.tiers.copy.fake_cuda import FakeCuda
from tests.tiers.copy.known_caches import Cache
from tiers.copy.cuda_engine import CopyPath, CudaCopyEngine, Kernel
from tiers.cuda_driver import Addresses, Driver
from tiers.slab.cuda_registrar import CudaRegistrar
from tiers.slab.slab import HostSlab

BLOCKS = 12
SLOTS = 6


@dataclass
class FakeKernel:
    """The kernel's contract on the fake GPU: copies on the stream, in no particular order. Its
    lists are in test_copy_kernel_lists.py."""

    cuda: FakeCuda

    def launch(
        self, to: Addresses, source: Addresses, sizes: Addresses, stream: int, kept: list[object]
    ) -> None:
        for target, start, nbytes in zip(to, source, sizes, strict=True):
            assert target % 16 == start % 16 == nbytes % 16 == 0
            with self.cuda._work:
                self.cuda._copy(int(target), int(start), int(nbytes), stream)


class World:
    """A fake GPU with one cache, a pinned slab and an engine."""

    def __init__(
        self,
        cache: Cache,
        *,
        seed: int = 0,
        path: CopyPath | None = None,
        batch_copy: bool = True,
        pin: bool = True,
        kernel: bool = True,
        registrar: type[CudaRegistrar] = CudaRegistrar,
        wait_pinned: bool = True,
    ) -> None:
        self.cache = cache
        self.cuda = FakeCuda(seed, batch=batch_copy)
        self.cuda.on_device(cache.storage)
        self.cuda.make_current()
        self.driver = Driver(self.cuda)
        self.slab = HostSlab(
            cache.regions.chunk_bytes,
            SLOTS,
            pin=pin,
            registrar=registrar(0, self.driver) if pin else None,
            piece_bytes=1,
        )
        if wait_pinned:
            self.slab.wait_ready()
        self._path = path
        self._kernel = self.load_kernel if kernel else self.no_kernel
        self.open_engine()

    def open_engine(self) -> None:
        self.engine = CudaCopyEngine(
            [self.cache.regions],
            self.slab,
            num_blocks=BLOCKS,
            path=self._path,
            device=0,
            driver=self.driver,
            kernel=self._kernel,
            compute_stream=lambda: 0,
        )

    def load_kernel(self, device: int) -> Kernel:
        return FakeKernel(self.cuda)

    def no_kernel(self, device: int) -> Kernel:
        raise ModuleNotFoundError("No module named 'triton'")

    def slot(self, slot: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return self.slab.slot_view(slot, self.cache.regions.chunk_bytes)

    def close(self) -> None:
        self.cuda.event_failure = 0
        self.cuda.release()
        self.engine.close()
        self.slab.close()
        self.cuda.stop()
        assert self.cuda.errors == []
