# Sourced by quickstart.sh and test.sh, from the repository's root. Makes .venv, installs the package
# with an extra of pyproject.toml, and does neither again while nothing has changed.
#
#   use_torch X.Y.Z    before that, for an environment of its own with another PyTorch
#   setup_env EXTRA    then programs are in $venv/bin

pins=launch/requirements.txt
torch=$(sed -n 's/^torch==//p' "$pins")
venv="$PWD/.venv"

die() {
    echo "error: $*" >&2
    exit 1
}

# Runs a command without its output, which is shown if it fails.
quietly() {
    local log status=0
    log=$(mktemp)
    "$@" >"$log" 2>&1 || status=$?
    if [ "$status" -ne 0 ]; then cat "$log" >&2; fi
    rm -f "$log"
    return "$status"
}

# use_torch X.Y.Z: has setup_env make an environment of its own, with that PyTorch and otherwise the same pins.
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

check_compiler() {
    local candidate found=
    for candidate in ${CXX:-c++ g++ clang++}; do
        if command -v "$candidate" >/dev/null; then found=$candidate; fi
    done
    [ -n "$found" ] || die "no C++ compiler found (Debian and Ubuntu: apt install g++)"
    "$venv/bin/python" -c 'import os, sys, sysconfig
header = os.path.join(sysconfig.get_path("include"), "Python.h")
sys.exit(not os.path.isfile(header))' ||
        die "Python.h not found; install Python's headers (Debian and Ubuntu: apt install python3-dev)"
}

# Whether setup.py finds nvcc.
has_nvcc() {
    if [ -n "${CUDA_HOME:-}" ]; then [ -x "$CUDA_HOME/bin/nvcc" ]; else command -v nvcc >/dev/null; fi
}

install_torch() {
    if "$venv/bin/python" -c "import sys, importlib.metadata as m
sys.exit(m.version('torch').split('+')[0] != '$torch')" 2>/dev/null; then return; fi
    echo "installing torch $torch"
    # Without a GPU the CPU build will do, and is much smaller, where the package index has it.
    if ! nvidia-smi -L >/dev/null 2>&1; then
        "$venv/bin/pip" install -c "$requirements" "torch==$torch+cpu" >/dev/null 2>&1 && return
    fi
    quietly "$venv/bin/pip" install -c "$requirements" "torch==$torch" || die "pip could not install torch"
}

# A digest of the files below the given paths, of the Python, and of the build's environment.
digest_of() {
    "$venv/bin/python" - "$@" <<'PY'
import hashlib, os, pathlib, sys

digest = hashlib.sha256(sys.version.encode())
for name in ("CXX", "CXXFLAGS", "CUDA_HOME", "SHARDOPT_CUDA", "SHARDOPT_CUDA_ARCHS"):
    digest.update(f"{name}={os.environ.get(name)}\n".encode())
for top in map(pathlib.Path, sys.argv[1:]):
    for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so":
            digest.update(f"{path} {path.stat().st_size}\n".encode() + path.read_bytes())
print(digest.hexdigest())
PY
}

# once NAME DIGEST WHAT COMMAND...: runs the command unless it went well with the same digest before.
once() {
    local stamp="$venv/.done-$1" digest=$2
    shift 2
    if [ "$(cat "$stamp" 2>/dev/null)" = "$digest" ]; then return; fi
    echo "installing $1"
    shift
    rm -f "$stamp"
    quietly "$@" || die "this failed: $*"
    echo "$digest" >"$stamp"
}

setup_env() {
    local extra=$1 requirements="$venv/requirements.txt"
    # Without a GPU the PTX of one architecture is enough to see that the CUDA kernels compile, and tests/ptx runs it.
    if ! nvidia-smi -L >/dev/null 2>&1; then
        export SHARDOPT_CUDA_ARCHS=${SHARDOPT_CUDA_ARCHS:-90-virtual}
        if has_nvcc; then export SHARDOPT_CUDA=${SHARDOPT_CUDA:-1}; fi
    fi
    local sources=(setup.py pyproject.toml MANIFEST.in README.md csrc shardopt "$requirements")
    make_venv
    sed "s/^torch==.*/torch==$torch/" "$pins" >"$requirements"
    check_compiler
    install_torch
    # The kernels' objects are kept: tests/ptx links those of nvcc with an interpreter.
    local objects="$venv/objects" digest
    digest=$(digest_of "${sources[@]}")
    if [ "$(cat "$venv/.done-package" 2>/dev/null)" != "$digest" ]; then rm -rf "$objects"; fi
    once package "$digest" "shardopt" env SHARDOPT_KERNEL_OBJECTS="$objects" "$venv/bin/pip" install -c "$requirements" .
    once "$extra" "$(digest_of pyproject.toml "$requirements")" "what the extra '$extra' names" \
        "$venv/bin/pip" install -c "$requirements" "shardopt[$extra]"
}
