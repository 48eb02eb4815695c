#!/usr/bin/env bash
# Installs the package with its test tools into .venv, then lints, type-checks and tests it.
#
#   launch/test.sh [--all] [PYTEST OPTIONS]
#
#   --all    also the tests marked slow, and with a GPU those marked gpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup_env.sh

options=()
for argument in "$@"; do
    if [ "$argument" = --all ]; then
        markers="not gpu"
        if nvidia-smi -L >/dev/null 2>&1; then markers=; fi
        options+=(-m "$markers")
    else
        options+=("$argument")
    fi
done

setup_env test
unclean=
"$venv/bin/ruff" check . || unclean=1
"$venv/bin/ruff" format --check . || unclean=1
"$venv/bin/mypy" || unclean=1
MYPYPATH=launch "$venv/bin/mypy" --explicit-package-bases launch/lm launch/train.py launch/quickstart.py || unclean=1
# Not "python -m pytest", which would import the source tree in place of what was installed.
"$venv/bin/pytest" ${options[@]+"${options[@]}"}
if [ -n "$unclean" ]; then die "the tests passed, but ruff or mypy found something: see above"; fi
