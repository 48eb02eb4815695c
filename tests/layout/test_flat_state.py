"""Steps of flat shards, as under FSDP1 and ZeRO: those of whole parameters, wherever ranges are cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from helpers import RULES
from ranks.layouts import Shape, values
from ranks.snapshot import assert_same
from ranks.threads import ThreadExchange, on_threads
from shardopt.layout import BlockGrid, FlatShard, assign
from test_blocks import shards_of, splits

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
