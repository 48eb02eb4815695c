#!/usr/bin/env bash
# One training job on several machines by torchrun. Run this on every one of them, in any order, from the repository:
#
#   launch/multinode/torchrun.sh [OPTIONS OF launch/train.py]
#
# A rank that dies is started again from the last checkpoint, up to MAX_RESTARTS times, on all machines together.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# --- EDIT: the machines ------------------------------------------------------------------------------------------
NODES=${NODES:-2}                     # how many machines; 1:2 goes on with one where the other is lost
RANKS_PER_NODE=${RANKS_PER_NODE:-8}   # one per GPU
FIRST_NODE=${FIRST_NODE:-node1}       # the name of one of them, which all can reach
PORT=${PORT:-29400}                   # a free port there
MAX_RESTARTS=${MAX_RESTARTS:-3}
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0   # where a machine's name does not lead to its network

# --- EDIT: the job; its output folder must be one that all machines see ---------------------------------------------
job=(launch/train.py --config configs/small.yaml --resume auto)

# torchrun would keep its store over restarts, and in it the addresses of ranks that are gone.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec "${TORCHRUN:-torchrun}" --nnodes "$NODES" --nproc-per-node "$RANKS_PER_NODE" --max-restarts "$MAX_RESTARTS" \
    --rdzv-backend c10d --rdzv-endpoint "$FIRST_NODE:$PORT" --rdzv-id "${JOB_ID:-shardopt}" "${job[@]}" "$@"
