"""Raises an ImportError that explains how to replace ``PortableFSDPStrategy``, which earlier versions had here."""

raise ImportError(
    "got an import of shardopt.clients.lightning, expected none: PortableFSDPStrategy was removed; take Lightning's "
    "FSDPStrategy, and call shardopt.checkpoint.save(path, trainer.strategy.model, trainer.optimizers[0]) in a callback"
)
