"""Flat shards against brute force: where each element's block lies, who shares it, and who is to write it."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import threading
from collections.abc import Sequence
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
from shardopt.layout import BlockGrid, FlatBuffer, FlatShard, Segment, assign, assign_later, assigned
from shardopt.optim import ShardedOptimizer
from shardopt.state.flat_encoding import encode_flat
from shardopt.state.slice_spec import SliceSpec
from shardopt.state.tensor_state import TensorState, tensor_state_of

BLOCKWISE = ("log8", "companded8", "dynamic8")

shapes = st.one_of(
    st.tuples(st.integers(1, 6), st.integers(1, 150)),
    st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 300)),
)
#: Rows long enough to be quantized.
matrices = st.one_of(
    st.tuples(st.integers(1, 5), st.integers(32, 150)),
    st.tuples(st.integers(1, 4), st.integers(4, 9), st.integers(8, 17)),
)
block_sizes = st.sampled_from([16, 32, 128])


def block_numbers(shape: Shape, block_size: int) -> list[int]:
    """For every element the number of its block: rows are cut into blocks, which are counted row by row."""
    numbers, number = [], -1
    for _ in range(shape[0]):
        for col in range(math.prod(shape[1:])):
            number += col % block_size == 0
            numbers.append(number)
    return numbers


def ends_of(numel: int) -> st.SearchStrategy[list[int]]:
    """Where the ranges of 1 to 5 ranks end; some are empty."""
    return st.lists(st.integers(0, numel), max_size=4).map(lambda cuts: [0, *sorted(cuts), numel])


@st.composite
def splits(draw: st.DrawFn, kind: st.SearchStrategy[Shape] = shapes) -> tuple[Shape, int, list[int]]:
    """A shape, a block size, and a split of the flattened parameter."""
    shape = draw(kind)
    return shape, draw(block_sizes), draw(ends_of(math.prod(shape)))


def shards_of(shape: Shape, ends: Sequence[int], exchange: ThreadExchange | None = None) -> list[FlatShard]:
    cuts = sorted({end for end in ends if 0 < end < math.prod(shape)})
    return [FlatShard(shape, a, b, cuts, exchange) for a, b in itertools.pairwise(ends)]


@settings(deadline=None)
@given(splits())
def test_bands_hold_each_element_once_in_its_block(drawn: tuple[Shape, int, list[int]]) -> None:
    shape, block_size, ends = drawn
    grid, numbers = BlockGrid(shape, block_size), block_numbers(shape, block_size)
    for shard in shards_of(shape, ends):
        mine = numbers[shard.start : shard.end]
        found: list[tuple[int, int, int]] = []  # element here, in the parameter, its block here
        for rectangle in shard.rectangles(grid):
            assert (shard.start + rectangle.element) // grid.row_numel * grid.row_numel + rectangle.first_col == (
                shard.start + rectangle.element
            )
            for row in range(rectangle.rows):
                for col in range(rectangle.cols):
                    at = row * rectangle.cols + col
                    block = (rectangle.first_col + col) // block_size - rectangle.first_col // block_size
                    here = rectangle.block + row * rectangle.blocks_stride + block
                    found.append((rectangle.element + at, (shard.start + rectangle.element) + at, here))
        first = mine[0] if mine else 0
        assert found == [(i, shard.start + i, number - first) for i, number in enumerate(mine)]
        assert shard.blocks(grid) == ((first, mine[-1] + 1) if mine else (0, 0))
        assert shard.scales_shape(grid) == (len(set(mine)),)
        assert len(shard.rectangles(grid)) <= 3


@settings(deadline=None)
@given(splits())
def test_pieces_are_cut_where_others_hold_the_rest(drawn: tuple[Shape, int, list[int]]) -> None:
    shape, block_size, ends = drawn
    grid, numbers = BlockGrid(shape, block_size), block_numbers(shape, block_size)
    whole = {number: numbers.count(number) for number in set(numbers)}
    for shard in shards_of(shape, ends):
        for rectangle in shard.rectangles(grid):
            for piece in rectangle.divided(grid):
                begin = shard.start + piece.element
                for row in range(rectangle.rows):
                    inside = numbers[begin + row * grid.row_numel :][: piece.cols]
                    complete = [inside.count(number) == whole[number] for number in set(inside)]
                    assert not any(complete) if piece.cut else all(complete)
                    assert not piece.cut or len(set(inside)) == 1


@settings(deadline=None)
@given(splits())
def test_cut_blocks_are_those_with_several_owners(drawn: tuple[Shape, int, list[int]]) -> None:
    shape, block_size, ends = drawn
    grid, numbers = BlockGrid(shape, block_size), block_numbers(shape, block_size)
    shards = shards_of(shape, ends)
    owners: dict[int, set[int]] = {}
    for rank, shard in enumerate(shards):
        for number in numbers[shard.start : shard.end]:
            owners.setdefault(number, set()).add(rank)
    shared = sorted(number for number, ranks in owners.items() if len(ranks) > 1)
    assert all(shard.cut_blocks(grid) == shared for shard in shards)
    assert all(shard.cut_blocks(grid) == shared for shard in shards), "the second answer is another"
    written = [n for shard in shards for n in range(shard.first_written_block(grid), shard.blocks(grid)[1])]
    assert sorted(written) == sorted(owners), "each block is to be written once"
    for rank, shard in enumerate(shards):
        firsts = [number for number in owners if shard.start <= numbers.index(number) < shard.end]
        written = list(range(shard.first_written_block(grid), shard.blocks(grid)[1]))
        assert written == sorted(firsts), f"rank {rank} is to write the blocks whose first element it holds"


@settings(deadline=None)
@given(splits())
def test_grid_counts_blocks_as_they_lie(drawn: tuple[Shape, int, list[int]]) -> None:
    shape, block_size, _ = drawn
    grid, numbers = BlockGrid(shape, block_size), block_numbers(shape, block_size)
    assert [grid.block_of(element) for element in range(len(numbers))] == numbers
    assert [grid.first_element(number) for number in sorted(set(numbers))] == [
        numbers.index(number) for number in sorted(set(numbers))
    ]


def test_empty_shards_hold_no_blocks() -> None:
    grid = BlockGrid((3, 40), 16)
    for shard in (FlatShard((3, 40), 0, 0), FlatShard((3, 40), 120, 120), FlatShard((3, 40), 7, 5)):
        assert shard.local_shape == (0,)
        assert shard.rectangles(grid) == []
        assert shard.blocks(grid) == (0, 0)
        assert shard.scales_shape(grid) == (0,)
        assert list(range(shard.first_written_block(grid), shard.blocks(grid)[1])) == []
    nothing = FlatShard((0, 40), 0, 0)
    assert nothing.rectangles(BlockGrid((0, 40), 16)) == nothing.cut_blocks(BlockGrid((0, 40), 16)) == []


def make(params: Any, rule: str, codec: str, block_size: int, **options: Any) -> ShardedOptimizer:
    return RULES[rule].make(params, codec=codec, block_size=block_size, min_quantized_numel=0, **options)


def state_of_part(state: dict[str, Tensor], shard: FlatShard, grid: BlockGrid) -> dict[str, Tensor]:
    """The part of a whole parameter's state that a flat shard has."""
    first, end = shard.blocks(grid)
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if key == "step":
            found[key] = value
        elif key.endswith("_scales"):
            found[key] = value.reshape(grid.rows * grid.blocks_per_row, *value.shape[2:])[first:end]
        else:
            behind = value.shape[len(grid.global_shape) :]
            found[key] = value.reshape(math.prod(grid.global_shape), *behind)[shard.start : shard.end]
    return found


