"""Accelerate, and with it Hugging Face's Trainer: an optimizer of ours stays where DeepSpeed offloads the optimizer.

Otherwise DeepSpeedCPUAdam, in 32 bits, takes its place, unless the DeepSpeed config says
``"zero_force_ds_cpu_optimizer": false``. One function is hooked; if another version of Accelerate has it elsewhere, the
engine of DeepSpeed refuses what comes in our optimizer's place.
"""

from __future__ import annotations

import functools
from typing import Any

from shardopt.optim import ShardedOptimizer


def install(module: Any) -> None:
    """Hooks into ``accelerate.accelerator``, which has the function only where DeepSpeed is installed."""
    replace = getattr(module, "map_pytorch_optim_to_deepspeed", None)
    if replace is None:
        return

    @functools.wraps(replace)
    def map_pytorch_optim_to_deepspeed(optimizer: Any) -> Any:
        return optimizer if isinstance(optimizer, ShardedOptimizer) else replace(optimizer)

    module.map_pytorch_optim_to_deepspeed = map_pytorch_optim_to_deepspeed
