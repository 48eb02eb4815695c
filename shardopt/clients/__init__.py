"""Adapters for training frameworks: a module per framework, which imports that framework.

The exception is ``names``, which imports none: ``import shardopt`` hooks it into transformers when that is imported.

docs/clients.md lists what works without an adapter.
"""
