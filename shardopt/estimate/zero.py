"""Where DeepSpeed's ZeRO has weights, gradients, masters and staging buffers while the optimizer steps.

Elements with padding: N of the model, n of a rank's partition, s of the partition's largest sub-group. With ``w`` bytes
of a weight and ``m`` of what the optimizer steps:

===============  ========  ==================================  ===============================
ZeRO, offload    weights   masters                             gradients
===============  ========  ==================================  ===============================
1, 2             w N       m n, or the weights if m = w        m n
1, 2, optimizer  w N       *m n*, and *w n* staging if m > w   *m n*
3                w n       m n, or the weights if m = w        w n, and m s
3, optimizer     w n       *m n*                               *w n*, and *m n* if m > w
3, all           *w n*     *m n*, or the weights if m = w      *w n*, and *m n* if m > w
===============  ========  ==================================  ===============================

Figures between asterisks are of the host's memory. Masters that DeepSpeed holds twice count once, as
``shardopt/sharding/deepspeed/masters.py`` shares them. For a step without offload gradients are flattened, which makes
a view of a single tensor: if m = w, a partition within one parameter keeps the whole parameter's gradient alive (ZeRO 1
and 2), and a sub-group of one parameter takes no further memory (ZeRO 3).
"""

from __future__ import annotations

import math
from collections import Counter

from shardopt.estimate.backends import Held
from shardopt.report import MemoryReport

#: Parts that DeepSpeed itself keeps in the host's memory: nothing, ``offload_optimizer``, ``offload_param`` too.
ZERO_OFFLOADS = ("none", "optimizer", "all")


def check(backend: str, stage: int, zero_offload: str, dtype: str, offload: str | None) -> None:
    """Refuses what does not go together.

    Args:
        backend: its name.
        stage: of ZeRO; 0 if the backend is none of DeepSpeed's.
        zero_offload: one of ``ZERO_OFFLOADS``.
        dtype: of the weights.
        offload: the optimizer's option of this name.

    Raises:
        ValueError: says what.
    """
    if stage == 0:
        if zero_offload != "none":
            raise ValueError(
                f"zero_offload: got {zero_offload!r} with {backend}, expected a backend of DeepSpeed's; use offload"
            )
        return
    if zero_offload == "all" and stage < 3:
        raise ValueError(
            f"zero_offload: got 'all' with {backend}, which moves no parameters, expected 'optimizer', or zero3"
        )
    if offload is not None:
        raise ValueError(
            f"offload: got {offload!r} with {backend}, which the estimate does not know, expected zero_offload"
        )
    if dtype == "float16":
        raise ValueError(
            f"dtype: got 'float16' with {backend}, which the estimate does not know, expected 'bfloat16' or 'float32'"
        )


def add_partitions(
    report: MemoryReport, held: Held, stage: int, offload: str, weight_bytes: int, master_bytes: int
) -> None:
    """Adds all but the optimizer's state.

    Args:
        report: the rank's.
        held: what the rank has.
        stage: of ZeRO, 1 to 3.
        offload: one of ``ZERO_OFFLOADS``.
        weight_bytes: of an element of the weights.
        master_bytes: of an element of what the optimizer steps.
    """
    weights_use = report.host if offload == "all" else report.device
    masters_use = report.device if offload == "none" else report.host
    copied = master_bytes != weight_bytes  # otherwise one memory serves for both wherever both are on one side
    partition = held.gradients
    weights_use.parameters += held.weights * weight_bytes
    if copied or weights_use is not masters_use:
        masters_use.master_weights += partition * master_bytes
    if stage == 3:
        masters_use.gradients += partition * weight_bytes
        if offload != "none":
            masters_use.gradients += partition * master_bytes if copied else 0
        else:
            parameters = Counter(held.buffer_of)
            flattened = [size for place, size in enumerate(held.buffers) if copied or parameters[place] > 1]
            masters_use.gradients += master_bytes * max(flattened, default=0)
    elif offload != "none":
        masters_use.gradients += partition * master_bytes
        masters_use.offload_buffers += partition * weight_bytes if copied else 0
    else:
        within = [shard for shard in held.shards if shard.local_shape == (partition,) and not copied]
        masters_use.gradients += master_bytes * max([partition, *(math.prod(shard.global_shape) for shard in within)])
