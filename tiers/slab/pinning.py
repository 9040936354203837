"""Registering host memory with CUDA ("pinning"), so that the GPU's copy engines reach it directly.

Registering memory of our own takes exactly what was configured; torch's pinned allocator rounds
up to powers of two.
"""

from __future__ import annotations

import resource
from typing import Protocol

from tiers.cuda_driver import Driver, DriverError, load_driver


class PinningError(Exception):
    """Memory could not be registered with CUDA, or unregistered."""


class Registrar(Protocol):
    """Registers page-aligned ranges of host memory with a device."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin ``[address, address + nbytes)``; raises ``PinningError``."""

    def unregister(self, address: int) -> None:
        """Undo ``register`` of the range that starts at ``address``; raises ``PinningError``."""

    def close(self) -> None:
        """Let go of the device; raises ``PinningError``. Nothing is registered any more."""


class CudaRegistrar:
    """Registers memory for every CUDA context of this process, through that of ``device``.

    ``None`` takes the context of the calling thread, so that a worker that has chosen its GPU
    opens none on another one. Callable from any thread. Raises ``PinningError`` where there is
    no CUDA. A context that it opened itself is let go by ``close``.
    """

    def __init__(self, device: int | None = None, driver: Driver | None = None) -> None:
        self._retained: int | None = None
        try:
            self._driver = driver or load_driver()
            context = self._driver.current_context() if device is None else None
            if context is None:
                handle = self._driver.device(device or 0)
                context = self._driver.retain_context(handle)
                self._retained = handle
        except DriverError as error:
            raise PinningError(f"pinned memory needs CUDA: {error}") from error
        self._context = context

    def register(self, address: int, nbytes: int) -> None:
        try:
            with self._driver.within(self._context):
                self._driver.register(address, nbytes)
        except DriverError as error:
            raise PinningError(str(error)) from error

    def unregister(self, address: int) -> None:
        try:
            with self._driver.within(self._context):
                self._driver.unregister(address)
        except DriverError as error:
            raise PinningError(str(error)) from error

    def close(self) -> None:
        handle, self._retained = self._retained, None
        if handle is None:
            return
        try:
            self._driver.release_context(handle)
        except DriverError as error:
            raise PinningError(str(error)) from error


def pinning_advice(error: PinningError, total_bytes: int, pinned_bytes: int) -> str:
    """The message for a registration that failed: numbers, the likely cause, what to do."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    head = (
        f"cannot pin the CPU tier's memory: {pinned_bytes:,} of {total_bytes:,} bytes are pinned, "
        f"the next piece failed with: {error}."
    )
    if limit == resource.RLIM_INFINITY:
        return f"{head} The memlock limit is unlimited; the machine may be short of free memory."
    return (
        f"{head} The memlock limit of this process is {limit:,} bytes: raise it with "
        f"'ulimit -l unlimited', '--ulimit memlock=-1' (docker), or 'LimitMEMLOCK=infinity' "
        f"(systemd), or make the CPU tier smaller."
    )
