"""Runs vLLM's own kernels for states under speculation in Triton's interpreter.

With recurrent states and drafts vLLM moves the accepted state between blocks by two Triton kernels,
and there is no Triton for CPUs: without them the first request ends the engine. Everything else in
this combination runs on the CPU platform. The source of the kernels is vLLM's; only their execution
is replaced, so the copies are the same as on a GPU.

``TRITON_INTERPRET=1`` must be in the environment before Triton is imported (Triton reads it
whenever it decorates a function, including its own functions): see ``tests.vllm.engine.BASE_ENV``.
"""

from __future__ import annotations

import importlib.util
import sys

KERNELS = ("precopy_mamba_align_fused_kernel", "postprocess_mamba_fused_kernel")


def interpret_state_kernels() -> None:
    """Replace the kernels that Triton cannot compile here by interpreted ones."""
    import triton
    import triton.language as tl
    import vllm.triton_utils as stand_ins
    from vllm.v1.worker import mamba_utils

    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 was not set before the import"
    before = stand_ins.triton, stand_ins.tl
    stand_ins.triton, stand_ins.tl = triton, tl
    try:
        spec = importlib.util.spec_from_file_location("interpreted", mamba_utils.__file__)
        assert spec is not None
        assert spec.loader is not None
        interpreted = importlib.util.module_from_spec(spec)
        sys.modules["interpreted"] = interpreted  # dataclasses look up their module
        spec.loader.exec_module(interpreted)
    finally:
        stand_ins.triton, stand_ins.tl = before
    for name in KERNELS:
        setattr(mamba_utils, name, getattr(interpreted, name))
    # more programs are for a GPU's many cores; here they run one after the other
    mamba_utils._TEMPORAL_TILES = 1
