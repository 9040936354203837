"""Pins host memory through the CUDA driver.

This is a separate module so that a slab without CUDA does not import the driver. It registers
exactly the memory that was configured; torch's pinned allocator rounds up to powers of two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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
        with _pinning_errors("pinned memory needs CUDA: "):
            self._driver = driver or load_driver()
            context = self._driver.current_context() if device is None else None
            if context is None:
                handle = self._driver.device(device or 0)
                context = self._driver.retain_context(handle)
                self._retained = handle
        self._context = context

    def register(self, address: int, nbytes: int) -> None:
        with _pinning_errors(), self._driver.within(self._context):
            self._driver.register(address, nbytes)

    def unregister(self, address: int) -> None:
        with _pinning_errors(), self._driver.within(self._context):
            self._driver.unregister(address)

    def close(self) -> None:
        handle, self._retained = self._retained, None
        if handle is not None:
            with _pinning_errors():
                self._driver.release_context(handle)


@contextlib.contextmanager
def _pinning_errors(prefix: str = "") -> Iterator[None]:
    """Raise errors of the driver as ``PinningError``."""
    try:
        yield
    except DriverError as error:
        raise PinningError(f"{prefix}{error}") from error
