"""Tests under vLLM's Model Runner V2, its default on GPUs: ``KVTIERS_TEST_RUNNER=v2``.

On the CPU platform, V2 requires Triton, which has an interpreter for CPUs but no compiler. vLLM
disables Triton unless exactly one backend is active, so this module registers a CPU backend that
compiles nothing. The runner is vLLM's own: the order of its hooks, how it zeroes and copies blocks,
and when it proposes drafts, are those of a GPU. It is slow.
"""

from __future__ import annotations

import os
from typing import Any

RUNNER = os.environ.get("KVTIERS_TEST_RUNNER", "v1")
IS_V2 = RUNNER == "v2"


class _InterpretingDriver:
    @staticmethod
    def is_active() -> bool:
        return True


class _InterpretingBackend:
    compiler = None
    driver = _InterpretingDriver


def pretend() -> None:
    """Make vLLM use the requested runner, in this process and in those that it forks; call this
    before vLLM is imported. Raises ``ValueError`` for an unknown runner."""
    if RUNNER not in ("v1", "v2"):
        raise ValueError(f"KVTIERS_TEST_RUNNER is {RUNNER!r}; it can be v1 or v2")
    if IS_V2:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        os.environ["TRITON_INTERPRET"] = "1"  # set before Triton is imported
        from triton.backends import backends

        backends["cpu"] = _InterpretingBackend
        _take_any_mask()


def _take_any_mask() -> None:
    """Let the interpreter load and store with masks that are integers, as compiled kernels do.
    vLLM's kernel for n-gram drafts has one; the interpreter refuses it (Triton 3.9)."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def as_bool(mask: Any) -> Any:
        return TensorHandle(mask.data.astype(bool), mask.dtype)

    def masked_load(builder: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        return load(builder, ptrs, as_bool(mask), *others)

    def masked_store(builder: Any, ptrs: Any, value: Any, mask: Any, *others: Any) -> Any:
        return store(builder, ptrs, value, as_bool(mask), *others)

    InterpreterBuilder.create_masked_load = masked_load
    InterpreterBuilder.create_masked_store = masked_store
