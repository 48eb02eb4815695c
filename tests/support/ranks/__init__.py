"""What the distributed tests stand on: a pool of ranks, layouts to shard parameters by, and snapshots to compare."""
