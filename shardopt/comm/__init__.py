"""Gradient reduction that sums micro-batches in a fixed order: the same bits on any number of ranks.

Call ``shardopt.comm.ordered_gradients(model, micro_batches=...)`` once, after wrapping the model.
``docs/gradients.md`` defines the order of the sum, and says what each wire format costs.
"""

from shardopt.comm.ordered import ordered_gradients

__all__ = ["ordered_gradients"]
