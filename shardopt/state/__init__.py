"""Optimizer state: options, the description of a tensor's state, conversion from and to floats, and where it lives."""
