"""What shardopt knows of each way of sharding. Importing this package registers them with the layout layer."""

from shardopt.integrations import dtensor as dtensor
