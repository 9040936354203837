"""The oracle with the CUDA engine and the simulated libcuda in host memory: vLLM's real scheduler,
the real connector, executor and engine, and copies on streams that are ordered only by events.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from offload.worker import rank_memory
from tests.libcuda import Cuda, strict_cuda
from tests.oracle.models import MODELS
from tests.oracle.serving import Conditions, OracleEngine, Step
from tests.oracle.test_scheduler import live
from tests.patience import PATIENCE_S
from tiers.copy.cuda_engine import CudaCopyEngine
from tiers.copy.cuda_paths import CopyPath
from tiers.slab.cuda_registrar import CudaRegistrar
from tiers.slab.slab import HostSlab

STEPS = 120


class DrivenEngine(CudaCopyEngine):
    """The engine with the methods that the simulated world calls. The world need not advance copies
    here, because threads do."""

    def __init__(self, cuda: Cuda, seed: int, *arguments: Any, **options: Any) -> None:
        super().__init__(
            *arguments, device=0, driver=cuda.driver, compute_stream=lambda: 0, **options
        )
        self._cuda = cuda
        self._random = random.Random(seed)
        self.hazards: list[str] = []

    @property
    def compute(self) -> Cuda:
        return self._cuda

    def advance(self, steps: int = 1) -> int:
        """From time to time, let the GPU get as far as it can."""
        if self._random.random() < 0.2:
            self._cuda.await_idle()
        return steps

    def run_all(self) -> None:
        self._cuda.await_idle()


class OracleEngineOnCuda(OracleEngine):
    """A server whose KV cache is in memory that counts as the GPU's."""

    def __init__(self, cuda: Cuda, path: CopyPath, *arguments: Any) -> None:
        self._cuda = cuda
        self._path = path
        super().__init__(*arguments)

    @contextmanager
    def _patched(self) -> Iterator[None]:
        with super()._patched(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank_memory, "make_slab", self._make_slab)
            yield

    def _await_kernels(self, step: Step) -> None:
        while not step.done:
            self.engine.advance()

    def _make_slab(self, slot_bytes: int, slots: int, *_: object, at_once: int) -> HostSlab:
        slab = HostSlab(
            slot_bytes,
            slots,
            pin=True,
            registrar=CudaRegistrar(0, self._cuda.driver),
            piece_bytes=4096,
        )
        slab.wait_ready(max(1, at_once))
        return slab

    def _make_engine(self, registration: Any, slab: HostSlab, _: object) -> DrivenEngine:
        for tensor in registration.tensors:
            storage = tensor.untyped_storage()
            self._cuda.on_device(storage.data_ptr(), storage.nbytes())
        groups, blocks = registration.groups, registration.num_blocks
        return DrivenEngine(self._cuda, self.seed, groups, slab, num_blocks=blocks, path=self._path)


@pytest.mark.parametrize("path", [CopyPath.BATCH, CopyPath.KERNEL])
@pytest.mark.parametrize("name", ["full", "mamba_full_ngram"])
def test_every_byte_read_is_right(name: str, path: CopyPath, tmp_path: Path) -> None:
    is_asynchronous = path is CopyPath.BATCH
    conditions = Conditions(slots=30, fault_rate=0.05, asynchronous=is_asynchronous)
    with strict_cuda(1) as cuda:
        cuda.make_current()
        with OracleEngineOnCuda(cuda, path, MODELS[name], conditions, tmp_path, 1) as world:
            live(world, STEPS)
            end = time.monotonic() + PATIENCE_S
            while not sum(
                world.loaded().values()
            ):  # threads do the copies, so they are late on a busy machine
                assert time.monotonic() < end, "nothing was restored"
                live(world, STEPS)
            assert world.finished > 5
            assert world.engine.failures() == {}
