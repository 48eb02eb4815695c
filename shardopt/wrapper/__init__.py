"""Any torch optimizer with its state in 8 bits: a step decodes, steps and encodes one parameter at a time."""

from shardopt.wrapper.optimizer import QuantizedState, quantize_state

__all__ = ["QuantizedState", "quantize_state"]
