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
"$python" - "$out/copy-cuda.json" <<'PY' || status=1
import json, sys
report = json.load(open(sys.argv[1]))
short = []
for row in report["rows"]:
    values, (layout, size, direction) = row["values"], row["case"].split(", ")
    if row["series"].startswith("kvtiers") and "share" in values:
        print(f"{row['case']:32} {row['series']:20} {values['GB/s']:7.1f} GB/s {values['share']:.3f}")
        number, unit = size.split()
        big = unit == "MiB"  # 32 pages of 32 KiB and more, or contiguous chunks of 1 MiB and more
        target = {"contiguous": 0.95, "separate": 0.90}.get(layout, 0.0)
        if big and direction != "both" and values["share"] < target:
            short.append(f"{row['case']}: {values['share']:.3f} of the large copy, not {target}")
print("\n".join(short) or "every target is met")
sys.exit(bool(short))
PY
exit $status
