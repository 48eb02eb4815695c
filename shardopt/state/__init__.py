"""Optimizer state: options, which entries it has, conversion from and to floats, and the device that it is on."""
