#!/usr/bin/env bash
# From a machine with Python >= 3.10 and a C++ compiler to a trained model: 8-bit AdamW against
# 32-bit AdamW, sharded by FSDP2, resumed on other numbers of ranks and under FSDP1. Takes a few minutes on 2 cores.
#
#   launch/quickstart.sh [--output FOLDER]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env train
exec "$venv/bin/python" launch/quickstart.py "$@"
