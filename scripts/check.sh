#!/usr/bin/env bash
# All static checks, each run even when an earlier one failed. Run by ./run check and ./run test.
set -uo pipefail
status=0
step() {
    echo "--- $*"
    "$@" || status=1
}
step ruff check .
step ruff format --check .
step mypy
step python scripts/prose.py
step python -m pytest -q tests/test_tidy.py
exit $status
