"""State from and for other packages: import of their state dicts, and single files in the safetensors format."""

from shardopt.checkpoint.foreign.importing import import_state
from shardopt.checkpoint.foreign.report import ImportReport, Outcome
from shardopt.checkpoint.foreign.single_file import load_safetensors, save_safetensors

__all__ = ["ImportReport", "Outcome", "import_state", "load_safetensors", "save_safetensors"]
