"""Threads of the CPU's steps: as many as PyTorch uses, which torchrun sets to one."""

from __future__ import annotations

import os
from functools import cache

import torch

from shardopt.state.warn import warn_user


@cache  # once in a process
def warn_of_one_thread(ranks: int) -> None:
    """Warns if the CPU steps in one thread though this rank's share of the cores is larger.

    Args:
        ranks: of this host.
    """
    share = _cores() // ranks
    if torch.get_num_threads() == 1 and share > 1:
        warn_user(
            f"offload='step': got 1 thread for the CPU's steps, expected up to {share}, this rank's share of the "
            f"cores. torchrun sets OMP_NUM_THREADS=1 where it is not set: set it, or call "
            f"torch.set_num_threads({share}) before the first step, and leave some cores to data loaders",
            RuntimeWarning,
        )


def _cores() -> int:
    """The number of cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
