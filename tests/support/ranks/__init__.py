"""Helpers of the distributed tests: a pool of ranks, layouts to shard parameters by, and snapshots to compare."""
