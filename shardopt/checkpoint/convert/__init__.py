"""Conversion of checkpoints between codecs and formats, without the model, in pieces."""

from shardopt.checkpoint.convert.conversion import FORMATS, Converted, convert

__all__ = ["FORMATS", "Converted", "convert"]
