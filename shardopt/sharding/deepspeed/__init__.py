"""Support for DeepSpeed, which no module here imports first: optimizers by name, and what flat partitions contain."""
