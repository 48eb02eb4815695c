"""Optimizer state: options, the spec of a tensor's state, conversion from and to floats, and where it lives."""
