#!/usr/bin/env python3
"""One training job on the machines of a Ray cluster by Ray Train (pip install 'ray[train]'), a worker per GPU.

From the repository, which must be in the same place on all machines::

    python launch/multinode/ray_train.py [OPTIONS OF launch/train.py, with absolute paths]

The machines are those of ``ray start``, or this machine alone. A worker that is lost ends the others, and all of them
start again from the last checkpoint.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

ROOT = Path(__file__).resolve().parents[2]

# --- EDIT: the machines ----------------------------------------------------------------------------------------------
RANKS = 16  # of all machines together
GPUS = True  # False: on CPUs, by --device cpu
MAX_RESTARTS = 3

# --- EDIT: the job; its output folder must be one that all machines see ---------------------------------------------
JOB = ["--config", str(ROOT / "configs" / "small.yaml"), "--output", str(ROOT / "runs" / "small"), "--resume", "auto"]


def work(config: dict[str, list[str]]) -> None:
    """Runs the job as one rank of the process group that Ray Train has made."""
    sys.path.insert(0, str(ROOT / "launch"))
    import train

    code = train.main(config["options"])
    if code:
        raise RuntimeError(f"launch/train.py: got exit code {code}, expected 0: see the line on stderr")


def main(options: list[str], ranks: int = RANKS, *, gpus: bool = GPUS) -> None:
    """Starts the job on a Ray cluster, and waits for its end."""
    TorchTrainer(
        work,
        train_loop_config={"options": [*JOB, *options]},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=ranks, use_gpu=gpus),
        run_config=RunConfig(name="shardopt", failure_config=FailureConfig(max_failures=MAX_RESTARTS)),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1:])
