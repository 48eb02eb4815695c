"""Descriptions of models for the estimate: each parameter's shape, and which parameters FSDP gathers together."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import Embedding, Module

from shardopt.layout import keeps_float32_state
from shardopt.state.options import MAX_BLOCK_SIZE

Shape = tuple[int, ...]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MATRIX: Shape = (4096, MAX_BLOCK_SIZE)  # a multiple of every block size
_MATRICES_PER_LAYER = 12  # four of attention, and eight times as much in the feed-forward part
_MAX_SIZE = 10**13
#: The numbered layer in the name of a parameter: "model.layers.3" in "model.layers.3.mlp.weight".
_LAYER_NAME = re.compile(r"((?:.*?\.)?\d+)\.")


class ParameterShape(NamedTuple):
    """The facts about one parameter on which memory depends.

    Attributes:
        shape: its shape before sharding.
        unit: number or name of the FSDP unit with which it is gathered: usually its layer.
        float32_state: whether its moments stay in float32, as for the weight of a StableEmbedding.
    """

    shape: Shape
    unit: int | str
    float32_state: bool = False


@dataclass(frozen=True)
class Model:
    """A model's parameters, without their values.

    Attributes:
        name: the name in the table's heading: a size such as "7B", or transformers' type of model.
        parameters: its parameters; one that several modules share is listed once.
        note: assumptions about the model that the user should know.
        embeddings: shapes that count as stepped by AdamW under Muon: of embeddings, and so of output layers like them.
    """

    name: str
    parameters: tuple[ParameterShape, ...]
    note: str = ""
    embeddings: frozenset[Shape] = frozenset()

    @cached_property
    def numel(self) -> int:
        """The total number of elements of all parameters."""
        return sum(math.prod(parameter.shape) for parameter in self.parameters)

    @classmethod
    def of(cls, name: str, module: Module) -> Model:
        """Describes a module, also one on the meta device. Each numbered layer is an FSDP unit, and the rest is one."""
        parameters = []
        for key, param in module.named_parameters():
            layer = _LAYER_NAME.match(key)
            unit = layer[1] if layer else ""
            parameters.append(ParameterShape(tuple(param.shape), unit, keeps_float32_state(param)))
        embeddings = {tuple(child.weight.shape) for child in module.modules() if isinstance(child, Embedding)}
        return cls(name, tuple(parameters), embeddings=frozenset(embeddings))

    @classmethod
    def of_config(cls, path: str | Path) -> Model:
        """Describes the model that transformers builds from a config.json, on the meta device.

        Raises:
            ModuleNotFoundError: transformers is not installed.
            OSError: there is no such file.
            ValueError: the file is not the config of a causal language model that transformers knows.
        """
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"got --config without the package {error.name}, expected transformers; pip install "
                "transformers, or give the number of parameters instead, such as 7B"
            ) from None
        if not Path(path).exists():
            raise FileNotFoundError(f"{path}: there is no such file, expected a config.json downloaded from the Hub")
        try:
            config = AutoConfig.from_pretrained(path)
            with torch.device("meta"):
                return cls.of(config.model_type, AutoModelForCausalLM.from_config(config))
        except (ValueError, OSError) as error:  # of several pages
            raise ValueError(f"{path}: got {str(error).splitlines()[0]:.150}, expected a causal LM's config") from None

    @classmethod
    def of_size(cls, text: str) -> Model:
        """Describes a model of which only the size is known: as large matrices, without rows shorter than a block.

        ``text`` is the number of parameters, such as "125M", "7B", "1.3e9". Raises ValueError if it is no number, or
        below 4096 or above 10T.
        """
        match = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE]\+?\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
        size = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
        rows, width = _MATRIX
        if not width <= size <= _MAX_SIZE:
            raise ValueError(
                f"size: got {text!r}, expected a number of parameters from {width} to 10T, such as 125M, 7B or 1.3e9"
            )
        full, rest = divmod(round(size / width), rows)
        shapes = [_MATRIX] * full + ([(rest, width)] if rest else [])
        parameters = tuple(ParameterShape(shape, index // _MATRICES_PER_LAYER) for index, shape in enumerate(shapes))
        return cls(
            text,
            parameters,
            f"Of the model only the size is known: taken as {rows} x {width} matrices, {_MATRICES_PER_LAYER} to a "
            "layer. Biases, norms, short rows and large embeddings count with --config.",
        )
