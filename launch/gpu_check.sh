#!/usr/bin/env bash
# Builds the package with CUDA against the PyTorch that is installed, without network, and tests it on the GPU or
# measures it there. Each of the two takes less than 8 minutes; the build is kept for the second.
#
#   launch/gpu_check.sh correctness [PYTEST OPTIONS]   every reciprocal and root, the tests marked gpu, one under
#                                                      compute-sanitizer
#   launch/gpu_check.sh measure                        the step beside other packages, with and without the kernels of
#                                                      aligned blocks; offload; what bounds the kernel (Nsight Compute)
#
#   PYTHON    the interpreter (default: python3)
#   OUT       a folder for logs and results as JSON (default: a temporary one)
#   WHEELS    a folder of wheels of pytest-xdist, bitsandbytes, flashoptim, ... to be installed without network
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
out=${OUT:-$(mktemp -d)}
site=$PWD/build/gpu_check
mkdir -p "$out" "$site"

die() {
    echo "error: $*" >&2
    exit 1
}

what=${1:-}
case $what in
correctness | measure) shift ;;
*) die "got '$what', expected correctness or measure" ;;
esac

for module in torch numpy setuptools pytest; do # pybind11's headers come with PyTorch
    "$python" -c "import $module" 2>/dev/null ||
        die "$python has no $module; install it (pip install $module), which needs a network or a wheel"
done
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    die "PyTorch finds no CUDA device: $("$python" -c 'import torch; print(torch.__version__, torch.version.cuda)')"
PATH=$PATH:/usr/local/cuda/bin
command -v nvcc >/dev/null || [ -n "${CUDA_HOME:-}" ] || die "no nvcc on PATH; set CUDA_HOME"
command -v "${CXX:-c++}" >/dev/null || die "no C++ compiler on PATH"
"$python" -c 'import os, sysconfig, sys; sys.exit(not os.path.isfile(sysconfig.get_path("include") + "/Python.h"))' ||
    die "Python.h not found; install Python's headers"
if [ -z "${SHARDOPT_CUDA_ARCHS:-}" ]; then # that of this device alone: it builds in a fraction of the time
    SHARDOPT_CUDA_ARCHS=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
fi
export SHARDOPT_CUDA_ARCHS

declare -A result=()
order=()
failed=
note() { # NAME TEXT
    result[$1]=$2
    order+=("$1")
}

sources=$(find csrc shardopt setup.py pyproject.toml -type f ! -name '*.so' ! -path '*__pycache__*' -print0 | sort -z |
    xargs -0 cat | sha256sum | cut -c1-16)
if [ "$(cat "$site/.sources" 2>/dev/null)" = "$sources" ]; then
    note build "kept from before"
else
    begin=$SECONDS
    rm -rf "$site"
    SHARDOPT_CUDA=1 timeout 300 "$python" -m pip install --no-build-isolation --no-deps --no-index --upgrade \
        --target "$site" . >"$out/build.log" 2>&1 || { tail -40 "$out/build.log"; die "the build failed"; }
    echo "$sources" >"$site/.sources"
    note build "$((SECONDS - begin)) s for sm_$SHARDOPT_CUDA_ARCHS"
fi
if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install --no-index --no-deps --upgrade --target "$site" "$WHEELS"/*.whl >"$out/wheels.log" 2>&1 ||
        note wheels "not installed, see wheels.log"
fi
export PYTHONPATH=$site

# check NAME SECONDS LOG COMMAND...: notes how it ended; a failure does not stop the others.
check() {
    local name=$1 limit=$2 log=$out/$3 begin=$SECONDS status=0
    shift 3
    timeout "$limit" "$@" >"$log" 2>&1 || status=$?
    tail -25 "$log"
    case $status in
    0) note "$name" "passed in $((SECONDS - begin)) s: $(tail -1 "$log")" ;;
    124) note "$name" "NOT FINISHED in $limit s" && failed="$failed $name," ;;
    *) note "$name" "FAILED ($status), see $log" && failed="$failed $name," ;;
    esac
}

# Run in the tests' folder: the source tree must not hide what was built.
tests() { # NAME SECONDS LOG PYTEST OPTIONS
    local name=$1 limit=$2 log=$3
    shift 3
    cd tests
    check "$name" "$limit" "$log" ${runner[@]+"${runner[@]}"} "$python" -m pytest -c ../pyproject.toml \
        -p no:cacheprovider -q -m gpu "$@"
    cd ..
}

if [ "$what" = correctness ]; then
    tests "every reciprocal and root" 90 numbers.log gpu/test_quick_numbers.py
    workers=()
    if "$python" -c 'import xdist' 2>/dev/null; then workers=(-n 6); else note "pytest-xdist" "not installed: slower"; fi
    tests "tests" 200 tests.log gpu ${workers[@]+"${workers[@]}"} "$@"
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
    if [ -n "$sanitizer" ]; then
        runner=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --error-exitcode 86)
        tests "compute-sanitizer" 90 sanitizer.log gpu/test_cuda_equal.py \
            -k "test_weight_formats_and_cut_blocks and adam-log8-bf16"
        runner=()
    else
        note "compute-sanitizer" "NOT RUN: not installed"
    fi
else
    check "step" 240 step.log "$python" benchmarks/step_cuda.py --rounds "${ROUNDS:-50}" --json "$out/step_cuda.json"
    check "offload" 90 offload.log "$python" benchmarks/offload_cuda.py --json "$out/offload_cuda.json"
    if command -v ncu >/dev/null; then
        check "Nsight Compute" 90 ncu.log ncu --section SpeedOfLight --section WarpStateStats --launch-count 2 \
            --kernel-name regex:step_aligned "$python" benchmarks/step_cuda.py --rounds 1 --shapes one \
            --numel 100000000 --contenders "shardopt log8"
    else
        note "Nsight Compute" "NOT RUN: no ncu on PATH"
    fi
    for peer in bitsandbytes flashoptim; do
        "$python" -c "import $peer" 2>/dev/null || note "$peer" "NOT MEASURED: not installed"
    done
fi

lines=()
for name in "${order[@]}"; do lines+=("$name=${result[$name]}"); done
"$python" - "$out/$what.json" "${lines[@]}" <<'PYTHON'
import json
import sys

import torch

path, *lines = sys.argv[1:]
summary = {"device": f"{torch.cuda.get_device_name()}, torch {torch.__version__}"}
summary |= dict(line.split("=", 1) for line in lines)
with open(path, "w") as file:
    json.dump(summary, file, indent=2)
print()
for name, value in summary.items():
    print(f"{name:28}{value}")
PYTHON
echo "logs and results: $out"
if [ -n "$failed" ]; then die "failed:${failed%,}"; fi
