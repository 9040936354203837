"""Warns if vLLM's CPU platform leaves too little memory to the CPU tier, without importing vLLM."""

from __future__ import annotations

from collections.abc import Mapping

from offload.cli import installed_vllm
from offload.cli.numbers import share_text, size_text
from offload.cli.vllm_flags import has_flag
from offload.config.machine_checks import MEMORY_LEFT_SHARE
from offload.config.memory_limits import MemoryLimit

VLLM_SHARE = 0.92
"""vLLM's default of --gpu-memory-utilization, which on this platform is a share of the memory."""
SHARE_STEP, SHARE_MIN = 0.05, 0.1
DECIDED_BY = (
    *("--gpu-memory-utilization", "--device-memory-utilization", "--kv-cache-memory-bytes"),
    "--config",
)
"""With one of these flags, the user has chosen vLLM's share, or may have chosen it in a file."""
VARIABLE = "VLLM_CPU_KVCACHE_SPACE"


def is_cpu_build() -> bool:
    """True if the installed vLLM is a build for its CPU platform."""
    return "cpu" in installed_vllm()


def memory_warning(
    flags: list[str], capacity: int, environment: Mapping[str, str], limit: MemoryLimit
) -> str:
    """A warning if vLLM's default share of the memory and a CPU tier of ``capacity`` bytes do not
    fit together, with a share that fits. Empty if they fit, or if the user has chosen a share."""
    if environment.get(VARIABLE) or any(has_flag(flags, name) for name in DECIDED_BY):
        return ""
    taken = VLLM_SHARE * limit.limit_bytes
    if taken + capacity <= limit.available_bytes:
        return ""
    left = limit.available_bytes - capacity - MEMORY_LEFT_SHARE * limit.limit_bytes
    share = left / limit.limit_bytes // SHARE_STEP * SHARE_STEP
    fix = f"Add --gpu-memory-utilization {share:.2g}"
    if share < SHARE_MIN:
        fix = f"Give a smaller --kv-cpu, and --gpu-memory-utilization {SHARE_MIN:g} or more"
    return (
        f"warning: without a GPU, vLLM takes {share_text(VLLM_SHARE)} of the memory of "
        f"{size_text(limit.limit_bytes)}, the CPU tier takes {size_text(capacity)}, and "
        f"{size_text(limit.available_bytes)} are available. {fix}"
    )
