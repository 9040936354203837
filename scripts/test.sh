#!/usr/bin/env bash
# Checks, then the quick tests, then the tests on real vLLM; every stage runs, one exit code.
# Arguments go to pytest.
set -uo pipefail

declare -A result
status=0

stage() {
    local name=$1 code=0
    shift
    echo "=== $name"
    "$@" || code=$?
    # 5: nothing was selected, which happens when the arguments name single tests
    case $code in
        0) result[$name]=passed ;;
        5) result[$name]="nothing selected" ;;
        *) result[$name]="FAILED (exit code $code)"; status=1 ;;
    esac
}

start=$SECONDS
[ $# -eq 0 ] && stage checks bash scripts/check.sh
stage quick python -m pytest -m "not vllm and not gpu" --durations=5 "$@"
stage vllm python -m pytest -m "vllm and not gpu" --durations=10 "$@"

echo "=== summary ($((SECONDS - start)) s)"
for name in checks quick vllm; do
    [ -n "${result[$name]:-}" ] && echo "$name: ${result[$name]}"
done
exit $status