@settings(deadline=None, max_examples=25)
@given(drawn=splits(matrices), seed=st.integers(0, 1000))
@pytest.mark.parametrize("codec", BLOCKWISE)
@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_steps_as_whole(rule: str, codec: str, drawn: tuple[Shape, int, list[int]], seed: int) -> None:
    """Every split takes the steps of the whole, bit for bit; ranks whose range is empty take part."""
    shape, block_size, ends = drawn
    whole = Parameter(values(shape, seed))
    gradients = [values(shape, seed + 1 + step) for step in range(2)]
    optimizer = make([whole], rule, codec, block_size)
    exchange = ThreadExchange(len(ends) - 1)
    shards = shards_of(shape, ends, exchange)
    start = whole.detach().clone().reshape(-1)

    def run(rank: int) -> dict[str, Tensor]:
        shard = shards[rank]
        param = Parameter(start[shard.start : shard.end].clone())
        assign(param, shard)
        own = make([param], rule, codec, block_size)
        for gradient in gradients:
            if param.numel():
                param.grad = gradient.reshape(-1)[shard.start : shard.end].clone()
            own.step()
        return {"param": param.detach(), **own.state[param]}

    for gradient in gradients:
        whole.grad = gradient
        optimizer.step()
    grid = BlockGrid(shape, block_size)
    shared = shards[0].cut_blocks(grid)
    for shard, got in zip(shards, on_threads(exchange, len(shards), run), strict=True):
        expected = state_of_part(optimizer.state[whole], shard, grid)
        if shard.start == shard.end:
            expected = {}
        assert_same(got, {"param": whole.detach().reshape(-1)[shard.start : shard.end], **expected})
    rounds = 2 if (rule, codec) == ("adamw", "log8") else 1
    comparisons = 1  # of the plans, before the first step
    assert exchange.calls == comparisons + (rounds * len(gradients) if shared else 0)


