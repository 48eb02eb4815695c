"""The step: compiled kernels and their calling, and the pure-PyTorch reference that they must equal bit for bit."""
