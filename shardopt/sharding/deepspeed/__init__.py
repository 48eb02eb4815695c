"""Support for DeepSpeed: optimizers by name in its config, and which parameters its flat partitions contain.

No module here imports DeepSpeed before the user does.
"""
