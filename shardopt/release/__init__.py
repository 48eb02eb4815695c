"""Gradient release: parameters stepped one by one during the backward pass, and steps beside the next forward pass."""
