"""Gradient reduction that sums micro-batches in a fixed order: the same bits on any number of ranks.

docs/gradients.md defines the order of the sum, and says what each wire format costs.
"""

from shardopt.comm.ordered import ordered_gradients as ordered_gradients
