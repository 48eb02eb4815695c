#!/usr/bin/env bash
# Installs the package with its test tools into .venv, then lints, type-checks and tests it.
#
#   launch/test.sh [--all] [--coverage] [--torch X.Y.Z] [PYTEST OPTIONS]
#
#   Of pytest's options, -n 0 runs all tests in one process, as --pdb needs.
#
#   --all      also the tests marked slow, such as the CUDA kernels' PTX for all architectures, and with a GPU those
#              marked gpu
#   --coverage prints which share of shardopt's lines the tests run, per room, and writes build/coverage/html
#   --torch    tests with this version of PyTorch, in .venv-torch-X.Y.Z; lints and types belong to the pinned one. Takes
#              several GB where the package index has no CPU build of it
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

options=()
pinned=1
coverage=
while [ $# -gt 0 ]; do
    case $1 in
    --all)
        markers="not gpu"
        if has_gpu; then markers=; fi
        options+=(-m "$markers")
        ;;
    --coverage) coverage=1 ;;
    --torch)
        pinned=
        use_torch "${2:-}"
        shift
        ;;
    *) options+=("$1") ;;
    esac
    shift
done

# Leaves the kernels' PTX as text in nvcc's objects, where tests/ptx finds it.
export NVCC_APPEND_FLAGS="${NVCC_APPEND_FLAGS:+$NVCC_APPEND_FLAGS }--no-compress"
setup_env test
if ! has_nvcc; then
    echo "no nvcc: the CUDA kernels are not tested (tests/ptx)"
fi
unclean=
if [ -n "$pinned" ]; then
    "$venv/bin/ruff" check . || unclean=1
    "$venv/bin/ruff" format --check . || unclean=1
    "$venv/bin/mypy" || unclean=1
    MYPYPATH=launch "$venv/bin/mypy" --explicit-package-bases launch/lm launch/train.py launch/quickstart.py || unclean=1
else
    "$venv/bin/python" -c 'import sys, torch; print("testing with PyTorch", torch.__version__, "on Python", sys.version)'
fi
# Not "python -m pytest", which would import the source tree in place of what was installed.
# Two processes: most tests keep one core busy. The tests of a file stay together, with what they share, and files come
# in their order: by numbers of tests, those with few that take minutes would come last, and one process would wait.
test=("$venv/bin/pytest")
if [ -n "$coverage" ]; then
    export COVERAGE_FILE="$PWD/build/coverage/data"
    rm -rf build/coverage
    mkdir -p build/coverage
    test=("$venv/bin/coverage" run "$venv/bin/pytest")
fi
failed=0
"${test[@]}" -n 2 --dist loadfile --no-loadscope-reorder ${options[@]+"${options[@]}"} || failed=$?
if [ -n "$coverage" ]; then
    "$venv/bin/coverage" combine -q
    "$venv/bin/coverage" html -q -i -d build/coverage/html  # -i: code that a compiler made has no file
    for room in shardopt/*/ shardopt; do
        share=$("$venv/bin/coverage" report -i --format=total --precision=1 --include="$room*" 2>/dev/null) || continue
        printf '%-24s%5s%% of the lines ran\n' "$room" "$share"
    done
fi
if [ "$failed" -ne 0 ]; then exit "$failed"; fi
if [ -n "$unclean" ]; then die "the tests passed, but ruff or mypy found something: see above"; fi
