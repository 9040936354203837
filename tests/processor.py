"""Runs tests on a simulated other processor: ``KVTIERS_TEST_ISA=avx2`` or ``odd``.

Kernels are chosen by instruction set, and other kernels produce other last bits, so a comparison
that holds on one processor may fail on another.

* ``avx2``: oneDNN and ATen have switches for their kernels; vLLM chooses between its two builds by
  the features that torch reports, so torch is made to report no AVX-512.
* ``odd``: the results of a matrix product depend on its number of rows, as if every number of rows
  had its own kernel. A token then gets other KV bytes when it is computed in another batch or in
  another piece of its prompt.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

ISA = os.environ.get("KVTIERS_TEST_ISA", "")
ODD = "odd"
SWITCHES = {"avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}, ODD: {}}
DENIED = ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported")
BITS = 3
"""With ``odd``, number of last bits that may differ. Real kernels differ in one or two, which a
comparison of answers may miss by luck."""


def pretend() -> None:
    """Limit this process, and those that it starts, to the requested kernels; call this before
    torch is imported. Raises ``ValueError`` for an unknown instruction set."""
    if not ISA:
        return
    if ISA not in SWITCHES:
        raise ValueError(f"KVTIERS_TEST_ISA is {ISA!r}; known: {', '.join(SWITCHES)}")
    os.environ.update(SWITCHES[ISA])
    if ISA == ODD:
        return
    import torch

    for name in DENIED:
        if hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda: False)


def pretend_in_layers() -> None:
    """With ``odd``, change vLLM's layers in this process and in those that it forks; call this
    after the model runner was chosen, because it imports vLLM."""
    if ISA != ODD:
        return
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        method.apply = depends_on_rows(method.apply)


def depends_on_rows(apply: Callable[..., Any]) -> Callable[..., Any]:
    """A matrix product whose last bits depend on the number of rows."""
    import torch

    integers = {2: torch.int16, 4: torch.int32}

    def odd(*args: Any, **kwargs: Any) -> Any:
        found = apply(*args, **kwargs)
        integer = integers[found.element_size()]
        draw = torch.Generator().manual_seed(found.shape[:-1].numel())
        flips = torch.randint(1 << BITS, found.shape[-1:], generator=draw, dtype=integer)
        found.view(integer).bitwise_xor_(flips)
        return found

    return odd


def has_avx512() -> bool:
    """True if kernels for AVX-512 are used here."""
    import torch

    return bool(torch.cpu._is_avx512_supported())
