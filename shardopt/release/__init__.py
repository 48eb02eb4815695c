"""Gradient release: steps each parameter during the backward pass, or overlaps the steps with the next forward pass."""
