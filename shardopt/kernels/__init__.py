"""Launches the compiled kernels of the optimizer step, and has the float32 arithmetic of its PyTorch reference."""
