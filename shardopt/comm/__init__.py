"""Gradient reduction that sums micro-batches in a fixed order (docs/gradients.md): same bits on any number of ranks."""

from shardopt.comm.ordered import ordered_gradients as ordered_gradients
