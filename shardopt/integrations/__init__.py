"""What shardopt knows of each way of sharding. Importing this package registers them with the layout layer.

torch.distributed.tensor is not imported before somebody has made a DTensor: it would take more than half a second.
"""

from __future__ import annotations

import sys

from torch import Tensor

from shardopt.layout import Shard, register


def _resolve_dtensor(param: Tensor) -> Shard | None:
    module = sys.modules.get("torch.distributed.tensor")  # without it no tensor is a DTensor
    if module is None or not isinstance(param, module.DTensor):
        return None
    from shardopt.integrations.dtensor import shard_of_dtensor

    return shard_of_dtensor(param)


register(_resolve_dtensor)
