#!/usr/bin/env bash
# Builds the package with CUDA against the PyTorch that is installed, without network, tests it on the GPU and measures
# the step. Takes less than 8 minutes; fails if a test fails, but measures even so.
#
#   launch/gpu_check.sh [PYTEST OPTIONS]
#
#   PYTHON    the interpreter (default: python3)
#   OUT       a folder for logs and results as JSON (default: a temporary one)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
out=${OUT:-$(mktemp -d)}
site=$(mktemp -d)
mkdir -p "$out"

die() {
    echo "error: $*" >&2
    exit 1
}

for module in torch numpy setuptools pytest; do # pybind11's headers come with PyTorch
    "$python" -c "import $module" 2>/dev/null ||
        die "$python has no $module; install it (pip install $module), which needs a network or a wheel"
done
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    die "PyTorch finds no CUDA device: $("$python" -c 'import torch; print(torch.__version__, torch.version.cuda)')"
PATH=$PATH:/usr/local/cuda/bin
command -v nvcc >/dev/null || [ -n "${CUDA_HOME:-}" ] || die "no nvcc on PATH; set CUDA_HOME"
if [ -z "${SHARDOPT_CUDA_ARCHS:-}" ]; then # that of this device alone: it builds in a fraction of the time
    SHARDOPT_CUDA_ARCHS=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
fi
export SHARDOPT_CUDA_ARCHS

begin=$SECONDS
SHARDOPT_CUDA=1 timeout 190 "$python" -m pip install --no-build-isolation --no-deps --no-index --upgrade \
    --target "$site" . >"$out/build.log" 2>&1 || { tail -40 "$out/build.log"; die "the build failed"; }
built=$((SECONDS - begin))
export PYTHONPATH=$site

# Run in the tests' folder: the source tree must not hide what was built.
failed=
begin=$SECONDS
run_tests() { (cd tests && timeout 140 "$python" -m pytest -c ../pyproject.toml -p no:cacheprovider -q -m gpu "$@"); }
run_tests gpu "$@" 2>&1 | tee "$out/tests.log" || failed="tests"
tested=$((SECONDS - begin))

sanitized="not installed"
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
if [ -n "$sanitizer" ]; then
    sanitized="clean"
    # Whole, short, unaligned and cut blocks of the usual combination.
    (cd tests && PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 60 "$sanitizer" --error-exitcode 86 "$python" -m pytest \
        -c ../pyproject.toml -p no:cacheprovider -q -m gpu gpu/test_cuda_equal.py \
        -k "test_weight_formats_and_cut_blocks and adam-log8-bf16 or test_unaligned_storage and log8") \
        >"$out/sanitizer.log" 2>&1 || sanitized="FAILED ($?), see $out/sanitizer.log"
    case $sanitized in
    *"(124)"*) sanitized="not finished in time" ;;
    FAILED*) failed="$failed compute-sanitizer" ;;
    esac
fi

measured=ok
timeout 80 "$python" benchmarks/step_cuda.py --rounds "${ROUNDS:-50}" --json "$out/step_cuda.json" 2>&1 |
    tee "$out/benchmark.log" || measured="FAILED, see $out/benchmark.log"
timeout 60 "$python" benchmarks/offload_cuda.py --json "$out/offload_cuda.json" 2>&1 |
    tee "$out/offload.log" || measured="FAILED, see $out/offload.log"

"$python" - "$out/gpu_check.json" "$SHARDOPT_CUDA_ARCHS" "$built" "$tested" "$(tail -1 "$out/tests.log")" "$sanitized" \
    "$measured" "$out" <<'PYTHON'
import json
import sys

import torch

path, archs, built, tested, tests, sanitizer, benchmark, files = sys.argv[1:]
summary = {
    "device": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
    "build": f"{built} s for sm_{archs}",
    "tests": f"{tested} s: {tests}",
    "compute-sanitizer": sanitizer,
    "benchmark": benchmark,
    "files": files,
}
with open(path, "w") as file:
    json.dump(summary, file, indent=2)
print()
for name, value in summary.items():
    print(f"{name:20}{value}")
PYTHON
if [ -n "$failed" ]; then die "failed: $failed"; fi
