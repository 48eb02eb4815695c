"""axolotl's plugin: ``plugins: [shardopt.clients.axolotl.Names]`` and ``optimizer: shardopt_adamw_8bit``."""

from __future__ import annotations

from axolotl.integrations.base import BasePlugin

from shardopt import register


class Names(BasePlugin):  # type: ignore[misc]
    """A plugin that registers shardopt's optimizers for ``optimizer:``, in each process that axolotl starts."""

    def __init__(self) -> None:
        super().__init__()
        register()
