"""Copies between KV caches on a CUDA device and the pinned slab.

Two streams of the lowest priority, one for stores and one for loads, ordered against the model's
stream by events alone: a store reads its blocks only after the forward pass that wrote them, a load
overwrites its blocks only after the forward pass that may still read them, and a ticket is done
only when the copy engine has finished.

How a group's bytes move is chosen once, from the size of its pages (``choose_path``), and logged.

Not yet run on a GPU: checked against the driver's documentation and, in the tests, against a
driver that is simulated behind the same C functions. ``tests/gpu`` waits for a machine.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from tiers.copy.base import CopyBatch, CopyEngine, GroupRegions, Ticket, TransferError
from tiers.copy.cuda_lanes import CudaEvent, CudaLane, EventPool
from tiers.copy.descriptors import CopyShape, DescriptorBuilder, Descriptors
from tiers.copy.failures import Failures, type_name
from tiers.cuda_driver import Addresses, Driver, DriverError, load_driver
from tiers.slab.numa import NODES, PCI_DEVICES, node_count, pci_node
from tiers.slab.slab import HostSlab

logger = logging.getLogger(__name__)

KERNEL_BELOW_BYTES = 16 * 1024
"""Copies smaller than this go through the kernel: at 50 GB/s their bytes take less than about
0.3 us, which is less than a copy engine needs for a descriptor. Not measured yet."""

KERNEL_ALIGNMENT = 16
"""The kernel requires this alignment of every address and size."""


class CopyPath(enum.Enum):
    """The way in which copies are submitted to the GPU."""

    BATCH = "one batched driver call"
    KERNEL = "a gather/scatter kernel"
    EACH = "one driver call per copy"


@dataclass(frozen=True, slots=True)
class Means:
    """The capabilities of this machine: the batched call (CUDA 12.8), and the kernel (Triton, and
    registered memory that kernels reach at its host address)."""

    batch: bool
    kernel: bool


def choose_path(shape: CopyShape, means: Means, wanted: CopyPath | None = None) -> CopyPath:
    """Choose the path for copies of this shape. ``wanted`` overrides the choice where possible."""
    kernel = means.kernel and shape.alignment % KERNEL_ALIGNMENT == 0
    if wanted is CopyPath.KERNEL and kernel:
        return wanted
    if wanted is CopyPath.BATCH and means.batch:
        return wanted
    if wanted is CopyPath.EACH:
        return wanted
    if kernel and shape.smallest_bytes < KERNEL_BELOW_BYTES and shape.copies_per_block > 1:
        return CopyPath.KERNEL
    return CopyPath.BATCH if means.batch else CopyPath.EACH


class Kernel(Protocol):
    """The gather/scatter kernel."""

    def launch(
        self, to: Addresses, source: Addresses, sizes: Addresses, stream: int, kept: list[object]
    ) -> None:
        """Submit copies to ``stream``. Everything that they read is first appended to ``kept``,
        which must be held until they have run, also when this raises."""


class CudaCopyEngine(CopyEngine):
    """A ``CopyEngine`` for KV caches on CUDA device ``device`` (torch's number; ``None``: the
    calling thread's current one).

    ``slab`` should be pinned (``HostSlab(pin=True)``). Slots that are not pinned, or not yet, work
    too: the driver copies them one by one through its internal memory, slowly, and no other job
    waits for the pinning. ``num_blocks`` bounds block ids. ``path`` forces a way of copying where
    possible, for measurements. ``driver``, ``kernel`` and ``compute_stream`` (the model's stream,
    as a handle) replace CUDA in tests.

    The model-runner thread, on whose current stream the model runs, calls ``record_event``; one
    other thread calls everything else. Raises ``DriverError`` where there is no CUDA and
    ``ValueError`` when a chunk does not fit a slot.
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
        kernel: Callable[[int], Kernel] | None = None,
        compute_stream: Callable[[], int] | None = None,
    ) -> None:
        self._slab = slab
        self._descriptors = DescriptorBuilder(
            groups,
            slab_address=slab.address,
            slot_stride=slab.slot_stride,
            slot_count=slab.slot_count,
            num_blocks=num_blocks,
        )
        self._driver = driver or load_driver()
        device = _torch_device() if device is None else device
        self._handle = self._driver.device(device)
        shapes = {group.group: self._descriptors.shape(group.group) for group in groups}
        self._kernel = self._load_kernel(kernel or _triton_kernel, device, shapes, path)
        means = Means(batch=self._driver.has_batch_copy, kernel=self._kernel is not None)
        self._paths = {group: choose_path(shape, means, path) for group, shape in shapes.items()}
        self._compute_stream = compute_stream or (lambda: _torch_stream(device))
        self._failures = Failures(_kind_of)
        self._closed = False
        with ExitStack() as undo:
            self._context = self._driver.retain_context(self._handle)
            undo.callback(self._driver.release_context, self._handle)
            self._events = EventPool(self._driver)
            undo.callback(self._close_events)
            self._store = self._lane("store", undo)
            self._load = self._lane("load", undo)
            self._report(shapes)
            self._undo = undo.pop_all()

    def record_event(self) -> object | None:
        stream = self._compute_stream()
        # For any current device of the caller: events, and stream 0, belong to a context.
        with self._driver.within(self._context):
            return self._events.record(stream)

    def submit_store(self, batches: Sequence[CopyBatch], after: object | None = None) -> Ticket:
        return self._submit(self._store, batches, after)

    def submit_load(self, batches: Sequence[CopyBatch], after: object | None = None) -> Ticket:
        return self._submit(self._load, batches, after)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._undo.close()

    def paths(self) -> dict[int, CopyPath]:
        """Return the path chosen for each group."""
        return dict(self._paths)

    def failures(self) -> dict[str, int]:
        """Count the failures by kind; each kind is logged once (``tiers.copy.failures``)."""
        return self._failures.counts()

    def _lane(self, name: str, undo: ExitStack) -> CudaLane:
        lane = CudaLane(name, self._driver, self._context, self._events, self._failures)
        undo.callback(lane.close)
        return lane

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
            by_path.setdefault(self._paths.get(batch.group, CopyPath.EACH), []).append(batch)
        built = [(path, self._descriptors.build(some)) for path, some in by_path.items()]
        self._refuse_lost_slots(built)
        pinned_end = self._slab.slot_address(self._slab.pinned_slots)
        unpinned = []
        for path, copies in built:
            # A copy lies within a slot, a slot within a registration: it is pinned or it is not.
            pinned = copies.slots < pinned_end
            if pinned.all():
                self._launch(path, copies, to_slab, stream, kept)
            else:
                self._launch(path, copies.where(pinned), to_slab, stream, kept)
                unpinned.append(copies.where(~pinned))
        for copies in unpinned:  # last: each may block this thread until it has run
            self._launch(CopyPath.EACH, copies, to_slab, stream, kept)

    def _launch(
        self, path: CopyPath, copies: Descriptors, to_slab: bool, stream: int, kept: list[object]
    ) -> None:
        to, source = copies.slots, copies.blocks
        if not to_slab:
            to, source = source, to
        kept.append(copies)  # the driver may still read the arrays after it returns
        if path is CopyPath.KERNEL and self._kernel is not None:
            self._kernel.launch(to, source, copies.sizes, stream, kept)
        elif path is CopyPath.BATCH:
            self._driver.copy_batch(to, source, copies.sizes, stream)
        else:
            self._driver.copy_each(to, source, copies.sizes, stream)

    def _refuse_lost_slots(self, built: Sequence[tuple[CopyPath, Descriptors]]) -> None:
        """Raise ``TransferError`` for slots that will never be ready: there is no memory for them,
        or pinning failed and is required."""
        failure = self._slab.failure
        ready_end = self._slab.slot_address(self._slab.ready_slots)
        if failure and any((copies.slots >= ready_end).any() for _, copies in built):
            raise TransferError(f"the slab is not ready: {failure}") from failure

    def _load_kernel(
        self,
        load: Callable[[int], Kernel],
        device: int,
        shapes: dict[int, CopyShape],
        wanted: CopyPath | None,
    ) -> Kernel | None:
        """Return the kernel if a group would use it and it is available."""
        ideal = Means(batch=True, kernel=self._driver.can_use_host_pointers(self._handle))
        choices = [choose_path(shape, ideal, wanted) for shape in shapes.values()]
        if CopyPath.KERNEL not in choices:
            return None
        try:
            return load(device)
        except Exception as error:  # no Triton, no compiler, an unsupported GPU
            logger.warning(
                "the gather/scatter kernel cannot be used (%s: %s); small pages are copied by "
                "the copy engine, which is slower",
                type(error).__name__,
                error,
            )
            return None

    def _report(self, shapes: dict[int, CopyShape]) -> None:
        for group, shape in shapes.items():
            logger.info(
                "group %d: %d copies per block of at least %s bytes, by %s",
                group,
                shape.copies_per_block,
                f"{shape.smallest_bytes:,}",
                self._paths[group].value,
            )
        if not self._slab.pinned:
            logger.warning("the slab is not pinned: copies to and from the GPU will be slow")


def gpu_node(
    device: int | None = None,
    *,
    driver: Driver | None = None,
    nodes: Path = NODES,
    devices: Path = PCI_DEVICES,
) -> int | None:
    """Return the NUMA node of a CUDA device (``None``: the calling thread's current one), for
    ``HostSlab(numa_node=...)``. Returns ``None`` if the machine has one node only, does not report
    it (a virtual machine), or has no CUDA. The other arguments replace the machine in tests."""
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


def _triton_kernel(device: int) -> Kernel:
    from tiers.copy.cuda_kernel import CopyKernel

    return CopyKernel(device)


def _torch_device() -> int:
    """The device that the calling thread runs the model on."""
    import torch

    return int(torch.cuda.current_device())


def _torch_stream(device: int) -> int:
    """The stream on which the calling thread runs the model."""
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)
