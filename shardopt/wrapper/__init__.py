"""Any torch optimizer with its state in 8 bits: the optimizer steps chunks of parameters, decoded for the moment."""

from shardopt.wrapper.optimizer import QuantizedState, quantize_state

__all__ = ["QuantizedState", "quantize_state"]
