"""``./run serve MODEL [flags]``: runs ``kvtiers serve`` from a checkout, after checking that the
model can fit into this machine's GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from offload.cli import main

MIB = 2**20


def too_large(model: Path, flags: list[str], gpus: list[int]) -> str:
    """Explain why a local model does not fit into these GPUs. Returns an empty text if it may fit
    or its size is unknown."""
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    if not gpus or not weights or _offloads_weights(flags):
        return ""
    parallel = _number(flags, "--tensor-parallel-size", "-tp") * _number(
        flags, "--pipeline-parallel-size", "-pp"
    )
    memory = min(gpus) * parallel
    if weights < memory:
        return ""
    return (
        f"the weights of {model} take {weights // MIB:,} MiB, but the memory of {parallel} GPU"
        f"{'s' if parallel > 1 else ''} of this machine is {memory // MIB:,} MiB. Take a smaller "
        "or quantized model, or more GPUs with --tensor-parallel-size."
    )


def gpu_bytes() -> list[int]:
    """The memory of each GPU in bytes."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return [int(line) * MIB for line in done.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def _number(flags: list[str], *names: str) -> int:
    """The value of a numeric flag, or 1 if the flag is missing."""
    for at, flag in enumerate(flags):
        name, _, value = flag.partition("=")
        if name in names:
            value = value or (flags[at + 1] if at + 1 < len(flags) else "")
            return int(value) if value.isdigit() else 1
    return 1


def _offloads_weights(flags: list[str]) -> bool:
    """True if the weights may take less GPU memory than their files."""
    names = ("--cpu-offload", "--offload", "--quantization", "-q")
    return any(flag.startswith(names) for flag in flags)


if __name__ == "__main__":
    given = sys.argv[1:]
    if given and (refusal := too_large(Path(given[0]), given[1:], gpu_bytes())):
        sys.exit(f"run: {refusal}")
    sys.argv[1:1] = ["serve"]
    main()
