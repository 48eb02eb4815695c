"""Gradients summed in the order of micro-batches: one set of bits on any number of ranks, however the model is wrapped."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardopt
from message_problem import assert_same_bits
from ordered_problem import (
    MICRO_BATCHES,
    WAYS,
    backward,
    can_replace_reduce_scatter,
    gradients,
    make_model,
    needs_custom_reduce_scatter,
    wanted_gradients,
    weights,
)
from ranks.pool import Pool, RankFailure
from shardopt.comm.wire import WIRES


def cases() -> list[tuple[str, int]]:
    """Ways to wrap a model and numbers of ranks."""
    found = [("plain", 1), ("hsdp", 4), ("hsdp of 3", 6), ("hsdp of 1", 1), ("hsdp of 1", 2)]
    found += [(way, ranks) for way in ("ddp", "fsdp") for ranks in (1, 2, 3, 4)]
    found += [(way, 2) for way in ("ddp views", "ddp unused", "fsdp kept")]
    return [case for case in found if can_replace_reduce_scatter or not needs_custom_reduce_scatter(case[0])]


def ordered(way: str, wire: str = "fp32") -> nn.Module:
    model = WAYS[way](make_model())
    shardopt.comm.ordered_gradients(model, micro_batches=MICRO_BATCHES, wire=wire)  # type: ignore[arg-type]
    return model


def assert_same(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        if tensor is None or wanted[name] is None:
            assert tensor is wanted[name], name
        else:
            assert_same_bits(tensor, wanted[name])


def _sums(way: str, wire: str) -> None:
    model = ordered(way, wire)
    for step in range(3):  # DDP arranges its buckets anew after the first pass
        backward(model, step)
        assert_same(gradients(model), wanted_gradients(wire, step))  # type: ignore[arg-type]
        model.zero_grad()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("way", "world_size"), cases())
def test_gradients_are_as_defined(ranks: Pool, way: str, world_size: int, wire: str) -> None:
    ranks.run(world_size, _sums, way, wire)
