"""Support for DeepSpeed, which no module here imports before the user does: names in its config, flat partitions."""
