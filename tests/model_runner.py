"""Tests under vLLM's Model Runner V2, its default on GPUs: ``KVTIERS_TEST_RUNNER=v2``.

On the CPU platform, V2 requires Triton, which has an interpreter for CPUs but no compiler. vLLM
disables Triton unless exactly one backend is active, so this module registers a CPU backend that
compiles nothing. The runner is vLLM's own: the order of its hooks, how it zeroes and copies blocks,
and when it proposes drafts, are those of a GPU. It is slow.
"""

from __future__ import annotations

import os

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
