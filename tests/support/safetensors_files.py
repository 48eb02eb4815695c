"""Safetensors files: of runs and back by conversion, and as the library writes and reads them."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from torch import Tensor, nn

from shardopt import checkpoint
from shardopt.checkpoint.convert import convert
from shardopt.optim import ShardedOptimizer

library = pytest.importorskip("safetensors", reason="safetensors is not installed: pip install 'shardopt[safetensors]'")

#: Options that say how state is stored; dequantized files have none of them.
STORAGE = ("codec", "block_size", "min_quantized_numel", "master_weight_bits")


def save_file(path: Path, model: nn.Module, optimizer: ShardedOptimizer, **options: Any) -> None:
    """Saves a run, and converts it to a file."""
    with TemporaryDirectory() as folder:
        checkpoint.save(folder, model, optimizer)
        convert(folder, path, "safetensors", **options)


def load_file(path: Path, model: nn.Module, optimizer: ShardedOptimizer, **options: Any) -> None:
    """Converts a file, and loads the result."""
    with TemporaryDirectory() as folder:
        convert(path, Path(folder) / "converted", **options)
        checkpoint.load(Path(folder) / "converted", model, optimizer)


def save_by_library(path: Path, model: nn.Module, optimizer: ShardedOptimizer, *, dequantize: bool = False) -> None:
    """Writes a file by the library: tensors in another order, values unchecked, float32 moments if `dequantize`."""
    from safetensors.torch import save_file as save

    names = {param: name for name, param in model.named_parameters()}
    state_dict = optimizer.state_dict(dequantize=dequantize)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    tensors = {f"model.{name}": value for name, value in model.state_dict(keep_vars=True).items()}
    tensors = {f"model.{names.get(value, key[6:])}": value.detach() for key, value in tensors.items()}  # once if shared
    for index, entries in state_dict["state"].items():
        tensors |= {f"optimizer.{names[params[index]]}.{entry}": value for entry, value in entries.items()}
    left_out = ("params", "param_names", *(STORAGE if dequantize else ()))
    groups = [
        {
            "parameters": [names[param] for param in group["params"]],
            "options": {key: value for key, value in group.items() if key not in left_out},
        }
        for group in optimizer.param_groups
    ]
    header = {"format_version": 1, "dequantized": dequantize, "param_groups": groups}
    metadata = {"format": "pt", "shardopt": json.dumps({**header, "optimizer": type(optimizer).__name__})}
    save({name: value.contiguous() for name, value in reversed(tensors.items())}, path, metadata)


def content(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, sorted by name, and the header that shardopt reads, as the library reads both."""
    with library.safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        return tensors, json.loads(file.metadata()["shardopt"])
