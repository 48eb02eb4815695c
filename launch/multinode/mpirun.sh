#!/usr/bin/env bash
# One training job on several machines by Open MPI's mpirun, which needs ssh without passwords. Run this on one of them;
# the repository and the Python environment (with mpi4py: pip install 'shardopt[mpi]') must be in the same place on all:
#
#   launch/multinode/mpirun.sh [OPTIONS OF launch/train.py]
#
# The machines stand in the file hostfile beside this script (or in HOSTFILE). MPI only says who is who: the ranks then
# talk by NCCL or gloo.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# --- EDIT: the machines: hostfile, and ------------------------------------------------------------------------------
HOSTFILE=${HOSTFILE:-launch/multinode/hostfile}
RANKS=${RANKS:-16}    # of all machines together
mpi=(-x PATH -x OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}")
# mpi+=(-x GLOO_SOCKET_IFNAME=eth0 -x NCCL_SOCKET_IFNAME=eth0)   # where a machine's name does not lead to its network

# --- EDIT: the job; its output folder must be one that all machines see ---------------------------------------------
job=(launch/train.py --config configs/small.yaml --resume auto)

exec "${MPIRUN:-mpirun}" --hostfile "$HOSTFILE" -np "$RANKS" --bind-to none "${mpi[@]}" \
    "${PYTHON:-python}" "${job[@]}" "$@"