@settings(deadline=None, max_examples=25)
@given(drawn=splits(matrices), seed=st.integers(0, 1000))
@pytest.mark.parametrize("codec", BLOCKWISE)
@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_float_moments_are_coded_as_whole(
    rule: str, codec: str, drawn: tuple[Shape, int, list[int]], seed: int
) -> None:
    shape, block_size, ends = drawn
    exchange = ThreadExchange(len(ends) - 1)
    group = make([Parameter(torch.zeros(shape))], rule, codec, block_size).param_groups[0]
    moments = make([Parameter(torch.zeros(1))], rule, codec, block_size).rule(group).moments
    x = [values(shape, seed + k) if m.signed else values(shape, seed + k).abs() for k, m in enumerate(moments)]
    x = [torch.where(y == 0, -0.0, y) if m.signed else y for y, m in zip(x, moments, strict=True)]
    whole = tensor_state_of(Parameter(torch.zeros(shape)), group, moments)
    expected = whole.encode({m.name: y for m, y in zip(moments, x, strict=True)})
    shards = shards_of(shape, ends, exchange)
    specs = [SliceSpec.of(shard, torch.float32, group, moments) for shard in shards]

    def run(rank: int) -> dict[str, Tensor] | None:
        begin, end = shards[rank].start, shards[rank].end
        own = [y.reshape(-1)[begin:end] for y in x] if end > begin else None
        return encode_flat([specs[rank]], [own])[0]

    for shard, spec, got in zip(shards, specs, on_threads(exchange, len(shards), run), strict=True):
        if shard.start == shard.end:
            assert got is None
            continue
        assert got is not None
        assert_same(got, state_of_part(expected, shard, spec.grid))
        part = whole.decode(expected)
        decoded = dict(zip(part, spec.decode(got), strict=True))
        assert_same(decoded, {k: v.reshape(-1)[shard.start : shard.end] for k, v in part.items()})


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


OPTIONS: list[tuple[dict[str, Any], torch.dtype]] = [
    ({"codec": "log8"}, torch.float32),
    ({"codec": "companded8", "block_size": 16}, torch.float32),
    ({"codec": "fp32"}, torch.float32),
    ({"codec": "bf16"}, torch.bfloat16),
    ({"codec": "log8", "master_weight_bits": 24}, torch.bfloat16),
    ({"codec": "dynamic8", "master_weight_bits": 32}, torch.bfloat16),
]


