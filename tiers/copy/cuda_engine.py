"""Copies between KV caches on a CUDA device and the pinned slab.

The engine has two streams of the lowest priority, one for stores and one for loads. Only events
order them relative to the model's stream: a store reads its blocks only after the forward pass that
wrote them, a load overwrites its blocks only after the forward pass that may still read them, and a
ticket is done only when the copy engine has finished.

How a group's bytes move in each direction is measured once, when the engine starts
(``tiers.copy.cuda_paths``), and logged.

This code has not yet run on a GPU: the tests run it with a simulated libcuda in host memory.
``tests/gpu`` needs a machine with a GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from tiers.copy.base import (
    CopyBatch,
    CopyEngine,
    CopyPathInfo,
    Failures,
    GroupRegions,
    Ticket,
    TransferError,
    type_name,
)
from tiers.copy.cuda_kernel import CopyKernel
from tiers.copy.cuda_lanes import CudaEvent, CudaLane, EventPool
from tiers.copy.cuda_paths import (
    SAMPLE_BYTES,
    SAMPLE_COPIES,
    Choice,
    CopyCapabilities,
    CopyPath,
    choose,
    possible_paths,
    rate_of,
)
from tiers.copy.descriptors import CopyShape, DescriptorBuilder, Descriptors
from tiers.cuda_driver import Driver, DriverError, load_driver
from tiers.slab.host_memory import NODES, PCI_DEVICES, node_count, pci_node
from tiers.slab.slab import HostSlab

logger = logging.getLogger(__name__)


class CudaCopyEngine(CopyEngine):
    """A ``CopyEngine`` for KV caches on CUDA device ``device`` (torch's number; ``None``: the
    calling thread's current one).

    ``slab`` should be pinned (``HostSlab(pin=True)``). Slots that are not (yet) pinned work too:
    the driver copies them slowly, one by one, through its internal memory. No job waits until its
    slots are pinned. ``num_blocks`` bounds block ids; without it nothing is measured. ``path``
    forces a way of copying where possible, for measurements. ``driver``, ``compute_stream`` (the
    model's stream, as a handle) and ``clock`` replace CUDA in tests.

    While it starts, it copies blocks to the first pinned slots and back, so nothing else may use
    these blocks and slots until it has started. The model-runner thread, on whose current stream
    the model runs, calls ``record_event`` and ``hold_compute``; one other thread calls everything
    else. Raises ``DriverError`` if there is no CUDA and ``ValueError`` if a chunk does not fit into
    a slot.
    """

    def __init__(
        self,
        groups: Sequence[GroupRegions],
        slab: HostSlab,
        *,
        device: int | None = None,
        num_blocks: int | None = None,
        path: CopyPath | None = None,
        driver: Driver | None = None,
        compute_stream: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._slab = slab
        self._groups = {group.group: group for group in groups}
        self._num_blocks = num_blocks
        self._descriptors = DescriptorBuilder(
            groups,
            slab_address=slab.address,
            slot_stride=slab.slot_stride,
            slot_count=slab.slot_count,
            num_blocks=num_blocks,
        )
        self._driver = driver or load_driver()
        self._device = device = _torch_device() if device is None else device
        self._handle = self._driver.device(device)
        self._compute_stream = compute_stream or (lambda: _torch_stream(device))
        self._failures = Failures(_kind_of)
        self._closed = False
        self._kernel: CopyKernel | None = None
        shapes = {group: self._descriptors.shape(group) for group in self._groups}
        with ExitStack() as undo:
            self._context = self._driver.retain_context(self._handle)
            undo.callback(self._driver.release_context, self._handle)
            self._events = EventPool(self._driver)
            undo.callback(self._close_events)
            # closed after the lanes, which have run all their work by then
            undo.callback(self._close_kernel)
            self._store = self._lane("store", undo)
            self._load = self._lane("load", undo)
            paths = self._possible_paths(shapes, path)
            with self._driver.within(self._context):
                self._choices = self._measure(paths, clock)
            self._report(shapes)
            self._undo = undo.pop_all()

    def record_event(self) -> object | None:
        stream = self._compute_stream()
        # Enter the context, whatever the caller's current device: events and stream 0 belong to a
        # context.
        with self._driver.within(self._context):
            return self._events.record(stream)

    def hold_compute(self, event: object) -> None:
        assert isinstance(event, CudaEvent), event
        with self._driver.within(self._context):
            self._driver.stream_wait_event(self._compute_stream(), event.handle)

    def submit_store(self, batches: Sequence[CopyBatch], after: object | None = None) -> Ticket:
        return self._submit(self._store, batches, after)

    def submit_load(self, batches: Sequence[CopyBatch], after: object | None = None) -> Ticket:
        return self._submit(self._load, batches, after)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._undo.close()

    def choices(self) -> dict[tuple[int, str], Choice]:
        """Return how each group is copied, by group and direction (``store``, ``load``)."""
        return {
            (group, "store" if to_slab else "load"): choice
            for (group, to_slab), choice in self._choices.items()
        }

    def path_infos(self) -> tuple[CopyPathInfo, ...]:
        return tuple(
            CopyPathInfo(
                group, direction, path.name.lower(), path is choice.path, choice.rates.get(path)
            )
            for (group, direction), choice in self.choices().items()
            for path in {choice.path: 0} | dict(choice.rates)
        )

    def failures(self) -> dict[str, int]:
        return self._failures.counts()

    def _lane(self, name: str, undo: ExitStack) -> CudaLane:
        lane = CudaLane(name, self._driver, self._context, self._events, self._failures)
        undo.callback(lane.close)
        return lane

    def _close_kernel(self) -> None:
        if self._kernel is not None:
            with self._driver.within(self._context):
                self._kernel.close()

    def _close_events(self) -> None:
        with self._driver.within(self._context):
            self._events.close()

    def _submit(self, lane: CudaLane, batches: Sequence[CopyBatch], after: object | None) -> Ticket:
        if after is not None and not isinstance(after, CudaEvent):
            raise TypeError(f"not an event of this engine: {after!r}")
        to_slab = lane is self._store
        return lane.submit(partial(self._issue, batches, to_slab), after)

    def _issue(
        self, batches: Sequence[CopyBatch], to_slab: bool, stream: int, kept: list[object]
    ) -> None:
        """Submit the copies of a job to ``stream``, on a lane's submitting thread. All batches are
        checked before the first byte moves."""
        by_path: dict[CopyPath, list[CopyBatch]] = {}
        for batch in batches:
            choice = self._choices.get((batch.group, to_slab))
            by_path.setdefault(choice.path if choice else CopyPath.EACH, []).append(batch)
        built = [(path, self._descriptors.build(some)) for path, some in by_path.items()]
        self._refuse_lost_slots(built)
        pinned_end = self._slab.slot_address(self._slab.pinned_slots)
        unpinned = []
        for path, copies in built:
            # Each copy is within one slot and each slot within one registration, so a copy's memory
            # is never partly pinned.
            pinned = copies.slots < pinned_end
            if pinned.all():
                self._launch(path, copies, to_slab, stream, kept)
            else:
                self._launch(path, copies.where(pinned), to_slab, stream, kept)
                unpinned.append(copies.where(~pinned))
        # submitted last, because each of these copies can block this thread until it has run
        for copies in unpinned:
            self._launch(CopyPath.EACH, copies, to_slab, stream, kept)

    def _launch(
        self, path: CopyPath, copies: Descriptors, to_slab: bool, stream: int, kept: list[object]
    ) -> None:
        to, source = copies.slots, copies.blocks
        if not to_slab:
            to, source = source, to
        kept.append(copies)  # the driver may still read the arrays after it returns
        if path is CopyPath.KERNEL and self._kernel is not None:
            self._kernel.launch(to, source, copies.sizes, stream)
        elif path is CopyPath.BATCH:
            self._driver.copy_batch(to, source, copies.sizes, stream)
        else:
            self._driver.copy_each(to, source, copies.sizes, stream)

    def _refuse_lost_slots(self, built: Sequence[tuple[CopyPath, Descriptors]]) -> None:
        """Raise ``TransferError`` for slots that will never be ready, because there is no memory
        for them, or because pinning failed and is required."""
        failure = self._slab.failure
        ready_end = self._slab.slot_address(self._slab.ready_slots)
        if failure and any((copies.slots >= ready_end).any() for _, copies in built):
            raise TransferError(f"the slab is not ready: {failure}") from failure

    def _possible_paths(
        self, shapes: Mapping[int, CopyShape], wanted: CopyPath | None
    ) -> dict[int, tuple[CopyPath, ...]]:
        """The ways in which this machine can copy each group; loads the kernel if one needs it."""
        # If registered memory has another address on the GPU (WSL2), the batched call and the
        # kernel both fail permanently.
        shared = self._driver.can_use_host_pointers(self._handle)
        capabilities = CopyCapabilities(batch=self._driver.has_batch_copy and shared, kernel=shared)
        paths = {
            group: possible_paths(shape, capabilities, wanted) for group, shape in shapes.items()
        }
        if any(CopyPath.KERNEL in some for some in paths.values()):
            self._kernel = self._load_kernel()
        if self._kernel is None:
            capabilities = CopyCapabilities(batch=capabilities.batch, kernel=False)
            paths = {
                group: possible_paths(shape, capabilities, wanted)
                for group, shape in shapes.items()
            }
        return paths

    def _load_kernel(self) -> CopyKernel | None:
        with self._driver.within(self._context), ExitStack() as undo:
            try:
                kernel = CopyKernel(self._driver, self._events, self._device)
                undo.callback(kernel.close)
                for lane in (self._store, self._load):
                    kernel.attach(lane.stream)
            except Exception as error:
                # if the GPU is unsupported or has no memory, batched calls do all copies
                text = (
                    "kvtiers: the gather/scatter kernel cannot be used (%s: %s); small pages are "
                    "copied more slowly"
                )
                logger.warning(text, type(error).__name__, error)
                return None
            undo.pop_all()
        return kernel

    def _measure(
        self, paths: Mapping[int, tuple[CopyPath, ...]], clock: Callable[[], float]
    ) -> dict[tuple[int, bool], Choice]:
        """Choose the path of each group and direction. The store is measured first, so that the
        load writes back the same content. If one of the two cannot be measured, the other is not
        measured either."""
        samples = {group: self._sample(group) if len(paths[group]) > 1 else None for group in paths}
        if any(samples.values()):
            after = self._events.record(self._compute_stream())  # the caches may be zeroed later
            for lane in (self._store, self._load):
                self._driver.stream_wait_event(lane.stream, after.handle)
        choices = {}
        for group, some in paths.items():
            stored = self._rates(samples[group], some, True, clock)
            loaded = self._rates(samples[group], some, False, clock) if stored else {}
            choices[group, True] = choose(some, stored)
            choices[group, False] = choose(some, loaded)
        return choices

    def _rates(
        self,
        copies: Descriptors | None,
        paths: tuple[CopyPath, ...],
        to_slab: bool,
        clock: Callable[[], float],
    ) -> dict[CopyPath, float]:
        """Copy the sample by each path; empty without a sample, or if a path fails."""
        if copies is None:
            return {}
        stream = (self._store if to_slab else self._load).stream
        kept: list[object] = []

        def copy(path: CopyPath) -> None:
            self._launch(path, copies, to_slab, stream, kept)
            self._driver.synchronize_stream(stream)

        try:
            return {path: rate_of(partial(copy, path), copies.nbytes, clock) for path in paths}
        except DriverError as error:
            logger.warning("kvtiers: the ways of copying could not be compared: %s", error)
            return {}

    def _sample(self, group: int) -> Descriptors | None:
        """Copies of the first blocks and pinned slots; ``None`` if there are too few for a
        measurement."""
        regions = self._groups[group]
        chunks = min(
            self._slab.pinned_slots,
            (self._num_blocks or 0) // regions.chunk_blocks,
            max(1, SAMPLE_BYTES // regions.chunk_bytes),
            max(1, SAMPLE_COPIES // (regions.chunk_blocks * len(regions.regions))),
        )
        if chunks < 1:
            return None
        blocks = np.arange(chunks * regions.chunk_blocks).reshape(chunks, -1)
        return self._descriptors.build([CopyBatch(group, blocks, np.arange(chunks))])

    def _report(self, shapes: Mapping[int, CopyShape]) -> None:
        for (group, to_slab), choice in self._choices.items():
            shape = shapes[group]
            logger.info(
                "kvtiers: group %d, %s: each block is copied in %d pieces of at least %s bytes, "
                "by %s%s",
                group,
                "store" if to_slab else "load",
                shape.copies_per_block,
                f"{shape.smallest_bytes:,}",
                choice.path.value,
                _rates_text(choice),
            )
        if not self._slab.pinned:
            logger.warning(
                "kvtiers: the slab is not pinned: copies to and from the GPU will be slow"
            )


def _rates_text(choice: Choice) -> str:
    """The measured rates in brackets, or an empty text if nothing was measured."""
    rates = [f"{path.value} {rate / 1e9:.1f} GB/s" for path, rate in choice.rates.items()]
    return f" (measured: {', '.join(rates)})" if rates else ""


def gpu_node(
    device: int | None = None,
    *,
    driver: Driver | None = None,
    nodes: Path = NODES,
    devices: Path = PCI_DEVICES,
) -> int | None:
    """Return the NUMA node of a CUDA device (``None``: the calling thread's current one), for
    ``HostSlab(numa_node=...)``. Returns ``None`` if the machine has only one node, does not report
    the node (a virtual machine), or has no CUDA. The other arguments replace the machine in
    tests."""
    if node_count(nodes) == 1:
        return None
    try:
        driver = driver or load_driver()
        device = _torch_device() if device is None else device
        return pci_node(driver.pci_bus_id(driver.device(device)), devices)
    except DriverError:
        return None


def _kind_of(error: Exception) -> str:
    return error.kind if isinstance(error, DriverError) else type_name(error)


def _torch_device() -> int:
    """The device on which the calling thread runs the model."""
    import torch

    return int(torch.cuda.current_device())


def _torch_stream(device: int) -> int:
    """The stream on which the calling thread runs the model."""
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)
