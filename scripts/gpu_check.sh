#!/usr/bin/env bash
# The GPU tests and the copy benchmark in one call, on a machine with a CUDA device.
# Needs python3 with torch (CUDA), triton, numpy, llvmlite, typer, rich and pytest; neither vLLM nor a
# network. Results go to the folder given (default: bench/results).
#   scripts/gpu_check.sh [folder]
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-bench/results}")
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD
status=0

"$python" -c 'import sys, torch
print("python", sys.version.split()[0], "torch", torch.__version__, "cuda", torch.version.cuda)
print(torch.cuda.get_device_name() if torch.cuda.is_available() else sys.exit("no CUDA device"))' \
    || exit 1
ulimit -l

echo "=== tests"
"$python" -m pytest tests/gpu -m gpu -q -o addopts="--import-mode=importlib" \
    2>&1 | tee "$out/gpu-tests.txt" || status=1

echo "=== benchmark"
"$python" -m bench.copy --device cuda --job 512MiB --cache 4GiB --rounds 7 \
    --sizes 64KiB,256KiB,1MiB,2MiB,4MiB,16MiB --json >"$out/copy-cuda.json" || status=1
"$python" -m bench.copy_targets "$out/copy-cuda.json" || status=1
exit $status
