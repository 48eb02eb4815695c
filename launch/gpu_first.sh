#!/usr/bin/env bash
# What a GPU shows in a quarter of an hour, in one command of 490 s, with what launch/gpu_prepare.sh made in build/gpu:
#
#   launch/gpu_first.sh                      all sections, the most valuable first
#   launch/gpu_first.sh --only SECTION ...   some of them: after a mend
#   launch/gpu_first.sh --fake               the flow on the CPU
#
#   PYTHON    the interpreter, with PyTorch (default: python3)
#   OUT       a folder for first.json, which is complete at every moment, and first.log (default: a temporary one)
set -euo pipefail
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
export PATH=$PATH:/usr/local/cuda/bin PYTHONUNBUFFERED=1 PYTHONPATH=$root/benchmarks${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-python3}" "$root/benchmarks/gpu/first.py" "$@"
