# Sourced by the scripts of this folder: goes to the repository's root and defines their common functions.
#
#   use_torch X.Y.Z    before setup_env, for an environment of its own with another PyTorch
#   setup_env EXTRA    makes .venv, installs the package with an extra of pyproject.toml, and does neither again while
#                      nothing has changed; then programs are in $venv/bin
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pins=launch/requirements.txt
torch=$(sed -n 's/^torch==//p' "$pins")
venv="$PWD/.venv"

die() {
    echo "error: $*" >&2
    exit 1
}

has_gpu() { nvidia-smi -L >/dev/null 2>&1; }

has_nvcc() { if [ -n "${CUDA_HOME:-}" ]; then [ -x "$CUDA_HOME/bin/nvcc" ]; else command -v nvcc >/dev/null; fi; }

# Runs a command without its output, which is shown if it fails.
quietly() {
    local log status=0
    log=$(mktemp)
    "$@" >"$log" 2>&1 || status=$?
    if [ "$status" -ne 0 ]; then cat "$log" >&2; fi
    rm -f "$log"
    return "$status"
}

use_torch() {
    [[ $1 =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || die "--torch: got '$1', expected a version such as $torch"
    torch=$1
    venv="$PWD/.venv-torch-$1"
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python >= 3.10 found on PATH"
}

make_venv() {
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then return; fi
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python has no venv module; install it (Debian and Ubuntu: apt install python3-venv)"
    echo "making $venv with $("$python" --version)"
    rm -rf "$venv"
    quietly "$python" -m venv "$venv" || die "$python could not make $venv"
}

check_compiler() { # PYTHON
    command -v "${CXX:-c++}" >/dev/null || die "no C++ compiler found (Debian and Ubuntu: apt install g++)"
    "$1" -c 'import os, sysconfig, sys; sys.exit(not os.path.isfile(sysconfig.get_path("include") + "/Python.h"))' ||
        die "Python.h not found; install Python's headers (Debian and Ubuntu: apt install python3-dev)"
}

install_torch() {
    if "$venv/bin/python" -c "import sys, importlib.metadata as m
sys.exit(m.version('torch').split('+')[0] != '$torch')" 2>/dev/null; then return; fi
    echo "installing torch $torch"
    # Without a GPU the CPU build will do, and is much smaller, where the package index has it.
    if ! has_gpu; then
        "$venv/bin/pip" install -c "$requirements" "torch==$torch+cpu" >/dev/null 2>&1 && return
    fi
    quietly "$venv/bin/pip" install -c "$requirements" "torch==$torch" || die "pip could not install torch"
}

# A digest of the files at the given paths.
digest_of() {
    find "$@" -type f ! -name '*.so' ! -path '*__pycache__*' -print0 | sort -z | xargs -0 sha256sum | sha256sum
}

# once NAME DIGEST WHAT COMMAND...: runs the command unless it went well with the same digest before.
once() {
    local stamp="$venv/.done-$1" digest=$2 what=$3
    shift 3
    if [ "$(cat "$stamp" 2>/dev/null)" = "$digest" ]; then return; fi
    echo "installing $what"
    rm -f "$stamp"
    quietly "$@" || die "this failed: $*"
    echo "$digest" >"$stamp"
}

setup_env() {
    local extra=$1 requirements="$venv/requirements.txt" objects="$venv/objects" settings sources
    # Without a GPU the PTX of one architecture is enough to see that the CUDA kernels compile, and tests/ptx runs it.
    if ! has_gpu; then
        export SHARDOPT_CUDA_ARCHS=${SHARDOPT_CUDA_ARCHS:-90-virtual}
        if has_nvcc; then export SHARDOPT_CUDA=${SHARDOPT_CUDA:-1}; fi
    fi
    make_venv
    sed "s/^torch==.*/torch==$torch/" "$pins" >"$requirements"
    check_compiler "$venv/bin/python"
    install_torch
    # The kernels' objects are kept while no source of theirs changes; tests/ptx links those of nvcc with an interpreter.
    settings=$(env | grep -E '^(CXX|CXXFLAGS|CUDA_HOME|SHARDOPT_CUDA|SHARDOPT_CUDA_ARCHS)=' | sort || true)
    sources=$(digest_of setup.py csrc "$requirements")$settings
    if [ "$(cat "$objects/sources" 2>/dev/null)" != "$sources" ]; then rm -rf "$objects" "$venv/.done-package"; fi
    once package "$(digest_of setup.py pyproject.toml MANIFEST.in README.md csrc shardopt "$requirements")$settings" \
        "shardopt" env SHARDOPT_KERNEL_OBJECTS="$objects" "$venv/bin/pip" install -c "$requirements" .
    echo "$sources" >"$objects/sources"
    once "$extra" "$(digest_of pyproject.toml "$requirements")" "what the extra '$extra' names" \
        "$venv/bin/pip" install -c "$requirements" "shardopt[$extra]"
}
