"""Wraps a torch optimizer and keeps its state in 8 bits: a step dequantizes, updates and requantizes per parameter."""

from shardopt.wrapper.optimizer import QuantizedState, quantize_state

__all__ = ["QuantizedState", "quantize_state"]
