"""State of quantize_state in portable checkpoints."""
