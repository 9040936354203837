#!/usr/bin/env bash
# Makes tiers/copy/copy_list.ptx from copy_list.cu. Needs nvcc (CUDA 12 or 13).
#   scripts/copy_kernel.sh [file]
# The PTX is for compute capability 8.0 and later. It uses no feature newer than PTX 7.0, and declares
# this version: older drivers would reject a newer one.
set -euo pipefail
cd "$(dirname "$0")/../tiers/copy"
to=${1:-copy_list.ptx}
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
nvcc -ptx -arch=compute_80 copy_list.cu -o "$made/made.ptx"
{
    echo "// Made by scripts/copy_kernel.sh from copy_list.cu, sha256 $(sha256sum copy_list.cu | cut -d ' ' -f 1)"
    sed -e 's/^\.version .*/.version 7.0/' -e '/^\/\//d' -e '/^$/d' "$made/made.ptx"
} >"$made/copy_list.ptx"
cp "$made/copy_list.ptx" "$to"
