"""DeepSpeed: shardopt's optimizers as config types, and the contents of DeepSpeed's flat partitions.

No module here imports DeepSpeed before the user does.
"""
