"""ms-swift's plugin: a file with ``import shardopt.clients.swift``, by ``--external_plugins``, for ``--optimizer``.

ms-swift reads its command line before it imports plugins, so that ``--optim`` does not know the names yet.
"""

from __future__ import annotations

from typing import Any

from swift.optimizers import OptimizerCallback, optimizers_map
from transformers.training_args import OptimizerNames

from shardopt.clients.names import NAMES, register


class Named(OptimizerCallback):  # type: ignore[misc]
    """Makes the optimizer that ``--optimizer`` names; ``--optim_args`` has its options."""

    def create_optimizer(self, model: Any = None) -> Any:
        self.args.optim = OptimizerNames(self.args.optimizer)
        return super().create_optimizer(model)


register()
optimizers_map.update(dict.fromkeys(NAMES, Named))
