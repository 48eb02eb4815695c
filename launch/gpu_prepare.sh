#!/usr/bin/env bash
# Makes what travels to a machine with a GPU and without a network, on one with a network and without a GPU: wheels and
# programs in build/gpu, which launch/gpu_first.sh installs there. Needs nvcc of the driver's CUDA or an older one.
#
#   launch/gpu_prepare.sh [PYTHON]
#
#   PYTHON      of the version that the other machine has, with its headers (default: python3.12); torch is not needed
#   ARCHS       of the GPU (default: 90)
#
# After a change only the files that it concerns are compiled: build/gpu_objects keeps the objects of the others.
set -euo pipefail
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/setup_env.sh"

python=$(cd "$OLDPWD" && command -v "${1:-python3.12}") && "$python" -c "" ||
    die "got '${1:-python3.12}', expected an interpreter; give the path of one"
[ -f "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
    die "$python has no headers; install them (apt install python3.12-dev)"
PATH=$PATH:/usr/local/cuda/bin
has_nvcc || die "no nvcc on PATH; set CUDA_HOME"
export SHARDOPT_CUDA=1 SHARDOPT_CUDA_ARCHS=${ARCHS:-90} SHARDOPT_KERNEL_OBJECTS=$PWD/build/gpu_objects
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
to=$PWD/build/gpu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$to" "$SHARDOPT_KERNEL_OBJECTS"
rm -f "$to"/shardopt*.whl

"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install -q setuptools wheel pybind11
# setup.py links objects without another look: those of changed sources, or with changed headers, go.
while read -r object; do
    source=csrc/${object##*/csrc/}
    source=${source%.o}
    if [ ! -f "$source" ]; then source=$source.cpp; fi
    headers=$("${CXX:-c++}" -x c++ -std=c++17 -DSHARDOPT_TARGET=any -I csrc -MM -MG "$source" | tr -d '\\\n' | cut -d: -f2)
    for file in setup.py $headers; do
        if [ -f "$file" ] && [ "$file" -nt "$object" ]; then rm -f "$object"; fi
    done
done < <(find "$SHARDOPT_KERNEL_OBJECTS" -name '*.o')
mkdir "$work/source" # without what other builds have left here
tar --exclude=./build --exclude='./.*' --exclude='*.so' -cf - . | tar -C "$work/source" -xf -
"$work/venv/bin/pip" wheel -q --no-build-isolation --no-deps --wheel-dir "$to" "$work/source"
nvcc -std=c++17 -O3 --fmad=false "-arch=sm_$SHARDOPT_CUDA_ARCHS" -I csrc -o "$to/quick_numbers" \
    benchmarks/gpu/quick_numbers.cu

fetch() { # FOLDER NAME VERSION, unless an earlier run has left it
    if compgen -G "$to/$2-$3-*.whl" >/dev/null; then return; fi
    "$work/venv/bin/pip" download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 -d "$1" "$2==$3"
}
fetch "$to" flashoptim 0.1.4
fetch "$to" torchao 0.18.0
mkdir "$work/whole"
fetch "$work/whole" bitsandbytes 0.50.2
"$python" - "$work/whole" "$to" <<'PYTHON'
"""Leaves the libraries of other CUDAs out."""
import sys
import zipfile
from pathlib import Path

folder, to = Path(sys.argv[1]), Path(sys.argv[2])
for source in folder.glob("*.whl"):
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(to / source.name, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            if not item.filename.endswith(".so") or "cuda130" in item.filename or "cpu" in item.filename:
                new.writestr(item, old.read(item), zipfile.ZIP_DEFLATED, 9)
PYTHON
ls -l "$to" | awk 'NR > 1 { printf "%6.2f MB  %s\n", $5 / 1e6, $9; sum += $5 } END { printf "%6.2f MB  to carry\n", sum / 1e6 }'
