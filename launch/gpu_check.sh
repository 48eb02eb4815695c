#!/usr/bin/env bash
# Builds the package with CUDA against the PyTorch that is installed, without network, then tests, measures and profiles
# it on the GPU. Each part ends within 10 minutes; a later part uses what an earlier one built.
#
#   launch/gpu_check.sh build                     into build/gpu_check, for this GPU alone; kept until a source changes
#   launch/gpu_check.sh tests [PYTEST OPTIONS]    every reciprocal and root, then the tests marked gpu
#   launch/gpu_check.sh sanitizer                 compute-sanitizer on small steps: memory, then races
#   launch/gpu_check.sh bench                     the step beside other packages; offload
#   launch/gpu_check.sh profile                   what bounds the step's kernel, by Nsight Compute
#   launch/gpu_check.sh all                       one after the other
#
#   PYTHON    the interpreter (default: python3)
#   OUT       a folder for logs and each part's results (default: a temporary one)
#   WHEELS    a folder of wheels to be installed beside the package: pytest-xdist, bitsandbytes, flashoptim
#   LIMIT     seconds that a part may take (default: 570)
#
# A part fails if anything in it fails, does not finish, or is left out: a skipped test, a missing tool.
set -euo pipefail
self=$(realpath "${BASH_SOURCE[0]}")
source "$(dirname "$self")/setup_env.sh"
absolute() { case $1 in /*) echo "$1" ;; *) echo "$OLDPWD/$1" ;; esac }

python=$(cd "$OLDPWD" && command -v "${PYTHON:-python3}") || die "got PYTHON=${PYTHON:-python3}, expected an interpreter"
python=$(absolute "$python")
out=$(absolute "${OUT:-$(mktemp -d)}")
wheels=${WHEELS:+$(absolute "$WHEELS")}
budget=${LIMIT:-570}
mkdir -p "$out"
site=$PWD/build/gpu_check

part=${1:-}
case $part in
build | tests | sanitizer | bench | profile) shift ;;
all)
    failed=
    for part in build tests sanitizer bench profile; do
        PYTHON=$python OUT=$out WHEELS=$wheels "$self" "$part" || failed="$failed $part"
        if [ "$failed" = " build" ]; then break; fi
    done
    if [ -n "$failed" ]; then die "failed parts:$failed"; fi
    exit
    ;;
*) die "got '$part', expected build, tests, sanitizer, bench, profile or all" ;;
esac

"$python" -m pip --version >/dev/null 2>&1 || die "$python has no pip; install it (python -m ensurepip)"
for module in torch numpy setuptools pytest; do # pybind11's headers come with PyTorch
    "$python" -c "import $module" 2>/dev/null ||
        die "$python has no $module; install it (pip install $module), which needs a network or a wheel"
done
PATH=$PATH:/usr/local/cuda/bin
device=$(
    "$python" - <<'PYTHON'
import sys

import torch

if not torch.cuda.is_available():
    sys.exit(f"error: PyTorch {torch.__version__} finds no CUDA device")
print("%d%d" % torch.cuda.get_device_capability(), f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
PYTHON
)
export SHARDOPT_CUDA_ARCHS=${SHARDOPT_CUDA_ARCHS:-${device%% *}} # of this device alone: a fraction of the time
device=${device#* }
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version,memory.used,memory.total,clocks.sm --format=csv,noheader || true
fi

failed=
results=$out/$part.txt
echo "device                      $device" >"$results"
note() { # NAME TEXT
    printf '%-28s%s\n' "$1" "$2" >>"$results"
}
flaw() { # NAME TEXT
    note "$1" "$2"
    failed="$failed $1,"
}

# check NAME SECONDS LOG COMMAND...: notes how it ended; a failure does not stop the others.
check() {
    local name=$1 limit=$2 log=$out/$3 begin=$SECONDS status=0
    shift 3
    if [ "$limit" -gt $((budget - SECONDS)) ]; then limit=$((budget - SECONDS)); fi
    if [ "$limit" -le 0 ]; then
        flaw "$name" "NOT RUN: no time left"
        return
    fi
    timeout "$limit" "$@" >"$log" 2>&1 || status=$?
    tail -25 "$log"
    case $status in
    0) note "$name" "passed in $((SECONDS - begin)) s" ;;
    124) flaw "$name" "NOT FINISHED in $limit s, see $log" ;;
    *) flaw "$name" "FAILED ($status), see $log" ;;
    esac
    return 0
}

# Notes the lines of a log that say what was left out, though the command ended well.
left_out() { # NAME LOG PATTERN [PATTERN OF LINES THAT DO NOT COUNT]
    local line
    while IFS= read -r line; do
        flaw "$1" "LEFT OUT: $line"
    done < <(grep -E "$3" "$out/$2" | grep -vE "${4:-^$}" | sort -u)
}

# Run in the tests' folder: the source tree must not hide what was built.
tests() { # NAME SECONDS LOG PYTEST OPTIONS
    local name=$1 limit=$2 log=$3
    shift 3
    cd tests
    check "$name" "$limit" "$log" ${runner[@]+"${runner[@]}"} "$python" -m pytest -c ../pyproject.toml \
        -p no:cacheprovider -q -m gpu "$@"
    cd ..
    left_out "$name" "$log" "^SKIPPED" "needs two CUDA devices"
}

sources=$SHARDOPT_CUDA_ARCHS-$(digest_of csrc shardopt setup.py pyproject.toml)
if [ "$part" != build ]; then
    [ -f "$site/.sources" ] || die "nothing is built; run launch/gpu_check.sh build first"
    [ "$(cat "$site/.sources")" = "$sources" ] ||
        die "the build is of other sources or of another GPU; run launch/gpu_check.sh build again"
fi
export PYTHONPATH=$site

case $part in
build)
    has_nvcc || die "no nvcc on PATH; set CUDA_HOME"
    check_compiler "$python"
    if [ "$(cat "$site/.sources" 2>/dev/null)" = "$sources" ]; then
        note build "kept from before"
    else
        rm -rf "$site"
        check build 540 build.log env SHARDOPT_CUDA=1 "$python" -m pip install --no-build-isolation --no-deps \
            --no-index --target "$site" .
    fi
    if [ -z "$failed" ] && [ -n "$wheels" ]; then
        check wheels 60 wheels.log "$python" -m pip install --no-index --no-deps --upgrade --target "$site" "$wheels"/*.whl
    fi
    if [ -z "$failed" ]; then
        check import 60 import.log env -C "$site" "$python" -c \
            'import sys; from shardopt import _C; sys.exit(not _C.cuda_device_count())'
    fi
    if [ -z "$failed" ]; then echo "$sources" >"$site/.sources"; fi
    ;;
tests)
    tests "every reciprocal and root" 120 numbers.log gpu/test_quick_numbers.py
    some=()
    if "$python" -c 'import xdist' 2>/dev/null; then
        some=(-n "$(($(nproc) < 16 ? ($(nproc) + 1) / 2 : 8))")
    else # one process takes too long for all codecs
        some=(-k "log8 or not (equal_the_cpu or overflow or graph_replays or cut_blocks or any_length)")
        flaw "tests" "LEFT OUT: most codecs, as pytest-xdist is not installed; put its wheel into WHEELS"
    fi
    tests "tests" 460 tests.log gpu --deselect gpu/test_quick_numbers.py "${some[@]}" "$@"
    ;;
sanitizer)
    sanitizer=$(command -v compute-sanitizer) || die "no compute-sanitizer on PATH"
    for tool in memcheck racecheck; do
        runner=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" --error-exitcode 86)
        tests "$tool" 260 "$tool.log" gpu/test_cuda_equal.py \
            -k "test_weight_formats_and_cut_blocks and adam-log8-bf16 or test_equal_the_cpu and adamw-log8-bf16"
    done
    ;;
bench)
    check step 330 step.log "$python" benchmarks/step_cuda.py --rounds "${ROUNDS:-50}" --json "$out"
    left_out step step.log "^left out"
    check offload 230 offload.log "$python" benchmarks/offload_cuda.py --json "$out"
    ;;
profile)
    command -v ncu >/dev/null || die "no ncu on PATH"
    check ncu 500 ncu.log ncu --clock-control none --section SpeedOfLight --section WarpStateStats --section LaunchStats \
        --kernel-name regex:step_usual_tasks --launch-skip 1 --launch-count 2 \
        "$python" benchmarks/step_cuda.py --rounds 1 --shapes one --numel 100000000 --contenders "shardopt log8"
    grep -q "step_usual_tasks.*Context" "$out/ncu.log" || flaw ncu "LEFT OUT: no launch of step_usual_tasks was profiled"
    left_out ncu ncu.log "No kernels were profiled|==ERROR=="
    ;;
esac

cat "$results"
echo "logs and results: $out"
if [ -n "$failed" ]; then die "$part failed:${failed%,}"; fi
