"""One optimizer step: checks the inputs, builds and caches the tables that the kernels read, and runs the kernels."""
