"""The step of Muon: momentum, Newton-Schulz iterations on whole matrices in waves that limit memory, and the update."""
