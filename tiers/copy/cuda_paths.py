"""Chooses how each group is copied in each direction, by a measurement when the engine starts.

A batched driver call costs about half a microsecond per copy, whatever the size. The copy kernel
does not have this cost, but takes multiprocessors from the model. Which one is faster depends on
the size of the copies, the bus and the driver. So both copy a few MiB at the start, which takes a
few milliseconds, and the kernel is chosen only if it is clearly faster.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tiers.copy.descriptors import CopyShape

KERNEL_ALIGNMENT = 16
"""The kernel requires this alignment of every address and size."""

KERNEL_UP_TO_BYTES = 64 * 1024
"""Larger copies never use the kernel: moving their bytes takes longer than a descriptor."""

KERNEL_BELOW_BYTES = 16 * 1024
"""Without a measurement, copies smaller than this use the kernel."""

KERNEL_MUST_GAIN = 1.25
"""The kernel must be faster by this factor, because it takes multiprocessors and copy engines do
not."""

SAMPLE_BYTES = 4 * 2**20
SAMPLE_COPIES: Final = 2048
ROUNDS = 3
"""Number of timed copies per way of copying, after one untimed copy; the fastest counts."""


class CopyPath(enum.Enum):
    """The way in which copies are submitted to the GPU."""

    BATCH = "one batched driver call"
    KERNEL = "a gather/scatter kernel"
    EACH = "one driver call per copy"


@dataclass(frozen=True, slots=True)
class CopyCapabilities:
    """The capabilities of this machine: the batched call (CUDA 12.8), and the kernel. Both also
    need registered memory that the GPU reaches at its host address."""

    batch: bool
    kernel: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """The path of one group in one direction, and the bytes per second of the paths that were
    measured for it."""

    path: CopyPath
    rates: Mapping[CopyPath, float] = field(default_factory=dict)


def possible_paths(
    shape: CopyShape, capabilities: CopyCapabilities, wanted: CopyPath | None = None
) -> tuple[CopyPath, ...]:
    """The paths worth comparing, starting with the one to use without a measurement. ``wanted``
    overrides the choice where possible."""
    plain = CopyPath.BATCH if capabilities.batch else CopyPath.EACH
    kernel = capabilities.kernel and shape.alignment % KERNEL_ALIGNMENT == 0
    if wanted is CopyPath.EACH or (wanted is CopyPath.BATCH and capabilities.batch):
        return (wanted,)
    if wanted is CopyPath.KERNEL and kernel:
        return (wanted,)
    if not kernel or shape.copies_per_block == 1 or shape.smallest_bytes > KERNEL_UP_TO_BYTES:
        return (plain,)
    if shape.smallest_bytes < KERNEL_BELOW_BYTES:
        return (CopyPath.KERNEL, plain)
    return (plain, CopyPath.KERNEL)


def choose(paths: tuple[CopyPath, ...], rates: Mapping[CopyPath, float]) -> Choice:
    """Choose among ``possible_paths`` by their measured rates."""
    if len(rates) < len(paths) or len(paths) == 1:
        return Choice(paths[0], dict(rates))
    plain = next(path for path in paths if path is not CopyPath.KERNEL)
    is_worth_it = rates[CopyPath.KERNEL] > KERNEL_MUST_GAIN * rates[plain]
    return Choice(CopyPath.KERNEL if is_worth_it else plain, dict(rates))


def rate_of(
    copy: Callable[[], object], nbytes: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Bytes per second of ``copy``, which returns when the bytes have arrived."""
    copy()
    times = []
    for _ in range(ROUNDS):
        began = clock()
        copy()
        times.append(clock() - began)
    return nbytes / max(min(times), 1e-9)
