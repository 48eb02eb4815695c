"""ms-swift's plugin: ``--external_plugins`` and a file with ``import shardopt.clients.swift``, ``--optimizer``.

ms-swift parses its command line before it imports plugins, so ``--optim`` cannot know shardopt's names.
"""

from __future__ import annotations

from typing import Any

from swift.optimizers import OptimizerCallback, optimizers_map
from transformers.training_args import OptimizerNames

from shardopt.clients.names import NAMES, register


class Named(OptimizerCallback):  # type: ignore[misc]
    """Makes the optimizer of shardopt that ``--optimizer`` names, with the options in ``--optim_args``."""

    def create_optimizer(self, model: Any = None) -> Any:
        """Makes the optimizer after copying ``--optimizer`` to ``optim``, where ms-swift and Trainer look it up."""
        self.args.optim = OptimizerNames(self.args.optimizer)
        return super().create_optimizer(model)


register()
optimizers_map.update(dict.fromkeys(NAMES, Named))
