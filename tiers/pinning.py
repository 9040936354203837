"""Registering host memory with CUDA ("pinning"), so that the GPU's copy engines reach it directly.

``cudaHostRegister`` on memory of our own takes exactly what was configured; torch's pinned
allocator rounds up to powers of two. Imports torch only when a registration is asked for.
"""

from __future__ import annotations

import resource
from typing import Any, Protocol

PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every CUDA context of the process."""


class PinningError(Exception):
    """The CUDA runtime refused to register or unregister memory."""


class Registrar(Protocol):
    """Registers page-aligned ranges of host memory with a device."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin ``[address, address + nbytes)``; raises ``PinningError``."""

    def unregister(self, address: int) -> None:
        """Undo ``register`` of the range that starts at ``address``; raises ``PinningError``."""


class CudaRegistrar:
    """Registers with the CUDA runtime that torch is linked to, in the context of ``device``
    (``None``: the caller's current device). Callable from any thread.

    Raises ``PinningError`` where torch has no usable CUDA.
    """

    def __init__(self, device: int | None = None) -> None:
        import torch

        if not torch.cuda.is_available():
            raise PinningError("pinned memory needs CUDA, and torch finds none on this machine")
        self._device = torch.cuda.current_device() if device is None else device
        self._cudart: Any = torch.cuda.cudart()
        self._on_device: Any = torch.cuda.device

    def register(self, address: int, nbytes: int) -> None:
        # A new thread's current device is 0: without the guard each rank would open a context
        # on the first GPU.
        with self._on_device(self._device):
            result = self._cudart.cudaHostRegister(address, nbytes, PORTABLE)
        self._check(result, "cudaHostRegister")

    def unregister(self, address: int) -> None:
        with self._on_device(self._device):
            result = self._cudart.cudaHostUnregister(address)
        self._check(result, "cudaHostUnregister")

    def _check(self, result: Any, call: str) -> None:
        code = int(result)
        if code != 0:
            raise PinningError(f"{call}: {self._cudart.cudaGetErrorString(result)} ({code})")


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
