"""A CUDA engine over the libcuda in host memory, with a pinned slab and one cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from tests.libcuda import strict_cuda
from tests.tiers.copy.known_caches import Cache
from tiers.copy.cuda_engine import CudaCopyEngine
from tiers.copy.cuda_paths import CopyPath
from tiers.slab.cuda_registrar import CudaRegistrar
from tiers.slab.slab import HostSlab

BLOCKS = 12
SLOTS = 6
MODEL_STREAM = 0


class SimulatedGpu:
    """A GPU with one cache, a pinned slab and an engine. ``options`` are the library's; ``failing``
    names a function and the number of the call that fails."""

    def __init__(
        self,
        cache: Cache,
        *,
        seed: int = 0,
        path: CopyPath | None = None,
        slots: int = SLOTS,
        pin: bool = True,
        registrar: type[CudaRegistrar] = CudaRegistrar,
        wait_pinned: bool = True,
        clock: Callable[[], float] | None = None,
        failing: tuple[str, int] | None = None,
        **options: int,
    ) -> None:
        self.cache = cache
        self._undo = ExitStack()
        self.cuda = self._undo.enter_context(strict_cuda(seed, **options))
        self.cuda.on_device(cache.storage.ctypes.data, cache.storage.nbytes)
        self.cuda.make_current()
        if failing is not None:
            self.cuda.fail(failing[0], 2, failing[1])
        self.slab = HostSlab(
            cache.regions.chunk_bytes,
            slots,
            pin=pin,
            registrar=registrar(0, self.cuda.driver) if pin else None,
            piece_bytes=1,
        )
        if wait_pinned:
            self.slab.wait_ready()
        self._path = path
        self._clock = clock or self.cuda.clock
        self.open_engine()

    def open_engine(self) -> None:
        self.engine = CudaCopyEngine(
            [self.cache.regions],
            self.slab,
            num_blocks=self.cache.num_blocks,
            path=self._path,
            device=0,
            driver=self.cuda.driver,
            compute_stream=lambda: MODEL_STREAM,
            clock=self._clock,
        )

    def paths(self) -> tuple[CopyPath, CopyPath]:
        """How stores and loads are copied."""
        choices = self.engine.choices()
        return choices[0, "store"].path, choices[0, "load"].path

    def slot(self, slot: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return self.slab.slot_view(slot, self.cache.regions.chunk_bytes)

    def close(self) -> None:
        self.cuda.configure(event_failure=0)
        self.cuda.release()
        self.engine.close()
        self.slab.close()
        self._undo.close()
