#!/usr/bin/env bash
# Installs the package with its documentation tools into .venv, and builds the site into build/site; a warning is an error.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env docs
"$venv/bin/mkdocs" build --strict "$@"
