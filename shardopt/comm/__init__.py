"""Gradients summed in the order of micro-batches: the same bits on any number of ranks.

One call after the model is wrapped: ``shardopt.comm.ordered_gradients(model, micro_batches=...)``.
``docs/gradients.md`` has the definition, and what each wire format costs.
"""

from shardopt.comm.ordered import ordered_gradients

__all__ = ["ordered_gradients"]
