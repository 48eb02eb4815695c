"""State of flat shards and buffers, as under FSDP1 and ZeRO: that of whole parameters, wherever ranges are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from helpers import RULES
from ranks.layouts import Shape, values
from ranks.snapshot import assert_same
from ranks.threads import ThreadExchange, on_threads
from shardopt.layout import BlockGrid, FlatBuffer, FlatShard, Segment, assign
from shardopt.state.tensor_state import TensorState
from test_blocks import block_numbers, shards_of, splits

#: Rows long enough to be quantized.
matrices = st.one_of(
    st.tuples(st.integers(1, 5), st.integers(32, 150)),
    st.tuples(st.integers(1, 4), st.integers(4, 9), st.integers(8, 17)),
)


def state_of_part(state: dict[str, Tensor], shard: FlatShard, grid: BlockGrid) -> dict[str, Tensor]:
    """The part of a whole parameter's state that a flat shard has."""
    first, end = shard.blocks(grid)
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if key == "step":
            found[key] = value
        elif key.endswith("_scales"):
            found[key] = value.flatten(0, 1)[first:end]
        else:
            found[key] = value.flatten()[shard.start : shard.end]
    return found


@settings(deadline=None, max_examples=25)
@given(drawn=splits(matrices), seed=st.integers(0, 1000))
@pytest.mark.parametrize(
    ("rule", "codec", "rounds"), [("adamw", "log8", 2), ("adamw", "dynamic8", 1), ("lion", "companded8", 1)]
)
def test_steps_as_whole(rule: str, codec: str, rounds: int, drawn: tuple[Shape, int, list[int]], seed: int) -> None:
    """Every split takes the steps of the whole, bit for bit; ranks whose range is empty take part."""
    shape, block_size, ends = drawn
    options: dict[str, Any] = {"codec": codec, "block_size": block_size, "min_quantized_numel": 0}
    whole = Parameter(values(shape, seed))
    start = whole.detach().clone().flatten()
    gradients = [values(shape, seed + 1 + step) for step in range(2)]
    optimizer = RULES[rule].make([whole], **options)
    exchange, shards = ThreadExchange(len(ends) - 1), shards_of(shape, ends)

    def run(rank: int) -> dict[str, Tensor]:
        shard = shards[rank]
        shard.exchange = exchange
        param = Parameter(start[shard.start : shard.end].clone())
        assign(param, shard)
        own = RULES[rule].make([param], **options)
        for gradient in gradients:
            if param.numel():
                param.grad = gradient.flatten()[shard.start : shard.end].clone()
            own.step()
        return {"param": param.detach(), **own.state[param]}

    for gradient in gradients:
        whole.grad = gradient
        optimizer.step()
    grid = BlockGrid(shape, block_size)
    for shard, got in zip(shards, on_threads(exchange, len(shards), run), strict=True):
        expected = state_of_part(optimizer.state[whole], shard, grid) if shard.numel else {}
        assert_same(got, {"param": whole.detach().flatten()[shard.start : shard.end], **expected})
    comparisons = 1  # of the plans, before the first step
    assert exchange.calls == comparisons + (rounds * len(gradients) if shards[0].cut_blocks(grid) else 0)


#: Quantized or not, ranges that begin and end within blocks, at none, and empty ones; with padding between.
SEGMENTS: list[tuple[Shape, int, int]] = [
    ((3, 130), 100, 390),
    ((97,), 0, 97),
    ((70, 33), 0, 0),
    ((2, 257), 16, 17),
    ((1, 64), 0, 64),
    ((3,), 1, 1),
]


def buffer_state(options: dict[str, Any], dtype: torch.dtype, padding: int = 3) -> TensorState:
    segments, at = [], 0
    for place, (shape, start, end) in enumerate(SEGMENTS):
        segments.append(Segment(f"weight{place}", place, FlatShard(shape, start, end), at if end > start else 0))
        at += end - start + padding
    optimizer = RULES["adamw"].make([Parameter(torch.zeros(1, dtype=dtype))], min_quantized_numel=64, **options)
    group = optimizer.param_groups[0]
    return TensorState.of(FlatBuffer(at, segments), dtype, group, optimizer.rule(group).moments)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"codec": "log8"}, torch.float32),
        ({"codec": "companded8", "block_size": 16}, torch.float32),
        ({"codec": "fp32"}, torch.float32),
        ({"codec": "bf16"}, torch.bfloat16),
        ({"codec": "log8", "master_weight_bits": 24}, torch.bfloat16),
        ({"codec": "dynamic8", "master_weight_bits": 32}, torch.bfloat16),
    ],
)
def test_a_buffers_state_is_that_of_its_parameters(options: dict[str, Any], dtype: torch.dtype) -> None:
    """In views, each of which shares its memory with the buffer's state and with no other parameter's."""
    spec = buffer_state(options, dtype)
    state, param = spec.new(torch.device("cpu")), torch.zeros(spec.shard.local_shape, dtype=dtype)
    assert state.keys() == spec.state_names
    parts = spec.split(state)
    for (shape, start, end), (own, *_), part in zip(SEGMENTS, spec.slices, parts, strict=True):
        assert_same(part, own.new(torch.device("cpu")))
        blocks = len(set(block_numbers(shape, own.grid.block_size)[start:end]))
        quantized = len(shape) > 1 and own.codec.blockwise
        assert ("exp_avg_codes" in part) is quantized
        for key, value in part.items():
            lengths = {"step": (), "exp_avg_scales": (blocks,), "exp_avg_sq_scales": (blocks,)}
            assert value.shape[:1] == lengths.get(key, (end - start,)), key
    for number, (own, part) in enumerate(zip(spec.parts(param, state), parts, strict=True)):
        own.param.fill_(number + 1)
        for key, value in part.items():
            if key != "step":
                value.fill_(number + 1)
    assert [(param == place + 1).sum() for place in range(len(SEGMENTS))] == [end - start for _, start, end in SEGMENTS]
    for key, value in state.items():
        if key != "step":
            own = [part.get(key.removesuffix("_bf16")) for part in parts]
            lengths = [x.numel() if x is not None and x.dtype == value.dtype else 0 for x in own]
            numbers = [number + 1.0 for number, length in enumerate(lengths) for _ in range(length)]
            assert value.float().reshape(-1).tolist() == numbers, key
    assert_same(spec.join(parts), state)
