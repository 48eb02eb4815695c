"""Small parts for frameworks that train with shardopt's optimizers; each imports its framework, and only that.

``import shardopt`` hooks ``names`` into transformers; ``names`` itself imports no framework.

docs/clients.md lists what works without these parts.
"""
