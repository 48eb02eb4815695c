"""A model and its optimizer in one file of the safetensors format."""

from shardopt.checkpoint.foreign.single_file import load_safetensors, save_safetensors

__all__ = ["load_safetensors", "save_safetensors"]
