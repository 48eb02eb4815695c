"""A real model with the parameters that an estimate is made for, and what its gradients take."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import shardopt
from ranks.offload import before_steps
from shardopt.estimate import Model, model_of_config
from shardopt.estimate.model import Shape
from shardopt.layout import shard_of

#: 1.2 million parameters: rows with short last blocks, biases and norms.
SMALL = {
    "model_type": "qwen2",
    "hidden_size": 160,
    "intermediate_size": 416,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1001,
}
#: Changes of :data:`SMALL`: ends within rows, rows that no number of ranks divides, and parameters of fewer rows than
#: there are ranks.
MODELS: dict[str, dict[str, Any]] = {
    "even": {},
    "odd": {
        "hidden_size": 99,
        "intermediate_size": 131,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 33,
        "vocab_size": 1003,
        "model_type": "qwen3",
        "attention_bias": True,
    },
    "stable embedding": {"stable_embedding": True, "vocab_size": 1003, "hidden_size": 132},
    "few rows": {"model_type": "mixtral", "num_local_experts": 2, "num_hidden_layers": 1},
}


def small_model(*, stable_embedding: bool = False, **changes: object) -> Model:
    """Estimate of :data:`SMALL`."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({**SMALL, **changes}))
        return model_of_config(path, stable_embedding=stable_embedding)


class Holder(nn.Module):
    """Parameters without a purpose."""

    def __init__(self, shapes: list[Shape]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full(shape, 0.5)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return sum((weight.float().square().mean() for weight in self.weights), x)


class Embedded(nn.Module):
    """A StableEmbedding without a purpose."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = shardopt.StableEmbedding(*shape)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.embedding.weight, self.embedding.norm.weight, self.embedding.norm.bias)
        return sum((weight.float().square().mean() for weight in weights), x)


class Shaped(nn.Module):
    """The parameters of a model, in the same order; every unit but the first is a submodule in ``layers``."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        shapes = [parameter.shape for parameter in model.parameters]
        units = [parameter.unit for parameter in model.parameters]
        begin = units.index(1)
        end = len(units) - units[::-1].index(max(units))
        embedding = [Embedded(shapes[0])] if model.parameters[0].float32_state else []
        self.first = nn.Sequential(*embedding, Holder(shapes[3 * len(embedding) : begin]))
        self.layers = nn.ModuleList(
            Holder([shape for shape, unit in zip(shapes, units, strict=True) if unit == number])
            for number in range(1, max(units) + 1)
        )
        self.last = Holder(shapes[end:])
        assert [tuple(param.shape) for param in self.parameters()] == shapes

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.first, *self.layers, self.last):
            x = part(x)
        return x


@contextmanager
def most_gradient_bytes(params: list[nn.Parameter], hold: int = 0) -> Iterator[Callable[[], int]]:
    """Inside, gives the most bytes that the memory of gradients took at once.

    Args:
        params: whose gradients.
        hold: each step of a released gradient waits until so many are there, its own included, or no more can come.
    """
    nbytes = [0]  # after each gradient that came
    seen: list[tuple[StorageWeakRef, int]] = []

    def complete(param: nn.Parameter) -> None:
        storage = shard_of(param).local(param.grad).untyped_storage()
        seen.append((StorageWeakRef(storage), storage.nbytes()))
        nbytes.append(sum({ref.cdata: size for ref, size in seen if not ref.expired()}.values()))

    taken = count()

    def wait(_: int) -> None:
        enough = min(next(taken) + hold, len(params)) if hold else 0
        end = time.monotonic() + 30
        while len(nbytes) <= enough:
            assert time.monotonic() < end, f"{len(nbytes) - 1} gradients came, expected {enough}"
            time.sleep(0.001)

    hooks = [param.register_post_accumulate_grad_hook(complete) for param in params]
    try:
        with before_steps(wait):
            yield lambda: max(nbytes)
    finally:
        for hook in hooks:
            hook.remove()