@pytest.mark.parametrize(("options", "dtype"), OPTIONS)
def test_buffer_state_splits_into_that_of_its_parameters(options: dict[str, Any], dtype: torch.dtype) -> None:
    spec = buffer_state(options, dtype)
    state = spec.new(torch.device("cpu"))
    assert state.keys() == spec.state_names
    parts = spec.split(state)
    for (shape, start, end), (own, *_), part in zip(SEGMENTS, spec.slices, parts, strict=True):
        fresh = own.new(torch.device("cpu"))
        assert_same(part, fresh)
        blocks = len(set(block_numbers(shape, own.grid.block_size)[start:end]))
        quantized = len(shape) > 1 and math.prod(shape) >= 64 and own.codec.blockwise
        assert ("exp_avg_codes" in part) is quantized
        for key, value in part.items():
            lengths = {"step": None, "exp_avg_scales": blocks, "exp_avg_sq_scales": blocks}
            expected = lengths.get(key, end - start)
            assert expected is None or value.shape[0] == expected, key
    for number, part in enumerate(parts):  # views: what is written to one part stands in the buffer's state, once
        for key, value in part.items():
            if key != "step":
                value.fill_(number + 1)
    for key, value in state.items():
        if key != "step":
            own = [part.get(key.removesuffix("_bf16")) for part in parts]
            lengths = [x.numel() if x is not None and x.dtype == value.dtype else 0 for x in own]
            numbers = [number + 1.0 for number, length in enumerate(lengths) for _ in range(length)]
            assert value.float().reshape(-1).tolist() == numbers, key
    assert_same(spec.join(parts), state)


@pytest.mark.parametrize(("options", "dtype"), OPTIONS)
def test_buffer_parts_are_the_parameters_elements(options: dict[str, Any], dtype: torch.dtype) -> None:
    spec = buffer_state(options, dtype)
    state = spec.new(torch.device("cpu"))
    param = torch.zeros(spec.shard.local_shape, dtype=dtype)
    for (shape, start, end), part in zip(SEGMENTS, spec.parts(param, state), strict=True):
        part.param.fill_(part.number + 1)
        assert part.spec.shard.global_shape == shape
        assert part.param.numel() == end - start
        assert end == start or part.param.data_ptr() == param[part.first :].data_ptr()
    counts = [(param == place + 1).sum().item() for place in range(len(SEGMENTS))]
    assert counts == [end - start for _, start, end in SEGMENTS]


@pytest.mark.parametrize("codec", ["log8", "companded8", "dynamic8", "fp32"])
def test_buffer_decodes_its_parameters(codec: str) -> None:
    spec = buffer_state({"codec": codec}, torch.float32)
    parts = []
    for place, (own, *_) in enumerate(spec.slices):
        numel = own.shard.local_shape[0]
        parts.append(own.encode_local([values((numel,), place), values((numel,), place + 50).abs()]))
    state = {"step": torch.ones(()), **spec.join(parts)}
    decoded = spec.decode(state)
    inside = torch.zeros(spec.shard.local_shape, dtype=torch.bool)
    for each, part in zip(spec.slices, parts, strict=True):
        own = dict(zip(decoded, each.spec.decode(part), strict=True))
        assert_same({key: each.of(value) for key, value in decoded.items()}, own)
        each.of(inside).fill_(True)
    assert all(not value[~inside].any() for value in decoded.values()), "padding is not zero"


def test_a_parameter_is_pickled_without_its_shard() -> None:
    """Frameworks put parameters into their checkpoints; a shard knows of process groups, which cannot be pickled."""
    param = Parameter(torch.arange(6.0))
    assign(param, FlatShard((2, 6), 0, 6, (6,), exchange=threading.Lock()))  # type: ignore[arg-type]
    assert assigned(pickle.loads(pickle.dumps(param))) is None
    assert assigned(copy.deepcopy(param)) in (None, assigned(param))
    assign_later([param], threading.Lock().acquire)
    assert assigned(pickle.loads(pickle.dumps(param))) is None
