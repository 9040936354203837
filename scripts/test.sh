#!/usr/bin/env bash
# Checks, then the quick tests, then the tests on real vLLM; every stage runs, one exit code. The
# longest tests run beside the others, because most tests keep only one core busy; what they print
# comes last; what looks for traces of processes that it killed must not run beside others that
# kill. Arguments go to pytest; with them one stage follows the other.
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

quick=(python -m pytest -m "not vllm and not gpu" --durations=5)
vllm=(python -m pytest -m "vllm and not gpu" --durations=10)
longest=(
    tests/vllm/test_kinds.py
    tests/vllm/test_soak.py
    tests/vllm/test_custom_policy.py
    tests/vllm/test_geometry.py
    tests/vllm/test_families.py
    tests/vllm/test_sick_disk.py
    tests/bench/test_bench_serve.py
)

show_longest() {
    local code=0
    wait "$beside" || code=$?
    cat "$log"
    return $code
}

start=$SECONDS
if [ $# -gt 0 ]; then
    stage quick "${quick[@]}" "$@"
    stage vllm "${vllm[@]}" "$@"
else
    stage checks bash scripts/check.sh
    log=$(mktemp)
    "${vllm[@]}" "${longest[@]}" >"$log" 2>&1 &
    beside=$!
    trap 'kill "$beside" 2>/dev/null; rm -f "$log"' EXIT
    stage quick "${quick[@]}"
    stage vllm "${vllm[@]}" "${longest[@]/#/--ignore=}"
    stage longest show_longest
fi

echo "=== summary ($((SECONDS - start)) s)"
for name in checks quick vllm longest; do
    [ -n "${result[$name]:-}" ] && echo "$name: ${result[$name]}"
done
exit $status
