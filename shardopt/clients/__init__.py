"""Small parts for frameworks that train with shardopt's optimizers; each imports its framework, and only that.

docs/clients.md says what works without them.
"""
