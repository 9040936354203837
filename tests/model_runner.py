"""Tests under vLLM's Model Runner V2, its default on GPUs: ``KVTIERS_TEST_RUNNER=v2``.

On the CPU platform V2 wants Triton, which has no compiler for CPUs, but an interpreter. vLLM
disables Triton unless exactly one backend is active, so a CPU backend that compiles nothing is
registered. The runner is vLLM's own: the order of its hooks, how it zeroes and copies blocks, and
when it proposes drafts, are those of a GPU. It is slow.
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
    """Let vLLM take the runner that was asked for, in this process and those that it starts by
    forking; call before vLLM is imported. Raises ``ValueError`` for an unknown runner."""
    if RUNNER not in ("v1", "v2"):
        raise ValueError(f"KVTIERS_TEST_RUNNER is {RUNNER!r}; it can be v1 or v2")
    if IS_V2:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        from triton.backends import backends

        backends["cpu"] = _InterpretingBackend
