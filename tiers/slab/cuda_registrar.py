"""Pins host memory through the CUDA driver.

This is a separate module so that a slab without CUDA does not import the driver. It registers
exactly the memory that was configured; torch's pinned allocator rounds up to powers of two.
"""

from __future__ import annotations

from tiers.cuda_driver import Driver, DriverError, load_driver
from tiers.slab.pinning import PinningError


class CudaRegistrar:
    """Registers memory for all CUDA contexts of this process, through the context of ``device``.

    With ``None`` it uses the context of the calling thread, so that a worker that has chosen its
    GPU opens no context on another GPU. Any thread may call. Raises ``PinningError`` without CUDA.
    ``close`` releases the context if the registrar opened it.
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
