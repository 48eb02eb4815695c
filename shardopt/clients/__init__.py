"""Small parts for frameworks that train with shardopt's optimizers; each imports its framework, and only that.

``names`` imports none: ``import shardopt`` has it hooked into transformers.

docs/clients.md says what works without them.
"""
