#!/usr/bin/env bash
# ./run test: the checks, then the tests, even if the checks fail; one exit code for both.
#
#   test.sh                      all tests except those marked `thorough`
#   test.sh --all                everything
#   test.sh PYTEST ARGUMENTS     the selected tests, in one process, without the checks
#
# With KVTIERS_TEST_VLLM or KVTIERS_TEST_RUNNER=v2 the first two run only tests that depend on vLLM
# (tests/combinations.py). ./run sets these variables for --vllm and --runner. --all adds vLLM's own
# tests (tests/upstream) and the combinations in KVTIERS_TEST_COMBINATIONS as further stages.
#
# Tests run in as many processes as there are processors, or fewer if memory is short
# (KVTIERS_TEST_WORKERS sets the number). The tests of a file run in one process, and the longest
# files come first (tests/order.py). tests/test_tidy.py is one of the checks.
#
# A whole run ends with a table of the tests that ran, by vLLM version and runner, and with a line for
# each requirement of tests that this machine lacks, such as a C compiler (tests/results.py). To keep
# the files behind this table, set KVTIERS_TEST_RESULTS to a folder.
set -uo pipefail
trap 'exit 130' INT  # pytest handles Ctrl-C itself, and the next stage would begin

everything=
if [ "${1:-}" = --all ]; then everything=1; shift; fi
# An engine with its ranks takes up to 3 GiB.
workers=$(nproc)
read -r quota period 2>/dev/null </sys/fs/cgroup/cpu.max || quota=max
if [[ $quota =~ ^[0-9]+$ ]] && [ $(((quota + period - 1) / period)) -lt "$workers" ]; then
    workers=$(((quota + period - 1) / period))  # a container's share of the processors
fi
free=$(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo 2>/dev/null)
most=$(cat /sys/fs/cgroup/memory.max 2>/dev/null)
for bytes in "${free:+$((free * 1024))}" "$most"; do
    [[ $bytes =~ ^[0-9]+$ ]] || continue  # not known, or "max"
    [ $((bytes / (3 << 30))) -ge "$workers" ] || workers=$((bytes / (3 << 30)))
done
[ "$workers" -ge 1 ] || workers=1
workers=${KVTIERS_TEST_WORKERS:-$workers}
selected=(-m "not gpu and not thorough")
if [ -n "$everything" ]; then
    selected=(-m "not gpu")
    export KVTIERS_ORACLE_SEEDS=4 KVTIERS_SHARED_SEEDS=2 KVTIERS_SIM_SEEDS=400
    export KVTIERS_NTH=7 KVTIERS_KILLS=6 KVTIERS_POWER_CUTS=8 KVTIERS_LMDB_KILLS=50
    : "${KVTIERS_TEST_COMBINATIONS=0.32/v2 0.33/v1 0.33/v2}"
fi

version=${KVTIERS_TEST_VLLM:-0.32}
runner=${KVTIERS_TEST_RUNNER:-v1}
combination=
[ "$version $runner" = "0.32 v1" ] || combination=1

start=$SECONDS
status=0
names=()
declare -A result
stage() {
    local name=$1 code=0 began=$SECONDS
    shift
    echo "=== $name"
    "$@" || code=$?
    names+=("$name")
    result[$name]="passed"
    if [ $code != 0 ]; then result[$name]="FAILED (exit code $code)"; status=1; fi
    result[$name]+=" in $((SECONDS - began)) s"
}

# Without a network, neither another version nor vLLM's own tests can be downloaded. That is not a
# failure; the summary shows it.
not_run() {
    names+=("$1")
    result[$1]="NOT RUN: no package index answered"
}

combination_stage() {
    local version=${1%/*} runner=${1#*/} code=0
    local name="vLLM $version, runner $runner"
    ./run setup --vllm "$version" || code=$?
    if [ $code = 3 ]; then not_run "$name"; return; fi
    stage "$name" ./run test --vllm "$version" --runner "$runner"
}

upstream_stage() {
    local name="vLLM's own tests" code=0
    python -m tests.upstream --fetch || code=$?
    if [ $code = 3 ]; then not_run "$name"; return; fi
    stage "$name" env KVTIERS_TEST_WORKERS="$workers" python -m tests.upstream
}

if [ $# -gt 0 ]; then
    exec python -m pytest -m "not gpu" --durations=5 "$@"
fi
parallel=(-n "$workers" --dist loadfile --no-loadscope-reorder -p tests.results)
part=${KVTIERS_TEST_PART:-}
if [ -z "${KVTIERS_TEST_RESULTS:-}" ]; then
    KVTIERS_TEST_RESULTS=$(mktemp -d)
    trap 'rm -rf "$KVTIERS_TEST_RESULTS"' EXIT
fi
export KVTIERS_TEST_RESULTS KVTIERS_TEST_PART=1
if [ -n "$combination" ]; then
    chosen=$(python -m tests.combinations "$version" "$runner") || exit 1
    mapfile -t chosen <<<"$chosen"
    stage "vLLM $version, runner $runner" python -m pytest -m "not gpu and not thorough" -rs \
        --durations=8 "${parallel[@]}" "${chosen[@]}"
    [ "$runner" = v2 ] || upstream_stage  # these tests start no model runner
else
    stage checks bash scripts/check.sh
    stage tests python -m pytest "${selected[@]}" -rs --durations=15 \
        --ignore=tests/test_tidy.py "${parallel[@]}"
    [ -z "$everything" ] || upstream_stage
    for each in ${KVTIERS_TEST_COMBINATIONS:-}; do
        unset KVTIERS_ORACLE_SEEDS KVTIERS_SHARED_SEEDS KVTIERS_SIM_SEEDS
        unset KVTIERS_NTH KVTIERS_KILLS KVTIERS_POWER_CUTS KVTIERS_LMDB_KILLS
        combination_stage "$each"
    done
fi

echo "=== summary ($((SECONDS - start)) s)"
for name in "${names[@]}"; do echo "$name: ${result[$name]}"; done
[ -n "$part" ] || python -m tests.combinations --table "$KVTIERS_TEST_RESULTS"
exit $status
