#!/usr/bin/env bash
# One training job on several machines by DeepSpeed's launcher, which needs ssh without passwords. Run this on one of
# them; the repository and the Python environment must be in the same place on all:
#
#   launch/multinode/deepspeed.sh [OPTIONS OF launch/train.py, with absolute paths]
#
# The machines stand in the file hostfile beside this script (or in HOSTFILE). Environment variables for all of them go
# into ~/.deepspeed_env, a line NAME=VALUE each (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
root=$PWD

# --- EDIT: the machines: hostfile, and ------------------------------------------------------------------------------
HOSTFILE=${HOSTFILE:-$root/launch/multinode/hostfile}
PORT=${PORT:-29500}   # free on the first machine of the hostfile
# Without a hostfile DeepSpeed would use this machine alone.
[ -f "$HOSTFILE" ] || { echo "deepspeed.sh: got no hostfile $HOSTFILE, expected one; edit HOSTFILE" >&2; exit 2; }
HOSTFILE=$(realpath "$HOSTFILE")

# --- EDIT: the job; its output folder must be one that all machines see ---------------------------------------------
job=("$root/launch/train.py" --config "$root/configs/small.yaml" --output "$root/runs/small" --resume auto
    --backend deepspeed --deepspeed "$root/configs/zero2.json")

# DeepSpeed has the other machines import from the folder that it is run in: not from the package's source.
cd launch
exec "${DEEPSPEED:-deepspeed}" --hostfile "$HOSTFILE" --master_port "$PORT" "${job[@]}" "$@"
