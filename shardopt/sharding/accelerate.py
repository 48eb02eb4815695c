"""Hook into Accelerate, and so Hugging Face's Trainer: shardopt's optimizers stay if DeepSpeed offloads the optimizer.

Without the hook DeepSpeedCPUAdam, in 32 bits, replaces them, unless the DeepSpeed config says
``"zero_force_ds_cpu_optimizer": false``. One function is hooked; if another version of Accelerate has it elsewhere,
DeepSpeed's engine, which is hooked, too, refuses the replacement.
"""

from __future__ import annotations

import functools
from typing import Any

from shardopt.optim import ShardedOptimizer


def install(module: Any) -> None:
    """Hooks into ``accelerate.accelerator``, which has the function only if DeepSpeed is installed."""
    replace = getattr(module, "map_pytorch_optim_to_deepspeed", None)
    if replace is None:
        return

    @functools.wraps(replace)
    def map_pytorch_optim_to_deepspeed(optimizer: Any) -> Any:
        return optimizer if isinstance(optimizer, ShardedOptimizer) else replace(optimizer)

    module.map_pytorch_optim_to_deepspeed = map_pytorch_optim_to_deepspeed
