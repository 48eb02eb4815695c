#!/usr/bin/env python3
"""Trains a byte-level language model with a shardopt optimizer.

One process::

    python launch/train.py --backend single --config configs/quickstart.yaml

Several processes, one per GPU or all on the CPU::

    torchrun --nproc-per-node 2 launch/train.py --config configs/quickstart.yaml --optimizer adamw

``launch/multinode/`` has scripts for several machines. DeepSpeed is a backend like the others::

    torchrun --nproc-per-node 2 launch/train.py --backend deepspeed --deepspeed configs/zero2.json

Bad input ends the run with one line on stderr and exit code 2, the loss of another rank with exit code 3; torchrun adds
a report of its own and exits with 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lm import options, training
from lm.errors import RanksLost, UserError, leave, report


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job and returns the exit code."""
    try:
        training.run(options.load(sys.argv[1:] if argv is None else argv))
    except (UserError, RanksLost) as error:
        return report(error)
    return 0


if __name__ == "__main__":
    leave(main())
