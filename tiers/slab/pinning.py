"""Pinning: registers host memory with CUDA, so that the GPU's copy engines can reach it.

This module has the interface that the slab uses; ``cuda_registrar`` implements it.
"""

from __future__ import annotations

import resource
from typing import Protocol


class PinningError(Exception):
    """Raised if memory could not be registered with CUDA, or unregistered."""


class Registrar(Protocol):
    """Registers page-aligned ranges of host memory with a device."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin ``[address, address + nbytes)``; raises ``PinningError``."""

    def unregister(self, address: int) -> None:
        """Unpin the range that was registered at ``address``; raises ``PinningError``."""

    def close(self) -> None:
        """Release the device; raises ``PinningError``. All memory must have been unregistered."""


def pinning_advice(error: PinningError, total_bytes: int, pinned_bytes: int) -> str:
    """The message for a failed registration: numbers, the likely cause, and a remedy."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    head = (
        f"cannot pin the CPU tier's memory: {pinned_bytes:,} of {total_bytes:,} bytes are pinned; "
        f"pinning the next piece failed with: {error}."
    )
    if limit == resource.RLIM_INFINITY:
        return f"{head} The memlock limit is unlimited; the machine may be short of free memory."
    return (
        f"{head} The memlock limit of this process is {limit:,} bytes: raise it with "
        f"'ulimit -l unlimited', '--ulimit memlock=-1' (docker), or 'LimitMEMLOCK=infinity' "
        f"(systemd), or make the CPU tier smaller."
    )
