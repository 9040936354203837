"""Runs tests with the kernels of an older processor: ``KVTIERS_TEST_ISA=avx2``.

Kernels are chosen by instruction set, and other kernels produce other last bits, so a comparison
that holds on one processor may fail on another. oneDNN and ATen have switches for this; vLLM
chooses between its two builds by the features that torch reports, so torch is made to report no
AVX-512.
"""

from __future__ import annotations

import os

ISA = os.environ.get("KVTIERS_TEST_ISA", "")
SWITCHES = {"avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}}
DENIED = ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported")


def pretend() -> None:
    """Limit this process, and those that it starts, to the requested kernels; call this before
    torch is imported. Raises ``ValueError`` for an unknown instruction set."""
    if not ISA:
        return
    if ISA not in SWITCHES:
        raise ValueError(f"KVTIERS_TEST_ISA is {ISA!r}; known: {', '.join(SWITCHES)}")
    os.environ.update(SWITCHES[ISA])
    import torch

    for name in DENIED:
        if hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda: False)


def has_avx512() -> bool:
    """True if kernels for AVX-512 are used here."""
    import torch

    return bool(torch.cpu._is_avx512_supported())
