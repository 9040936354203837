#!/usr/bin/env bash
# Runs all static checks, even after one has failed. Called by ./run check and ./run test.
# mypy takes as long as all others together, so it runs in parallel and reports at the end.
set -uo pipefail
trap 'exit 130' INT
status=0
step() {
    echo "--- $*"
    "$@" || status=1
}
report=$(mktemp)
mypy >"$report" 2>&1 &
mypy=$!
trap 'kill "$mypy" 2>/dev/null; rm -f "$report"' EXIT
step ruff check .
step ruff format --check .
step python scripts/prose.py
step python scripts/commit_subjects.py
step python -m pytest -q tests/test_tidy.py
echo "--- mypy"
wait "$mypy" || status=1
cat "$report"
exit $status
