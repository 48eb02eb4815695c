"""The parameters of a model: their shapes and what is sharded together."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from shardopt.state.options import MAX_BLOCK_SIZE

Shape = tuple[int, ...]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MATRIX: Shape = (4096, MAX_BLOCK_SIZE)  # a multiple of every block size
_MATRICES_PER_LAYER = 12  # four of attention, and eight times as much in the feed-forward part
_LARGEST = 10**13


class Form(NamedTuple):
    """Shape of a parameter, and whether options apply to its state.

    Attributes:
        shape: the parameter's global shape.
        float32_state: whether the moments stay float32, as those of a StableEmbedding.
    """

    shape: Shape
    float32_state: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class ParameterShape(NamedTuple):
    """One parameter.

    Attributes:
        shape: its global shape.
        unit: the number, from 0, of the FSDP unit that it belongs to: usually its layer.
        float32_state: whether its moments stay float32, as those of a StableEmbedding.
    """

    shape: Shape
    unit: int
    float32_state: bool = False

    @property
    def form(self) -> Form:
        return Form(self.shape, self.float32_state)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Model:
    """A model as its optimizer sees it.

    Attributes:
        name: what the user calls it.
        parameters: in the optimizer's order.
        note: what had to be assumed.
        embeddings: the shapes of its input and output embeddings.
    """

    name: str
    parameters: tuple[ParameterShape, ...]
    note: str = ""
    embeddings: frozenset[Shape] = frozenset()

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(parameter.numel for parameter in self.parameters)

    @cached_property
    def units(self) -> tuple[tuple[Form, ...], ...]:
        """The parameters of each unit."""
        units: list[list[Form]] = [[] for _ in range(max(self.unit_of) + 1)]
        for parameter in self.parameters:
            units[parameter.unit].append(parameter.form)
        return tuple(tuple(forms) for forms in units)

    @cached_property
    def unit_of(self) -> tuple[int, ...]:
        """The unit of each parameter."""
        return tuple(parameter.unit for parameter in self.parameters)

    def with_stable_embedding(self) -> Model:
        """The model with a StableEmbedding instead of the token embedding, which is its first parameter."""
        embedding, *others = self.parameters
        norm = ParameterShape(embedding.shape[1:], embedding.unit)
        return replace(self, parameters=(embedding._replace(float32_state=True), norm, norm, *others))

    @classmethod
    def of_layers(
        cls, name: str, first: Sequence[Shape], layers: Iterable[Sequence[Shape]], last: Sequence[Shape]
    ) -> Model:
        """A model of layers, which are units, and of what comes before and after them, which is a unit together."""
        in_layers = [(shape, number) for number, layer in enumerate(layers, 1) for shape in layer]
        placed = [*((s, 0) for s in first), *in_layers, *((s, 0) for s in last)]
        parameters = tuple(ParameterShape(shape, unit) for shape, unit in placed)
        return cls(name, parameters, embeddings=frozenset(shape for shape in (*first, *last) if len(shape) > 1))

    @classmethod
    def of_size(cls, text: str) -> Model:
        """A model of which only the number of parameters is known: large matrices whose rows are whole blocks.

        Args:
            text: such as "125M", "7B", "1.3e9".

        Raises:
            ValueError: it is no such number.
        """
        match = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE]\+?\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
        size = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
        rows, width = _MATRIX
        if not width <= size <= _LARGEST:
            raise ValueError(
                f"size: got {text!r}, expected a number of parameters from {width} to 10T, such as 125M, 7B or 1.3e9"
            )
        full, rest = divmod(round(size / width), rows)
        shapes = [_MATRIX] * full + ([(rest, width)] if rest else [])
        parameters = tuple(ParameterShape(shape, place // _MATRICES_PER_LAYER) for place, shape in enumerate(shapes))
        return cls(
            text,
            parameters,
            f"Of the model only the size is known: taken as {rows} x {width} matrices, {_MATRICES_PER_LAYER} to a "
            "layer. Biases, norms, short rows and large embeddings count with --config.",
        )
