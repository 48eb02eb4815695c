"""DeepSpeed: shardopt's optimizers as config types, and the parameters that its flat partitions are made of.

Nothing here imports DeepSpeed before the user does.
"""
